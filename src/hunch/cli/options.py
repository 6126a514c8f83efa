"""Options several commands share, how help lists them, and what they turn into."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial, wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from hunch.config import DEFAULT_MODEL, SpecConfig
from hunch.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from hunch import LLM, SamplingParams

Given = TypeVar("Given", contravariant=True)
T = TypeVar("T")
ENGINE, SAMPLING = "Engine", "Sampling"  # headings that help lists options under

Model = Annotated[
    str, typer.Option("--model", "-m", help="A known name, a directory, a .gguf file or a hub id.")
]
ModelName = Annotated[str | None, typer.Argument(metavar="MODEL", help="As --model.")]
Speculate = Annotated[
    str,
    typer.Option(
        metavar="METHOD",
        help="What guesses: NAME[:PATH][:KEY=VALUE]..., e.g. ngram:max_match=4. auto takes lookups "
        "and, where it pays, a drafter: yours, or the one that comes with hunch.",
    ),
]
VERIFIER_HELP = (
    "How drafts are verified. exact: the text of plain decoding; rejection, block: the same "
    "chances, other text; typical: LOSSY, the text no longer follows the model."
)
AlwaysDraft = Annotated[
    bool,
    typer.Option(
        "--always-draft",
        help="Draft whether it pays or not: the same guesses and figures in every run.",
    ),
]
Verifier = Annotated[str, typer.Option(help=VERIFIER_HELP)]
MaxTokens = Annotated[
    int, typer.Option(help="Generate at most N tokens.", min=1, rich_help_panel=SAMPLING)
]
Temperature = Annotated[
    float,
    typer.Option(help="0 always takes the likeliest token.", min=0.0, rich_help_panel=SAMPLING),
]
TopP = Annotated[
    float,
    typer.Option(
        help="Keep the likeliest tokens that together have this probability.",
        rich_help_panel=SAMPLING,
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Same seed, same text.", min=0, rich_help_panel=SAMPLING)
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help="JSON lines or CSV with `turns` (chat template on the first) or `prompt` (raw); or a "
        ".txt file with a question in every line. Also as .gz or .xz, or in parquet."
    ),
]

Threads = Annotated[
    int | None,
    typer.Option(
        help="CPU threads; default: OMP_NUM_THREADS, or the cores.", min=1, rich_help_panel=ENGINE
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=ENGINE)]
ActivationBits = Annotated[
    str,
    typer.Option(
        metavar="BITS",
        rich_help_panel=ENGINE,
        help="Bits of activations beside quantised weights on a CPU: 8 is faster, 14 nearer to "
        "float32; auto takes 14 for small models.",
    ),
]

__all__ = ["DEFAULT_MODEL"]


def option(usual: T, help_text: str, *names: str, **how: Any) -> T:
    """A field of a command's options: its default, and what help says of it.

    `names` are for those that are not called as the field is, and for flags without a --no-NAME.
    """
    return field(default=usual, metadata={"option": typer.Option(*names, help=help_text, **how)})


engine_option = partial(option, rich_help_panel=ENGINE)
sampling_option = partial(option, rich_help_panel=SAMPLING)


@dataclass(kw_only=True)
class FilterOptions:
    """Which tokens may be chosen, and where a text ends."""

    top_p: TopP = 1.0
    top_k: int = sampling_option(0, "Keep the K likeliest tokens; 0: all.")
    min_p: float = sampling_option(
        0.0, "Drop tokens with less than this share of the likeliest one's probability."
    )
    stop: list[str] | None = sampling_option(None, "End before this text; may be repeated.")


@dataclass(kw_only=True)
class EngineOptions:
    """How a model is held."""

    threads: Threads = None
    dtype: str = engine_option(
        "auto", "auto, float32, bfloat16, float16, int8, int4, or fp8 on a GPU."
    )
    kv_cache_dtype: str = engine_option(
        "auto", "Of keys and values: auto, or fp8 or int8 for half the memory."
    )
    device: Device = "auto"
    activation_bits: ActivationBits = "auto"

    def engine(self) -> dict[str, Any]:
        """Arguments of an LLM."""
        return {one.name: getattr(self, one.name) for one in fields(EngineOptions)}


_HINTS = "__annotations__"


class _Command(Protocol[Given]):
    __name__: str

    def __call__(self, ctx: typer.Context, given: Given, /) -> None: ...


def takes(options_class: type[Given]) -> Callable[[_Command[Given]], Callable[..., None]]:
    """For a command that gets its options as an object: every field of the class is one of them."""
    hints = get_type_hints(options_class, include_extras=True)
    for one in fields(options_class):  # type: ignore[arg-type]
        if told := one.metadata.get("option"):
            hints[one.name] = Annotated[hints[one.name], told]
    params = [Parameter("ctx", Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    # The class's own first, then those of its bases, as they are listed.
    for name in dict.fromkeys(n for c in options_class.__mro__ for n in vars(c).get(_HINTS, ())):
        default = getattr(options_class, name, Parameter.empty)
        hint = hints[name]
        params.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    def extend(command: _Command[Given]) -> Callable[..., None]:
        @wraps(command)
        def run(ctx: typer.Context, **given: Any) -> None:
            command(ctx, options_class(**given))

        run.__signature__ = Signature(params)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in params}
        return run

    return extend


class Listed:
    """Lists options under their headings, a word for each kind of value, at any width."""

    VALUES = (  # as different releases of typer write them
        (r"<(?:list\[)?int[^>]*>|INTEGER( RANGE)?", "N"),
        (r"<(?:list\[)?float[^>]*>|FLOAT( RANGE)?", "X"),
        (r"<path>", "PATH"),
        (r"<(?:list\[)?str[^>]*>", "TEXT"),
    )

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        pieces = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [piece.strip("{}").upper() for piece in pieces]  # typer's own way is {prompt}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):  # type: ignore[attr-defined]
            record = param.get_help_record(ctx)
            if record is None:
                continue
            flags, text = record
            is_argument = param.param_type_name == "argument"
            for pattern, word in self.VALUES:
                flags = re.sub(pattern, "" if is_argument else word, flags)
            if is_argument:
                flags = flags.strip("[] ").upper()
            usual = "Arguments" if is_argument else "Options"
            heading = getattr(param, "rich_help_panel", None) or usual
            sections.setdefault(heading, []).append((flags, text))
        for heading, records in ((heading, some) for heading, some in sections.items() if some):
            with formatter.section(heading):
                formatter.write_dl(records)


class Command(Listed, TyperCommand):
    pass


class Group(Listed, TyperGroup):
    def format_options(self, ctx: Any, formatter: Any) -> None:
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)


def open_llm(model: str, speculate: str, *, quiet: bool = False, **arguments: Any) -> LLM:
    """Load a model, with a word to the user while it takes a moment."""
    from rich.console import Console

    from hunch import LLM

    if quiet:
        return LLM(model, speculate=speculate, **arguments)
    with Console(stderr=True).status(f"loading {model}"):
        return LLM(model, speculate=speculate, **arguments)


def read_prompts(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """The prompts of a file, each with an id; a broken one is named."""
    from hunch.train.prompts import prompts_in, text_fault

    records: list[dict[str, Any]] = []
    for place, why, record in prompts_in(path):
        if why := why or text_fault(record):
            raise RequestError(f"{path}, {place}: {why}")
        records.append({"id": place.split()[-1], **record})
        if limit is not None and len(records) >= limit:
            break
    if not records:
        raise RequestError(f"{path}: no prompts in it")
    return records


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


def one_model(ctx: typer.Context, name: str | None, model: str) -> str:
    """The model, by its place or by --model."""
    if name is not None and given_options(ctx, ("model",)):
        raise ConfigError(f"two models given: {name!r} and --model {model!r}; give one")
    return name or model


def words(text: str | None) -> tuple[str, ...]:
    """What stands between commas."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def numbers(
    name: str, text: str | None, number_type: type[int] | type[float], *, with_zero: bool = False
) -> tuple[Any, ...]:
    """Numbers above 0 between commas, or 0 too; none where the option was not given."""
    try:
        found = tuple(number_type(word) for word in words(text))
    except ValueError:
        found = ()
    if text is not None and not found:
        raise ConfigError(f"--{name} {text!r} must be numbers, commas between")
    if not all(0 < number < math.inf or (with_zero and number == 0) for number in found):
        least = "0 or more" if with_zero else "above 0"
        raise ConfigError(f"--{name} {text!r}: numbers must be {least}")
    return found


def sampling(options: object = None, **given: Any) -> SamplingParams:
    """Of those options that have a sampling parameter's name, and what else is given."""
    from hunch import SamplingParams

    known = SamplingParams.__dataclass_fields__
    own = {} if options is None else {n: v for n, v in vars(options).items() if n in known}
    return SamplingParams(**{n: value for n, value in (own | given).items() if value is not None})


def is_lossy(verifier: str) -> bool:
    return SpecConfig(verifier=verifier).is_lossy
