"""hunch generate: one answer, with its figures; --trace shows every guess and its fate."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hunch.cli import options as o
from hunch.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from hunch.types import CompletionOutput, RequestOutput


@dataclass(kw_only=True)
class Options(o.FilterOptions, o.EngineOptions):
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads standard input.")]
    model: o.Model = o.DEFAULT_MODEL
    speculate: o.Speculate = "auto"
    verifier: o.Verifier = "exact"
    always_draft: o.AlwaysDraft = False
    chat: bool = o.option(False, "Apply the model's chat template.", "--chat")
    system: str | None = o.option(None, "A system message; needs --chat.")
    trace: bool = o.option(
        False, "Print every step: what was guessed and what was kept.", "--trace"
    )
    as_json: o.Json = False
    max_tokens: o.MaxTokens = 128
    temperature: o.Temperature = 0.0
    seed: o.Seed = None
    ignore_eos: bool = o.sampling_option(False, "Go on past the end of text.", "--ignore-eos")


@o.takes(Options)
def generate(ctx: typer.Context, given: Options) -> None:
    """Generate text from a prompt."""
    from hunch import Speculation
    from hunch.cli.trace import show_stats, show_trace

    text = sys.stdin.read() if given.prompt == "-" else given.prompt
    if not text and given.prompt == "-":
        raise RequestError("the prompt is empty: nothing came from standard input")
    if given.system is not None and not given.chat:
        raise ConfigError("--system needs --chat: without it the prompt is given as it stands")
    params = o.sampling(given, speculation=Speculation(trace=given.trace))
    llm = o.open_llm(
        given.model, given.speculate, quiet=given.as_json, verifier=given.verifier,
        always_draft=given.always_draft, max_num_seqs=1, **given.engine(),
    )  # fmt: skip
    if given.chat and not llm.has_chat_template:
        raise ConfigError(
            f"--chat: {given.model} has no chat template; without it the text is continued"
        )
    ids = llm.encode_chat(_messages(given.system, text)) if given.chat else None
    is_quiet = given.as_json or given.trace
    answer = _write_as_it_comes(llm.stream(ids or text, params), is_quiet=is_quiet)
    if given.as_json:
        print(json.dumps(_as_json(answer, with_trace=given.trace)))
        return
    if given.trace:
        show_trace(llm.tokenizer, answer)
    print()
    show_stats(answer.stats)
    if not given.chat and llm.has_chat_template and is_over_at_once(answer):
        typer.echo("the model ended the text at once; to ask it a question, add --chat", err=True)


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    before = [] if system is None else [{"role": "system", "content": system}]
    return [*before, {"role": "user", "content": text}]


def _write_as_it_comes(outputs: Iterable[RequestOutput], *, is_quiet: bool) -> CompletionOutput:
    """The whole answer, in the end."""
    shown = 0
    for output in outputs:
        answer = output.outputs[0]
        if not is_quiet:
            sys.stdout.write(answer.text[shown:])
            sys.stdout.flush()
            shown = len(answer.text)
    return answer


def is_over_at_once(answer: CompletionOutput) -> bool:
    """Whether the model itself, and no stop string, ended a text before its first word."""
    is_own_end = answer.finish_reason == "stop" and answer.stop_reason is None
    return is_own_end and not answer.text.strip()


def _as_json(answer: CompletionOutput, *, with_trace: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "seed": answer.seed,
        "stats": answer.stats,
    }
    if with_trace:
        found["trace"] = [asdict(step) for step in answer.trace or []]
    return found
