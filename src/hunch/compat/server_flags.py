"""Server flags of `vllm serve`, SGLang's launch_server and llama-server, for `hunch serve`.

What both engines mean is renamed; what hunch does in any case, or what changes no answer, is taken
and said once. Arguments of the engine itself are in vllm.py and sglang.py.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from hunch.compat.flags_by_prefix import Unused, unused_flag
from hunch.compat.llamacpp import from_llamacpp
from hunch.compat.server_words import MANY, NOTHING_VALUED, by_flag
from hunch.config import say_once
from hunch.errors import ConfigError

_RENAMED = by_flag(
    {
        "--replicas": "--data-parallel-size -dp --dp-size --dp",
        "--tensor-parallel-size": "--tp",
        "--pipeline-parallel-size": "--pp",
        "--workers": "--api-server-count -asc",
        "--kv-bytes": "--kv-cache-memory-bytes --kv-cache-memory",
        "--num-blocks": "--num-gpu-blocks-override",
        "--speculative-config": "-sc",
        "--log-level": "--uvicorn-log-level",
        "--max-queue": "--max-queued-requests --max-num-queued-reqs",
        "--model": "--model-path",
        "--speculative-algorithm": "--speculative-algo",
        "--speculative-draft-model-path": "--speculative-draft-model",
        "--no-disable-log-requests": "--enable-log-requests --log-requests",
        "--disable-log-requests": "--no-enable-log-requests",
        "--drain-timeout": "--shutdown-timeout",
        "--engine-timeout": "--watchdog-timeout",
        "--root-path": "--fastapi-root-path",
        "--override-generation-config": "--preferred-sampling-params",
        "--lora-modules": "--lora-paths",
        "--quantization": "-q",
        "--force-usage": "--enable-force-include-usage --stream-response-default-include-usage",
        "--incremental-streaming-output": "--stream-output",
        "--gpu-memory-utilization": "--device-memory-utilization",
        "--no-enable-prefix-caching": "--disable-prefix-caching",
        "--no-enable-chunked-prefill": "--disable-chunked-prefill",
        "--no-enable-auto-tool-choice": "--disable-auto-tool-choice",
        "--no-enable-sleep-mode": "--disable-sleep-mode",
        "--no-enable-lora": "--disable-lora",
        "--no-disable-custom-all-reduce": "--enable-custom-all-reduce",
        "--no-disable-chunked-mm-input": "--enable-chunked-mm-input",
        "--no-force-usage": "--disable-force-include-usage",
    }
)
_BUNDLED = {
    "--spec-method": "--speculative-config.method",
    "--spec-model": "--speculative-config.model",
    "--spec-tokens": "--speculative-config.num-speculative-tokens",
}
_ONLY = {  # flag -> values that ask for what is done anyway; others are refused
    "--convert": ("auto", "none", "embed"),
    "--response-role": ("assistant",),
    "--scheduling-policy": ("fcfs", "priority"),  # a request's own is heeded always
    "--schedule-policy": ("fcfs", "lpm"),
    "--preemption-mode": ("recompute",),
    "--config-format": ("auto", "hf"),
    "--worker-cls": ("auto",),
    "--return-hidden-states-mode": ("none",),
    "--kv-transfer-config": ("{}",),
    "--disaggregation-mode": ("null",),
    **dict.fromkeys(
        (
            *("--nnodes", "--gpu-id-step", "--decode-context-parallel-size"),
            *("--ep-size", "--expert-parallel-size", "--ep", "--prefill-context-parallel-size"),
            *("--dcp-size", "--attn-cp-size", "--attention-context-parallel-size"),
            *("--moe-dp-size", "--moe-data-parallel-size", "--data-parallel-size-local"),
            *("--attn-dp-size", "--attention-data-parallel-size", "-dcp", "-pcp", "-dpl"),
        ),
        ("1",),
    ),
    **dict.fromkeys(
        (
            *("--node-rank", "--base-gpu-id", "--num-redundant-experts", "--data-parallel-rank"),
            *("--data-parallel-start-rank", "-dpn", "-dpr"),
        ),
        ("0",),
    ),
    **dict.fromkeys(
        ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"),
        ("1", "1.0"),
    ),
}
_OF_SERVERS = {  # that programs give to engines too
    "--served-model-name": "only a server has a name for its model",
    "--override-generation-config": "give SamplingParams(...) with each call",
    "--preferred-sampling-params": "give sampling parameters with each call",
    "--sampling-defaults": "give sampling parameters with each call",
    "--attention-backend": "there is one attention per device",
    **dict.fromkeys(("--enable-log-requests", "--log-requests"), "only a server has a log of them"),
    **dict.fromkeys(("--host", "--port", "--api-key", "--watchdog-timeout"), "it is a server's"),
}
_INSTEAD = dict.fromkeys(("--base-gpu-id", "--gpu-id-step"), "set CUDA_VISIBLE_DEVICES")
_BYTES = ("--kv-cache-memory-bytes", "--kv-cache-memory", "--kv-bytes")
_DEFAULTS = {
    "model": "auto",
    "openai": "off",
}  # SGLang's --sampling-defaults as --generation-config
_OVERRIDES = ("--hf-overrides", "--json-model-override-args")  # vLLM's and SGLang's
_VERIFIERS = {  # SGLang's switches
    "--speculative-use-rejection-sampling": "rejection",
    "--speculative-use-block-verification": "block",
}
_ROPE = {"--rope-scaling": "rope_scaling", "--rope-theta": "rope_theta"}  # keys of config.json
_DOTTED = re.compile(r"-(-[a-z-]+|O)\.[\w-]+")  # --speculative-config.method
_SIZES = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def translate_flags(words: Sequence[str]) -> list[str]:
    """The words that `hunch serve` knows; those it cannot place are left for its parser."""
    given = list(_with_values(from_llamacpp(words)))
    found: list[str] = []
    bundles: dict[str, dict[str, Any]] = {}  # of --flag.key VALUE
    for flag, value in given:
        if _DOTTED.fullmatch(flag):
            name, _, key = flag.partition(".")
            bundles.setdefault(name, {})[key.replace("-", "_")] = json_or_text(value or "true")
        elif flag == "--config":
            found += translate_flags(_config_words(value or ""))
        elif flag == "--allowed-origins":
            found += [word for origin in _list(value or "") for word in ("--cors-origins", origin)]
        elif flag == "--hf-token":
            os.environ["HF_TOKEN"] = value or ""
        elif flag in _VERIFIERS:
            found += ["--verifier", _VERIFIERS[flag]]
        elif flag == "--sampling-defaults":
            found += ["--generation-config", _DEFAULTS.get(value or "", value or "")]
        elif flag in _ROPE:
            bundles.setdefault("--hf-overrides", {})[_ROPE[flag]] = json_or_text(value or "null")
        elif flag in _OVERRIDES:
            given_here = json_or_text(value or "{}")
            if not isinstance(given_here, dict):
                raise ConfigError(f"{flag} {value}: a JSON object is needed")
            bundles.setdefault("--hf-overrides", {}).update(given_here)
        elif flag in _ONLY:
            if value not in _ONLY[flag]:
                allowed = " or ".join(_ONLY[flag])
                if flag in _INSTEAD:
                    allowed += f"; {_INSTEAD[flag]}"
                raise ConfigError(f"{flag} {value} is not supported; only {allowed}")
        elif flag in ("--max-model-len", "--context-length") and value is not None:
            found += [] if value in ("auto", "-1") else ["--max-model-len", _size(value)]
        elif flag in _BYTES and value is not None:
            found += ["--kv-bytes", _size(value)]
        elif flag not in _RENAMED and (unused := unused_flag(flag)):
            if unused.is_refused:
                raise ConfigError(f"{flag}: {unused.why}")
            shown = flag if value is None else f"{flag} {value}"
            say_once(f"{shown} has no effect: {unused.why}")
        else:
            found += [_RENAMED.get(flag, flag)] + ([] if value is None else [value])
    for name, keys in bundles.items():
        if name in NOTHING_VALUED:
            say_once(f"{name} has no effect: {NOTHING_VALUED[name]}")
        else:
            found += [name, json.dumps(keys)]
    return found


def as_argument(name: str, value: Any, known: Collection[str]) -> dict[str, Any] | None:
    """What a server's flag means that a program gives as an argument of an engine, by the names
    of `known` ones; None where no server has such a flag."""
    flag = "--" + name.replace("_", "-")
    ours = _RENAMED.get(flag, flag).removeprefix("--").replace("-", "_")
    ours = "hf_overrides" if flag in _OVERRIDES else ours
    if flag in _BUNDLED:
        key = _BUNDLED[flag].partition(".")[2].replace("-", "_")
        flat = {"model": "speculative_model", "num_speculative_tokens": "num_speculative_tokens"}
        return {flat[key]: value} if key in flat else {"speculative_config": {key: value}}
    if ours in known:
        size = _size(str(value)) if flag in _BYTES else ""
        return {ours: int(size) if size.isdigit() else value}
    if flag == "--hf-token":
        if isinstance(value, str):  # vLLM's True is the one that is kept anyway
            os.environ["HF_TOKEN"] = value
        return {}
    if flag == "--lora-paths":
        if value:
            raise ConfigError(f"{name}={value!r}: give lora=PATH, which merges one adapter")
        return {}
    if flag in _ONLY:
        if str(value) not in _ONLY[flag]:
            allowed = " or ".join(map(repr, _ONLY[flag]))
            raise ConfigError(f"{name}={value!r} is not supported; only {allowed}")
        return {}
    unused = unused_flag(flag)
    if flag in _OF_SERVERS:
        unused = Unused(_OF_SERVERS[flag], is_refused=False, is_switch=False)
    if unused is None:
        return None
    if value and unused.is_refused:
        raise ConfigError(f"{name}={value!r}: {unused.why}")
    if value:
        say_once(f"{name}={value!r} has no effect: {unused.why}")
    return {}


def flags_as_arguments(
    words: Sequence[str], known: Collection[str]
) -> tuple[dict[str, Any], list[str]]:
    """What servers' flags mean that a program has not: arguments, and the words that are none."""
    rest, taken, left = list(words), dict[str, Any](), list[str]()
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        unused = unused_flag(flag)
        value: Any = json_or_text(text) if equals else True
        has_value = not equals and rest and not rest[0].startswith("-")
        if has_value and not (unused and unused.is_switch):
            value = json_or_text(rest[0])
        name = flag.removeprefix("--").replace("-", "_")
        meant = as_argument(name, value, known) if flag.startswith("--") else None
        if meant is None:
            left.append(word)
            continue
        taken |= meant
        if has_value and not (unused and unused.is_switch):
            rest.pop(0)
    return taken, left


