"""Options several commands share, and what they turn into."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hunch.config import DEFAULT_MODEL, SpecConfig
from hunch.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from hunch import LLM, SamplingParams

Model = Annotated[
    str, typer.Option("--model", "-m", help="A known name, a directory, a .gguf file or a hub id.")
]
Speculate = Annotated[
    str,
    typer.Option(
        help="What drafts: NAME[:PATH][:KEY=VALUE]..., e.g. ngram:max_match=4. auto: lookups and, "
        "where it pays, a draft model (auto:draft=PATH, or the one that comes with hunch)."
    ),
]
VERIFIER_HELP = (
    "Who judges drafts. exact: the text of plain decoding; rejection, block: the same chances, "
    "other text; typical: LOSSY, the text no longer follows the model."
)
AlwaysDraft = Annotated[
    bool,
    typer.Option(help="Draft whether it pays or not: the same guesses and figures in every run."),
]
Verifier = Annotated[str, typer.Option(help=VERIFIER_HELP)]
MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.", min=1)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", min=0.0)]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens up to this mass.")]
TopK = Annotated[int, typer.Option(help="Keep the K likeliest tokens; 0: all.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.", min=0)]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads; default: OMP_NUM_THREADS, or the cores.", min=1)
]
Dtype = Annotated[
    str, typer.Option(help="auto, float32, bfloat16, float16, int8, int4, or fp8 on a GPU.")
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Prompts = Annotated[
    Path | None,
    typer.Option(help="JSON lines with `turns` (chat template on the first) or `prompt` (raw)."),
]

__all__ = ["DEFAULT_MODEL"]


def open_llm(model: str, speculate: str, *, quiet: bool = False, **arguments: Any) -> LLM:
    """Load a model, with a word to the user while it takes a moment."""
    from rich.console import Console

    from hunch import LLM

    if quiet:
        return LLM(model, speculate=speculate, **arguments)
    with Console(stderr=True).status(f"loading {model}"):
        return LLM(model, speculate=speculate, **arguments)


def read_prompts(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """Prompt records of a JSON-lines file, each with an id; a broken line is named."""
    if not path.is_file():
        raise RequestError(f"{path}: no such file")
    records: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise RequestError(f"{path}, line {number}: not JSON ({error})") from None
        if not _has_text(record):
            raise RequestError(f"{path}, line {number}: needs 'turns' or 'prompt' with text in it")
        records.append({"id": str(number), **record})
        if limit is not None and len(records) >= limit:
            break
    if not records:
        raise RequestError(f"{path}: no prompts in it")
    return records


def _has_text(record: Any) -> bool:
    if not isinstance(record, dict):
        return False
    turns = record.get("turns", [record.get("prompt")])
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], str) and bool(turns[0])


def prompt_ids(llm: LLM, record: dict[str, Any]) -> list[int]:
    """Token ids of a record: its first turn as it is served, or the raw prompt."""
    if "turns" in record:
        return llm.encode_turn(record["turns"][0])
    return llm.tokenizer.encode(record["prompt"])


def refuse(ctx: typer.Context, names: Sequence[str], reason: str) -> None:
    """An error where the user wrote one of these options: here they would change nothing."""
    if given := given_options(ctx, names):
        raise ConfigError(f"{given}: {reason}")


def given_options(ctx: typer.Context, names: Sequence[str]) -> str:
    """Those of these options that the user wrote, as they are written; else nothing."""
    sources = {name: ctx.get_parameter_source(name) for name in names}
    found = [name for name, source in sources.items() if source and source.name == "COMMANDLINE"]
    return ", ".join(f"--{name.replace('_', '-')}" for name in found)


def sampling(**given: Any) -> SamplingParams:
    from hunch import SamplingParams

    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def is_lossy(verifier: str) -> bool:
    return SpecConfig(verifier=verifier).is_lossy
