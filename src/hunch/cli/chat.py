"""hunch chat: a conversation in the terminal, streamed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hunch.cli import options as o
from hunch.cli.remote import answer_of
from hunch.errors import ConfigError

if TYPE_CHECKING:
    from hunch import LLM, SamplingParams


_LOCAL = ("model", "speculate", "threads", "dtype", "device")  # options of a model loaded here


def chat(
    ctx: typer.Context,
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
    server: Annotated[
        str | None, typer.Option(help="URL of a running server to talk with instead.")
    ] = None,
) -> None:
    """Talk with a model; an empty line or Ctrl-D ends it."""
    from hunch.cli.trace import show_stats

    sampling: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
    }
    answer: Callable[[list[dict[str, str]]], tuple[str, dict[str, Any]]]
    if server is not None:
        if given := o.given_options(ctx, _LOCAL):
            raise ConfigError(f"{given}: a server has its own; leave this out, or --server")
        answer = partial(answer_of, server, _show, **sampling)
    else:
        llm = o.open_llm(
            model, speculate, threads=threads, dtype=dtype, device=device, max_num_seqs=1
        )
        answer = partial(_local_answer, llm, o.sampling(**sampling))
    messages = [{"role": "system", "content": system}] if system else []
    console = Console(stderr=True)
    while question := _ask(console):
        messages.append({"role": "user", "content": question})
        text, stats = answer(messages)
        print()
        show_stats(stats)
        messages.append({"role": "assistant", "content": text})


def _local_answer(
    llm: LLM, params: SamplingParams, messages: list[dict[str, str]]
) -> tuple[str, dict[str, Any]]:
    shown = 0
    for output in llm.stream(llm.encode_chat(messages), params):
        answer = output.outputs[0]
        _show(answer.text[shown:])
        shown = len(answer.text)
    return answer.text, answer.stats


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ask(console: Console) -> str:
    try:
        if sys.stdin.isatty():
            console.print("[bold]you[/bold] ", end="")
        return input().strip()
    except (EOFError, KeyboardInterrupt):
        return ""