def _with_values(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Flags whose meaning is decided here with their values; other words one by one."""
    rest = list(words)
    valued = {"--config", "--allowed-origins", "--max-model-len", "--context-length", "--hf-token"}
    valued |= {*NOTHING_VALUED, *_ONLY, *_BYTES, *_ROPE, *_OVERRIDES, "--sampling-defaults"}
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        flag = _BUNDLED.get(flag, flag)
        is_valued = flag in valued or _DOTTED.fullmatch(flag) is not None
        unused = unused_flag(flag) if flag not in _RENAMED else None
        is_many = flag in MANY or (unused is not None and flag not in valued)
        if unused is not None and not is_valued:
            is_valued = not unused.is_switch
        if flag.startswith("-") and equals and (is_valued or flag in _RENAMED or unused):
            yield flag, value
        elif is_valued and rest and not rest[0].startswith("--"):
            yield flag, rest.pop(0)
            while is_many and rest and not rest[0].startswith("-"):
                rest.pop(0)
        else:
            yield flag if not equals else word, None


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


def number(text: str) -> int:
    """What a flag of vLLM's says: 1k is 1,000, and auto is -1."""
    return -1 if text == "auto" else int(_size(text))


def _size(text: str) -> str:
    """A number with vLLM's endings: 25.6k is 25,600, 1K is 1,024."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", text)
    return text if found is None else str(int(float(found[1]) * _SIZES[found[2]]))


def _list(text: str) -> list[str]:
    given = json_or_text(text)
    return [str(one) for one in given] if isinstance(given, list) else [str(given)]


def json_or_text(text: str) -> Any:
    """A number or JSON object where it is one; else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def dashed(word: str) -> str:
    """A flag with '-' where it has '_'; any other word as it is."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value
