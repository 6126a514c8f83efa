"""Common words replayed: tokens per pass of a target's own answers, by the tree that is checked.

The target answers the prompts in plain decoding. Then each answer is gone through again: in every
step a lookup guesses 7 tokens from the request's own text, and a tree of likely successors is
checked beside them, with so many nodes on each level. Nothing is timed, and nothing is learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hunch import LLM, SamplingParams
from hunch.bench.parts import PartOptions
from hunch.bench.readers import read_workloads
from hunch.config import DEFAULT_MODEL
from hunch.drafting.common_words import common_successors
from hunch.kernels.lookup import MAX_MATCH, SuffixText
from hunch.kernels.successors import Successors

CHAIN = 7  # guesses from the request's own text
TREES = ((), (1,) * CHAIN, (3, 1), (5, 3, 1), (8, 4, 2, 2), (8, 8, 5, 3))  # nodes of each level
Path = tuple[int, ...]


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("successors", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--prompts", default="mixed", help="a workload or a file")
    parser.add_argument("--limit", type=int, default=48, help="of the prompts")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer, at most")
    given = parser.parse_args(words)
    params = SamplingParams(temperature=0, max_tokens=given.tokens)
    with LLM(given.model, speculate="off", max_num_seqs=8) as llm:
        prompts = [p.encode(llm) for p in read_workloads(given.prompts, given.limit)]
        outputs = llm.generate(prompts, params)
        size = llm.engine.capacity.vocab_size
        assert size is not None
        successors = Successors.create(size, "cpu", common_successors(llm.get_tokenizer(), size))
    texts = [(out.prompt_token_ids, out.outputs[0].token_ids) for out in outputs]
    print("| nodes on each level | tokens per pass | nodes checked |\n|---|---|---|")
    for widths in TREES:
        drafts = [draft for text in texts for draft in replay(*text, successors, widths)]
        tokens, nodes = (sum(column) / len(drafts) for column in zip(*drafts, strict=True))
        print(f"| {'-'.join(map(str, widths)) or 'lookup alone'} | {tokens:.2f} | {nodes:.1f} |")
    pairs = [text for prompt, answer in texts for text in guesses(prompt, answer, successors)]
    first, any_of = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    print(
        f"the likeliest successor is right for {first:.1%} of the tokens, one of 8 for {any_of:.1%}"
    )


def replay(
    prompt: list[int], answer: list[int], successors: Successors, widths: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """Each step's tokens and checked nodes."""
    text = SuffixText()
    text.extend([*prompt, *answer[:1]])
    at = 1
    while at < len(answer):
        paths = {*chain(text), *tree(text.tokens, successors, widths)}
        count = 0
        while tuple(answer[at : at + count + 1]) in paths and at + count < len(answer):
            count += 1
        committed = answer[at : at + count + 1]
        yield len(committed), len(paths)
        text.extend(committed)
        at += len(committed)


def chain(text: SuffixText) -> Iterator[Path]:
    """The paths to the guesses of a lookup."""
    length, places = text.find(text.tokens[-MAX_MATCH:])
    found = text.tokens[places[0] : places[0] + CHAIN] if length else []
    for count in range(1, len(found) + 1):
        yield tuple(found[:count])


def tree(tokens: list[int], successors: Successors, widths: Sequence[int]) -> Iterator[Path]:
    """The paths to the successors: on each level the likeliest ones."""
    level: list[tuple[float, Path]] = [(1.0, ())]
    for width in widths:
        found = [
            (chance * share, (*path, token))
            for chance, path in level
            for token, share in successors.find(*[*tokens[-2:], *path][-2:])
        ]
        level = sorted(found, key=lambda one: -one[0])[:width]
        yield from (path for _, path in level)


def guesses(
    prompt: list[int], answer: list[int], successors: Successors
) -> Iterator[tuple[bool, bool]]:
    """Of each token: whether the likeliest successor is right, and whether one of 8 is."""
    text = [*prompt, *answer]
    for at in range(len(prompt) + 1, len(text)):
        found = sorted(successors.find(*text[at - 2 : at]), key=lambda one: -one[1])[:8]
        tokens = [token for token, _ in found]
        yield tokens[:1] == [text[at]], text[at] in tokens
