"""hunch chat: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from hunch.cli import options as o


def chat(
    model: o.Model = o.DEFAULT_MODEL,
    speculate: o.Speculate = "auto",
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    max_tokens: o.MaxTokens = 512,
    temperature: o.Temperature = 0.0,
    top_p: o.TopP = 1.0,
    seed: o.Seed = None,
    threads: o.Threads = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
) -> None:
    """Talk with a model; an empty line or Ctrl-D ends it."""
    from hunch.cli.trace import show_stats

    llm = o.open_llm(model, speculate, threads=threads, dtype=dtype, device=device, max_num_seqs=1)
    params = o.sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    messages = [{"role": "system", "content": system}] if system else []
    console = Console(stderr=True)
    while True:
        question = _ask(console)
        if not question:
            break
        messages.append({"role": "user", "content": question})
        shown = 0
        for output in llm.stream(llm.encode_chat(messages), params):
            answer = output.outputs[0]
            sys.stdout.write(answer.text[shown:])
            sys.stdout.flush()
            shown = len(answer.text)
        print()
        show_stats(answer.stats)
        messages.append({"role": "assistant", "content": answer.text})


def _ask(console: Console) -> str:
    try:
        if sys.stdin.isatty():
            console.print("[bold]you[/bold] ", end="")
        return input().strip()
    except (EOFError, KeyboardInterrupt):
        return ""
