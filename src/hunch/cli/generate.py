"""hunch generate: one answer, with its figures; --trace shows every guess and its fate."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from hunch.cli import options as o
from hunch.errors import RequestError


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")],
    model: o.Model = o.DEFAULT_MODEL,
    speculate: o.Speculate = "auto",
    verifier: o.Verifier = "exact",
    always_draft: o.AlwaysDraft = False,
    chat: Annotated[bool, typer.Option(help="Apply the model's chat template.")] = False,
    max_tokens: o.MaxTokens = 128,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    top_k: o.TopK = 0,
    min_p: o.MinP = 0.0,
    seed: o.Seed = None,
    stop: o.Stop = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past end-of-text.")] = False,
    threads: o.Threads = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    trace: Annotated[bool, typer.Option(help="Print every step: guesses and their fate.")] = False,
    as_json: o.Json = False,
) -> None:
    """Generate text from a prompt."""
    from hunch import Speculation
    from hunch.cli.trace import show_stats, show_trace

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text:
        raise RequestError("the prompt is empty")
    params = o.sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        stop=stop,
        ignore_eos=ignore_eos,
        speculation=Speculation(trace=trace),
    )
    llm = o.open_llm(
        model,
        speculate,
        quiet=as_json,
        verifier=verifier,
        always_draft=always_draft,
        threads=threads,
        dtype=dtype,
        device=device,
        max_num_seqs=1,
    )
    ids = llm.encode_chat([{"role": "user", "content": text}]) if chat else None
    shown = 0
    for output in llm.stream(ids or text, params):
        answer = output.outputs[0]
        if not as_json and not trace:
            sys.stdout.write(answer.text[shown:])
            sys.stdout.flush()
            shown = len(answer.text)
    if as_json:
        found: dict[str, Any] = {
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "seed": answer.seed,
            "stats": answer.stats,
        }
        if trace:
            found["trace"] = [asdict(step) for step in answer.trace or []]
        print(json.dumps(found))
        return
    if trace:
        show_trace(llm.tokenizer, answer)
    print()
    show_stats(answer.stats)
