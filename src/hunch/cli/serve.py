"""hunch serve: an OpenAI-compatible server. Flags are the fields of its settings, and vLLM's."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import typer

from hunch.compat import config_from_vllm, known_arguments
from hunch.config import (
    DEFAULT_MODEL,
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
)
from hunch.errors import ConfigError

# How `serve` must be registered: it reads its own flags, so that vLLM's are taken too.
CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

_HELP = {
    "host": "Address to listen on; 0.0.0.0 is every one the machine has.",
    "port": "Port to listen on; 0 takes a free one.",
    "cors_origins": "A web origin that may call the API; may be repeated.",
    "max_queue": "Sequences that may wait; more get 429.",
    "replicas": "Engines, each with a copy of the model; requests that begin alike share one.",
    "request_timeout": "Seconds from a request's arrival to its last byte.",
    "drain_timeout": "Seconds that running requests get after SIGTERM.",
    "stats_interval": "Seconds between two status lines; 0: none.",
    "log_format": "text or json.",
    "log_level": "debug, info, warning or error.",
    "disable_log_requests": "Log no line for each request; failures are logged all the same.",
    "download_dir": "Where models are fetched to; default: the user's caches.",
    "prompt_log": "A file to add every prompt to, for hunch train --resume; default: none.",
    "allow_request_chat_template": "Let requests bring their own (sandboxed) chat template.",
    "allow_synthetic": "Serve with --speculate synthetic, whose drafts are made up: benchmarks.",
    "speculate": "What drafts: NAME[:PATH][:KEY=VALUE]...",
    "verifier": "Who judges drafts: exact, rejection, block (lossless) or typical (LOSSY).",
    "speculative_model": "vLLM's name for a drafter's path, or [ngram].",
    "num_speculative_tokens": "vLLM's name for the length of a draft.",
    "always_draft": "Draft whether it pays or not: the same guesses in every run.",
    "lora": "A LoRA adapter (PEFT's directory) to merge into the model.",
    "kv_events_config": "Tell routers by ZeroMQ which prefixes are cached: vLLM's JSON object.",
    "engines_per_device": "Engines that share a GPU's memory, this one among them.",
    "seed": "Seeds requests that bring none.",
    "max_model_len": "Longest prompt and answer together; default: the model's own.",
    "chat_template": "A template, or a file that holds one.",
    "tool_call_parser": "How tool calls are written (vLLM's names); auto: by the chat template.",
    "reasoning_parser": "How reasoning is marked (vLLM's names); auto: by the chat template.",
}
ADAPTING = {"auto", "suffix", "draft", "dspark"}  # methods that learn from what is served
_SWITCHES = (  # flags that take no value, most of them vLLM's
    "always_draft",
    "use_v2_block_manager",
    "enforce_eager",
    "enable_chunked_prefill",
    "disable_custom_all_reduce",
    "trust_remote_code",
    "speculative_disable_mqa_scorer",
    "disable_logprobs_during_spec_decoding",
    "worker_use_ray",
    "enable_auto_tool_choice",
    "enable_lora",
)
_ALIASES = {
    "tensor_parallel_size": ("-tp",),
    "pipeline_parallel_size": ("-pp",),
    "allow_request_chat_template": ("--trust-request-chat-template",),
}
_OWN = (
    "api_keys",
    "served_model_names",
    "limits",
    "death_grace",
    "models",
    "adapters",
    "has_page",
    "hides_guesses",
    "version",
)


def serve(ctx: typer.Context) -> None:
    """Serve a model over HTTP, as OpenAI does; --help lists the flags."""
    raise typer.Exit(run(ctx.args))


def run(words: Sequence[str]) -> int:
    """Start a server from command-line words; returns its exit code."""
    from hunch import __version__
    from hunch.server.settings import Limits, ServeConfig

    given = _parse([_dashed(word) for word in words])
    limits = Limits(**_take(given, Limits))
    settings = _take(given, ServeConfig)
    if given.pop("disable_log_stats", False):
        if settings.get("stats_interval"):
            raise ConfigError("--disable-log-stats and --stats-interval contradict each other")
        settings["stats_interval"] = 0.0
    by_flag, by_place = given.pop("model_flag", None), given.pop("model", [])
    if by_flag and by_place and by_place != [by_flag]:
        raise ConfigError(f"two models given: {by_place[0]!r} and --model {by_flag!r}; give one")
    (first, model), *others = map(_named, by_place or [by_flag or DEFAULT_MODEL])
    keys = given.pop("api_key", None) or _keys_from_environment()
    names = given.pop("served_model_name", None) or [first]
    adapters = map(_adapter, given.pop("lora_modules", None) or ())
    has_page = not given.pop("no_page", False)
    is_adapting = given.pop("adapt", False)
    config = _engine_config(model, given)
    if is_adapting:
        config = _adapting(config)
    for name in ("cors_origins", "allowed_hosts"):
        if name in settings:
            settings[name] = tuple(settings[name])
    try:
        from hunch.server.run import serve as serve_forever
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the server needs {error.name}, which is not installed; install hunch with its "
            "extra `serve` (in a checkout: pip install -e '.[serve]')"
        ) from None
    return serve_forever(
        config,
        ServeConfig(
            **settings,
            api_keys=tuple(keys),
            served_model_names=tuple(names),
            has_page=has_page,
            models=tuple(others),
            adapters=tuple(adapters),
            limits=limits,
            version=__version__,
        ),
    )


def _named(word: str) -> tuple[str, str]:
    """'NAME=MODEL', or a model that is its own name."""
    name, equals, model = word.partition("=")
    return (name, model) if equals and name and model else (word, word)


def _adapter(word: str) -> tuple[str, str]:
    """'NAME=PATH', or vLLM's {"name": NAME, "path": PATH}."""
    try:
        given = json.loads(word) if word.startswith("{") else {}
    except ValueError as error:
        raise ConfigError(f"--lora-modules {word}: not JSON ({error})") from None
    name, _, path = word.partition("=")
    if given:
        name, path = str(given.get("name") or ""), str(given.get("path") or "")
    if not name or not path:
        raise ConfigError(f"--lora-modules {word}: give NAME=PATH")
    if not (Path(path) / "adapter_config.json").is_file():
        raise ConfigError(
            f"--lora-modules {word}: {path} has no adapter_config.json; an adapter is a directory "
            "as PEFT writes it"
        )
    return name, path


