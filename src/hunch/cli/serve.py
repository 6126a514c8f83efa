"""hunch serve: an OpenAI-compatible server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import typer

from hunch.cli.flags import parse_flags
from hunch.compat import config_from_sglang, dashed, translate_flags
from hunch.config import DEFAULT_MODEL, Config
from hunch.errors import ConfigError, readable

# How `serve` must be registered: it reads its own flags, so that vLLM's are taken too.
CONTEXT = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

ADAPTING = {"auto", "suffix", "draft", "dspark"}  # methods that learn from what is served


def serve(ctx: typer.Context) -> None:
    """Serve a model over HTTP with OpenAI's API, and a page at /."""
    raise typer.Exit(run(ctx.args))


def run(words: Sequence[str]) -> int:
    """Start a server from command-line words; returns its exit code."""
    from hunch import __version__
    from hunch.server.settings import Limits, ServeConfig

    given = parse_flags(translate_flags([dashed(word) for word in words]))
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


def _engine_config(model: str, given: dict[str, Any]) -> Config:
    template = given.get("chat_template")
    if template is not None and "{" not in template:
        path = Path(template)
        if not path.is_file():
            raise ConfigError(
                f"chat_template: {template!r} is neither a template nor a file; give one of them, "
                "as templates have no names here"
            )
        with readable(path):
            given["chat_template"] = path.read_text(encoding="utf-8")
    return config_from_sglang(model=model, **given)


def _adapting(config: Config) -> Config:
    spec = config.spec
    if spec.method not in ADAPTING:
        raise ConfigError(
            f"--adapt teaches lookups and drafters of `hunch train`, and speculate={spec.method!r} "
            f"is neither; use auto or one of {', '.join(sorted(ADAPTING))}"
        )
    return replace(config, spec=replace(spec, options={**spec.options, "adapt": "true"}))


def _keys_from_environment() -> list[str]:
    """Keys in the environment are not shown by `ps`. Who has vLLM's there wants it checked here."""
    own = os.environ.get("HUNCH_API_KEY", "").split(",")
    return list(filter(None, own)) or list(filter(None, [os.environ.get("VLLM_API_KEY")]))


def _take(given: dict[str, Any], section: type) -> dict[str, Any]:
    """The flags that are fields of `section`, taken out of `given`."""
    names = [field.name for field in fields(section)]
    return {name: given.pop(name) for name in names if name in given}


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
