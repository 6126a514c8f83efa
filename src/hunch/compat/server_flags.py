"""Server flags of `vllm serve` and SGLang's launch_server, as words of `hunch serve`.

What both engines mean is renamed; what hunch does in any case, or what changes no answer, is taken
and said once. Arguments of the engine itself are in vllm.py and sglang.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hunch.config import say_once
from hunch.errors import ConfigError

_RENAMED = {
    "--data-parallel-size": "--replicas",
    "-dp": "--replicas",
    "--dp-size": "--replicas",
    "--dp": "--replicas",
    "--tp": "--tensor-parallel-size",
    "--pp": "--pipeline-parallel-size",
    "--api-server-count": "--workers",
    "-asc": "--workers",
    "--kv-cache-memory-bytes": "--kv-bytes",
    "--num-gpu-blocks-override": "--num-blocks",
    "-sc": "--speculative-config",
    "--spec-method": "--speculate",
    "--uvicorn-log-level": "--log-level",
    "--max-queued-requests": "--max-queue",
    "--model-path": "--model",
    "--enable-log-requests": "--no-disable-log-requests",
    "--no-enable-log-requests": "--disable-log-requests",
}
_COMPILED = "hunch's kernels and graphs are made by themselves"
_LOG = "the log has a line for each request, without its text"
_NOTHING = {  # switch -> why it changes nothing
    "--enable-prompt-tokens-details": "usage always counts tokens found in the prefix cache",
    "--enable-request-id-headers": "answers always carry X-Request-Id",
    "--enable-server-load-tracking": "/metrics has the load",
    "--enable-metrics": "/metrics is always there",
    "--disable-fastapi-docs": "there are no such pages; /openapi.json has the schema",
    "--disable-uvicorn-access-log": _LOG,
    "--disable-frontend-multiprocessing": "the engine is always a process of its own",
    "--enable-expert-parallel": "experts are split over ranks by their width",
    "--disable-cascade-attn": "a row's result never depends on other rows",
    "--disable-hybrid-kv-cache-manager": "every kind of layer has its own KV",
    "--language-model-only": "only text is served",
    "-O0": _COMPILED, "-O1": _COMPILED, "-O2": _COMPILED, "-O3": _COMPILED,
}  # fmt: skip
_NOTHING_VALUED = {  # flag with a value -> why it changes nothing
    "--allowed-methods": "the methods that the API has are allowed",
    "--allowed-headers": "all headers are allowed to the origins that are",
    "--max-log-len": _LOG,
    "--chat-template-content-format": "the template itself shows how it reads content",
    "--guided-decoding-backend": "there is one grammar engine",
    "--grammar-backend": "there is one grammar engine",
    "--structured-outputs-config": "there is one grammar engine",
    "--optimization-level": _COMPILED,
    "-cc": _COMPILED,
    "--cudagraph-capture-sizes": _COMPILED,
    "--max-num-partial-prefills": "prompts share a step as its tokens allow",
    "--num-scheduler-steps": "a step is always planned while the last one runs",
    "--prefix-caching-hash-algo": "there is one",
    "--code-revision": "hunch never runs a model's own code",
    "--tokenizer-revision": "the tokenizer is read from the model's own revision",
}
_ONLY = {  # flag -> values that ask for what is done anyway; others are refused
    "--convert": ("auto", "none"),
    "--response-role": ("assistant",),
    "--scheduling-policy": ("fcfs",),
    "--schedule-policy": ("fcfs", "lpm"),
    "--preemption-mode": ("recompute",),
    "--stream-interval": ("1",),
    "--nnodes": ("1",),
    "--node-rank": ("0",),
}
_DOTTED = re.compile(r"--[a-z-]+\.[\w-]+")  # --speculative-config.method
_SIZES = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def translate_flags(words: Sequence[str]) -> list[str]:
    """The words that `hunch serve` knows; those it cannot place are left for its parser."""
    given = list(_with_values(words))
    found: list[str] = []
    bundles: dict[str, dict[str, Any]] = {}  # of --flag.key VALUE
    for flag, value in given:
        if _DOTTED.fullmatch(flag):
            name, _, key = flag.partition(".")
            bundles.setdefault(name, {})[key.replace("-", "_")] = _json(value or "true")
        elif flag == "--config":
            found += translate_flags(_config_words(value or ""))
        elif flag == "--allowed-origins":
            found += [word for origin in _list(value or "") for word in ("--cors-origins", origin)]
        elif flag in _NOTHING:
            say_once(f"{flag} has no effect: {_NOTHING[flag]}")
        elif flag in _NOTHING_VALUED:
            say_once(f"{flag} {value} has no effect: {_NOTHING_VALUED[flag]}")
        elif flag in _ONLY:
            if value not in _ONLY[flag]:
                allowed = " or ".join(_ONLY[flag])
                raise ConfigError(f"{flag} {value} is not supported; only {allowed}")
        elif flag in ("--max-model-len", "--context-length") and value is not None:
            found += [] if value in ("auto", "-1") else ["--max-model-len", _size(value)]
        else:
            found += [_RENAMED.get(flag, flag)] + ([] if value is None else [value])
    return found + [word for name, keys in bundles.items() for word in (name, json.dumps(keys))]


def _with_values(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Flags whose meaning is decided here with their values; other words one by one."""
    rest = list(words)
    valued = {"--config", "--allowed-origins", "--max-model-len", "--context-length"}
    valued |= {*_NOTHING_VALUED, *_ONLY}
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        is_valued = flag in valued or _DOTTED.fullmatch(flag) is not None
        if flag.startswith("-") and equals and (is_valued or flag in _RENAMED):
            yield flag, value
        elif is_valued and rest and not rest[0].startswith("--"):
            yield flag, rest.pop(0)
        else:
            yield word, None


def _config_words(path: str) -> list[str]:
    """vLLM's file of flags: a YAML mapping of their names to values."""
    import yaml  # type: ignore[import-untyped]

    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"--config {path}: a mapping of flags to values is needed")
    words: list[str] = []
    for name, value in given.items():
        flag = "--" + str(name).replace("_", "-")
        if value is True or value is False:
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list) and flag != "--allowed-origins":
            words += [flag, *map(str, value)]
        elif value is not None:
            words += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return words


def _size(text: str) -> str:
    """A number with vLLM's endings: 25.6k is 25,600, 1K is 1,024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", text)
    return text if found is None else str(int(float(found[1]) * _SIZES[found[2]]))


def _list(text: str) -> list[str]:
    given = _json(text)
    return [str(one) for one in given] if isinstance(given, list) else [str(given)]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text