def _parse(words: Sequence[str]) -> dict[str, Any]:
    """Flags by name; an unknown one is an error that names the nearest known one."""
    parser = _parser()
    given, unknown = parser.parse_known_args(words)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
        hint = f"; did you mean {near[0]}?" if near else "; --help lists the flags"
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return vars(given)


def _engine_config(model: str, given: dict[str, Any]) -> Config:
    template = given.get("chat_template")
    if template is not None and "{" not in template:
        path = Path(template)
        if not path.is_file():
            raise ConfigError(f"chat_template: {template!r} is neither a template nor a file")
        given["chat_template"] = path.read_text(encoding="utf-8")
    return config_from_vllm(model=model, **given)


def _adapting(config: Config) -> Config:
    spec = config.spec
    if spec.method not in ADAPTING:
        raise ConfigError(
            f"--adapt teaches lookups and drafters of `hunch train`, and speculate={spec.method!r} "
            f"is neither; use auto or one of {', '.join(sorted(ADAPTING))}"
        )
    return replace(config, spec=replace(spec, options={**spec.options, "adapt": "true"}))


def _keys_from_environment() -> list[str]:
    """Keys in the environment are not shown by `ps`."""
    text = os.environ.get("HUNCH_API_KEY", "")
    return [key for key in text.split(",") if key]


def _take(given: dict[str, Any], section: type) -> dict[str, Any]:
    """The flags that are fields of `section`, taken out of `given`."""
    names = [field.name for field in fields(section)]
    return {name: given.pop(name) for name in names if name in given}


def _parser() -> argparse.ArgumentParser:
    from hunch.server.settings import Limits, ServeConfig

    parser = argparse.ArgumentParser(
        prog="hunch serve",
        usage="hunch serve [MODEL ...] [flags]",
        description="Serve a model over HTTP, as OpenAI does. Flags may use '-' or '_'.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "model",
        nargs="*",
        help=f"MODEL or NAME=MODEL; further ones are loaded when asked for [{DEFAULT_MODEL}]",
    )
    parser.add_argument("--model", dest="model_flag", metavar="MODEL", help="the same, as a flag")
    server = parser.add_argument_group("server")
    server.add_argument("--api-key", action="append", help="required of clients; may be repeated")
    server.add_argument("--served-model-name", nargs="+", help="names clients may use")
    server.add_argument(
        "--lora-modules",
        nargs="+",
        metavar="NAME=PATH",
        help="LoRA adapters of the first model, each served under its name",
    )
    server.add_argument(
        "--adapt",
        action="store_true",
        help="learn from served answers, which stay in memory: lookups from their phrases, a "
        "drafter of `hunch train` in idle time",
    )
    server.add_argument("--no-page", action="store_true", help="serve no page at /")
    server.add_argument(
        "--disable-log-stats", action="store_true", help="print no status lines, as in vLLM"
    )
    _add_fields(server, ServeConfig, skip=_OWN)
    _add_fields(parser.add_argument_group("limits per request"), Limits)
    engine = parser.add_argument_group("engine")
    for section in (ModelConfig, CacheConfig, ScheduleConfig, ParallelConfig):
        _add_fields(engine, section, skip=("model", "max_queue"))
    taken = {action.dest for action in parser._actions}
    for name in sorted(known_arguments() - taken):
        if name in _SWITCHES:
            _add(engine, name, bool)
        elif name not in ("model", "log_level"):
            _add(engine, name, _value)
    return parser


def _add_fields(group: Any, section: type, skip: Sequence[str] = ()) -> None:
    hints = get_type_hints(section)
    for field in fields(section):
        if field.name in skip:
            continue
        kinds = [
            kind for kind in (bool, int, float, str) if hints[field.name] in (kind, kind | None)
        ]
        default = None if field.default is MISSING else field.default
        _add(group, field.name, kinds[0] if kinds else tuple, default)


def _add(group: Any, name: str, kind: Any, default: Any = None) -> None:
    flags = [f"--{name.replace('_', '-')}", *_ALIASES.get(name, ())]
    text = _HELP.get(name, "")
    if default not in (None, (), "") and kind is not bool:
        text = f"{text} [{default}]".strip()
    if kind is bool:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, dest=name, help=text)
    elif kind is tuple:
        group.add_argument(*flags, action="append", dest=name, help=text)
    else:
        group.add_argument(*flags, type=kind, dest=name, help=text, metavar="VALUE")


def _value(text: str) -> Any:
    """A number or JSON object where it is one; else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
