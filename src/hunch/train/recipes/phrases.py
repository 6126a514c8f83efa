"""The phrase table of suffix lookup: counted, not trained; no GPU, no passes beyond the answers."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from hunch.hub import resolve as find_files
from hunch.kernels.phrases import PhraseTable
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.train.files import write_whole
from hunch.train.phrase_job import write_table
from hunch.train.phrases import Counting, make_table
from hunch.train.select import Measured, measure
from hunch.train.student import CountRecipe
from hunch.train.texts import Texts

ALWAYS = "suffix:num_nodes=3:adaptive=false"  # counts that do not depend on what rows cost here


def count_phrases(
    options: Counting,
    texts: Texts,
    test_ids: list[list[int]],
    out: Path,
    *,
    target: str,
    engine: dict[str, Any],
    data: str,
) -> Measured:
    """Count and write a table, then test suffix lookup with it on held-out prompts, on the CPU."""
    vocab_size = ModelSpec.from_config(open_weights(find_files(target)).config).vocab_size
    table = make_table(texts, vocab_size, options)
    write_table(out, save(table.files()), vocab_size)
    on_cpu = {**engine, "device": "cpu"}
    found, without = (
        measure(target, f"{ALWAYS}:phrases={phrases}", None, test_ids, arguments=on_cpu)
        for phrases in (out, "off")
    )
    text = card(table, options, texts, target=target, data=data, found=found, without=without)
    write_whole(out / "README.md", lambda part: part.write_text(text, "utf-8"))
    return found


def card(
    table: PhraseTable,
    options: Counting,
    texts: Texts,
    *,
    target: str,
    data: str,
    found: Measured,
    without: Measured,
) -> str:
    """What a reader of the directory learns."""
    num_answered = int((texts.lengths - texts.prompt_len).sum())
    recipe = "\n".join(f"- {f.name}: {getattr(options, f.name)}" for f in fields(options))
    return (
        f"# Phrase table for {target}\n\n"
        f"What {target} often writes after its last few tokens: {len(table.hash_E):,} contexts of "
        f"1 to {table.max_order} tokens, each with the token that follows it most often and how "
        "often. Suffix lookup guesses from it where the request's own text knows less; the target "
        "checks every guess, so the text is the target's own. It holds counts, no network, and "
        "nothing is added to it while it serves. Of no use beside another target; a GPU drafts "
        "without it.\n\n"
        f"Use: `hunch generate ... --model {target} --speculate suffix:phrases=DIRECTORY`\n\n"
        "## Measured\n\n"
        "Tokens per pass on held-out prompts, greedy, always 3 guesses: "
        f"{found.tokens_per_pass:.2f} with the table, {without.tokens_per_pass:.2f} without.\n\n"
        f"## Data\n\n{num_answered:,} tokens of the target's own answers. {data}\n\n"
        f"## Recipe\n\n{recipe}\n"
    )


RECIPE = CountRecipe(options=Counting, count=count_phrases)
