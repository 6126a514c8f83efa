"""vLLM's EngineArgs and SGLang's ServerArgs: an engine's arguments, and flags that give them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import make_dataclass
from enum import StrEnum
from typing import Any, Self, get_type_hints

from hunch.arguments import Arguments
from hunch.compat import (
    dashed,
    flags_as_arguments,
    json_or_text,
    known_names,
    known_to_sglang,
    number,
)
from hunch.config import DEFAULT_MODEL
from hunch.errors import ConfigError

_HINTS = get_type_hints(Arguments)
# hunch's own, most of them short words: a program may have flags of these names itself.
_NO_FLAGS = {"always_draft", "verifier", "threads", "kernels", "activation_bits", "depth", "lora"}
_NO_FLAGS |= {"engines_per_device", "max_queue", "num_blocks", "kv_bytes"}
_SHORT = {"tensor_parallel_size": "-tp", "pipeline_parallel_size": "-pp", "quantization": "-q"}
_SHORT |= {
    "data_parallel_size": "-dp",
    "tp_size": "--tp",
    "pp_size": "--pp",
    "model_path": "--model",
}


def _reader(name: str) -> Any:
    """bool, or what reads a flag's value."""
    hint: Any = _HINTS.get(name, str | None if name.startswith("model") else None)
    if hint == bool | None or (hint is None and name.startswith(("disable_", "enable_", "skip_"))):
        return bool
    return {int | None: number, float | None: float, str | None: str}.get(hint, json_or_text)


class _Kept:
    """Arguments as attributes; None where one was not given, as for `LLM`."""

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Flags for these arguments, None where they are not given."""
        group = parser.add_argument_group("engine")
        if isinstance(parser, FlexibleArgumentParser):
            parser.engine_names = set(cls.__dataclass_fields__)  # type: ignore[attr-defined]
        for name in sorted(set(cls.__dataclass_fields__) - _NO_FLAGS):  # type: ignore[attr-defined]
            flags = [f"--{name.replace('_', '-')}"]
            flags += [_SHORT[name]] if name in _SHORT else []
            read, usual = _reader(name), DEFAULT_MODEL if name == "model" else None
            how: dict[str, Any] = {"type": read}
            if read is bool:
                how = {"action": argparse.BooleanOptionalAction}
            group.add_argument(*flags, dest=name, default=usual, **how)
        return parser

    @staticmethod
    def is_switch(name: str) -> bool:
        """Whether the argument's flag takes no value."""
        return _reader(name) is bool

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Those of a program's arguments that are an engine's."""
        names = cls.__dataclass_fields__  # type: ignore[attr-defined]
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


def _fields(names: Sequence[str]) -> Any:
    return make_dataclass("Fields", [(name, Any, None) for name in names], bases=(_Kept,))


class EngineArgs(_fields(["model", *Arguments.__annotations__])):  # type: ignore[misc]
    """Arguments of an engine, for `from_engine_args` or, by dataclasses.asdict, for `LLM`."""

    def __init__(self, model: str = DEFAULT_MODEL, **arguments: Any) -> None:
        super().__init__(model=model, **known_names(arguments, set(self.__dataclass_fields__)))


class AsyncEngineArgs(EngineArgs):
    """The same, by its name beside `AsyncLLM`."""


class ServerArgs(_fields(sorted(known_to_sglang() - {"model"}))):  # type: ignore[misc]
    """SGLang's: arguments for `hunch.sglang.Engine`, by dataclasses.asdict or as `server_args`."""

    def __init__(self, model_path: str | None = None, **arguments: Any) -> None:
        known = known_names(arguments, set(self.__dataclass_fields__))
        super().__init__(model_path=model_path, **known)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """vLLM's: flags may have '_' for '-', and --flag.key VALUE is a key of a JSON object.

    Beside an engine's flags those of `vllm serve` that it has not mean what they mean there.
    """

    engine_names: Collection[str] = ()  # where it has an engine's flags: all its arguments

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = [dashed(word) for word in (sys.argv[1:] if args is None else args)]
        namespace, rest = super().parse_known_args(_bundled(words), namespace)
        if not self.engine_names:
            return namespace, rest
        try:
            meant, rest = flags_as_arguments(rest, self.engine_names)
        except ConfigError as error:
            self.error(str(error))
        vars(namespace).update(meant)
        return namespace, rest


def _bundled(words: Sequence[str]) -> list[str]:
    """--flag.key VALUE ... as one --flag with a JSON object, at the end."""
    rest, found, bundles = list(words), list[str](), dict[str, dict[str, Any]]()
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        name, dot, key = flag.partition(".")
        if not (dot and name.startswith("--")):
            found.append(flag + equals + value)
            continue
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        bundles.setdefault(name, {})[key.replace("-", "_")] = json_or_text(value)
    for name, keys in bundles.items():
        found += [name, json.dumps(keys)]
    return found


class UsageContext(StrEnum):
    """Who asks, as vLLM's counters have it; hunch counts nobody."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def check_plain(stat_loggers: Any, is_started: bool = True) -> None:
    """Raise for arguments of `from_engine_args` that ask for what is not here."""
    if stat_loggers:
        raise ConfigError("stat_loggers: get_metrics() and stats() have the figures")
    if not is_started:
        raise ConfigError("start_engine_loop=False: the engine waits for requests by itself")


def arguments_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's arguments, some of which may stand in a `server_args`."""
    rest = dict(given)
    args = rest.pop("server_args", None)
    return rest if args is None else {**args.given(), **rest}
