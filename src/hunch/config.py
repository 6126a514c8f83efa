"""Configuration: frozen dataclasses, validated once. Method options live beside their methods."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar, get_type_hints

from hunch.errors import ConfigError
from hunch.registry import (
    DRAFTERS,
    LOSSY,
    SYNTHETIC,
    VERIFIERS,
    find_drafter,
    known_drafters,
    names_module,
    resolve,
    unknown,
)

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4", "fp8")
KV_DTYPES = ("auto", "fp8", "fp8_e4m3", "int8")
# vLLM's names -> the methods of checkpoints they mean, or the dtype weights are rounded to.
QUANTIZATIONS = {
    **{name: (name,) for name in ("awq", "gptq", "fp8", "fbgemm_fp8", "mxfp4", "gguf")},
    **{name: (name,) for name in ("compressed-tensors", "bitsandbytes", "int8", "int4")},
    "awq_marlin": ("awq",),
    "gptq_marlin": ("gptq",),
    "modelopt": ("fp8",),
    **dict.fromkeys(("auto-round", "inc", "moe_wna16"), ("gptq", "awq")),  # packed as one of them
}
DEFAULT_MODEL = "smollm2-135m"
MERGE = "merge"  # several drafters in one tree
T = TypeVar("T")
log = logging.getLogger("hunch")


@cache
def say_once(message: str) -> None:
    """A word in the log about what a user gave; not again for the life of the process."""
    log.warning("%s", message)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which target, and how it is held."""

    model: str = DEFAULT_MODEL
    tokenizer: str | None = None  # where it is not beside the weights
    revision: str | None = None
    download_dir: str | None = None  # where files are fetched to; None: the user's caches
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"  # of keys and values; fp8, int8: half the memory
    quantization: str | None = None  # as the files have it, or fp8, int8, int4 for plain ones
    device: str = "auto"  # auto, cpu, cuda
    max_model_len: int | None = None  # None: the model's own context
    seed: int = 0  # seeds requests that bring none
    threads: int | None = None  # CPU threads; None: OMP_NUM_THREADS, or the cores
    kernels: str = "auto"  # torch: stock products alone, whatever else is there
    activation_bits: int | str = "auto"  # on CPU kernels: 8, or 14, nearer to float32 and slower
    hf_overrides: str = ""  # a JSON object: values that stand in place of config.json's
    lora: str | None = None  # a LoRA adapter (PEFT's directory) that is merged into the weights
    chat_template: str | None = None
    tool_call_parser: str = "auto"  # how tool calls are written; auto: as the template has it
    reasoning_parser: str = "auto"  # how reasoning is marked; none: it is text
    logprobs_mode: str = "raw_logprobs"  # or processed_logprobs: after penalties, filters, grammar

    def __post_init__(self) -> None:
        _check_types(self)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("kv_cache_dtype", self.kv_cache_dtype, KV_DTYPES)
        if self.quantization is not None:
            _one_of("quantization", self.quantization, QUANTIZATIONS)
        _one_of("device", self.device, ("auto", "cpu", "cuda"))
        _one_of("logprobs_mode", self.logprobs_mode, ("raw_logprobs", "processed_logprobs"))
        _one_of("kernels", self.kernels, ("auto", "torch"))
        _one_of("activation_bits", bits := str(self.activation_bits), ("auto", "8", "14"))
        object.__setattr__(self, "activation_bits", bits if bits == "auto" else int(bits))
        _at_least("max_model_len", self.max_model_len, 1)
        _at_least("threads", self.threads, 1, 1024)  # one too many would end the process
        _at_least("seed", self.seed, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVEvents:
    """How routers are told what is in the KV cache: vLLM's kv_events_config, with its names."""

    enable_kv_cache_events: bool = False
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"  # bound where it has a *, else connected to
    replay_endpoint: str | None = None  # for subscribers that missed some
    buffer_steps: int = 10_000  # batches kept for replays
    hwm: int = 100_000  # messages that wait for a slow reader
    max_queue_size: int = 100_000
    topic: str = ""
    data_parallel_rank: int = 0  # which of several replicas this is: ports are counted on by it

    @staticmethod
    def parse(text: str) -> KVEvents | None:
        """None: nobody is told."""
        given = json_object("kv_events_config", text)
        known = {field.name for field in fields(KVEvents)}
        for key in given:
            if key not in known:
                raise ConfigError(f"kv_events_config: key {unknown(key, known)}")
        made = KVEvents(**{key: value for key, value in given.items() if value is not None})
        if not made.enable_kv_cache_events or made.publisher == "null":
            return None
        rank, replay = made.data_parallel_rank, made.replay_endpoint
        replay = None if replay is None else _counted_on(replay, rank)
        return replace(made, endpoint=_counted_on(made.endpoint, rank), replay_endpoint=replay)

    def __post_init__(self) -> None:
        _check_types(self)
        _one_of("kv_events_config: publisher", self.publisher, ("zmq", "null"))
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            _at_least(f"kv_events_config: {name}", getattr(self, name), 1)
        _at_least("kv_events_config: data_parallel_rank", self.data_parallel_rank, 0)


def _counted_on(endpoint: str, rank: int) -> str:
    """The same for another replica: the port after, or a name of its own."""
    if not rank:
        return endpoint
    address, _, port = endpoint.rpartition(":")
    is_port = endpoint.startswith("tcp:") and port.isdigit()
    return f"{address}:{int(port) + rank}" if is_port else f"{endpoint}_dp{rank}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    kv_bytes: int | None = None  # memory for KV; None: a share of what the device has free
    num_blocks: int | None = None  # overrides kv_bytes
    gpu_memory_utilization: float = 0.9
    engines_per_device: int = 1  # that share a GPU, each with the same part of its memory
    enable_prefix_caching: bool = True
    kv_events_config: str | None = None  # JSON, as vLLM's: tell routers what is in the cache

    @property
    def kv_events(self) -> KVEvents | None:
        """None: nobody is told."""
        return None if self.kv_events_config is None else KVEvents.parse(self.kv_events_config)

    def __post_init__(self) -> None:
        _check_types(self)
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ConfigError("kv_events_config needs enable_prefix_caching=True")
        _at_least("block_size", self.block_size, 1)
        if not 0 < (share := self.gpu_memory_utilization) <= 1:
            raise ConfigError(f"gpu_memory_utilization={share} must be in (0, 1]")
        _at_least("kv_bytes", self.kv_bytes, 1)
        _at_least("num_blocks", self.num_blocks, 1)
        _at_least("engines_per_device", self.engines_per_device, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How requests share a step."""

    max_num_seqs: int | None = None  # requests that run at once; None: 64, on a GPU 256
    max_num_batched_tokens: int | None = None  # that a step may process; None: 512, on a GPU 8192
    max_queue: int | None = None  # requests that may wait; None: no limit
    depth: int | None = None  # steps launched ahead of their results; None: 1 on a GPU, 0 on a CPU

    def __post_init__(self) -> None:
        _check_types(self)
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        if self.depth not in (None, 0, 1):
            raise ConfigError(f"depth={self.depth} must be 0 or 1")

    @property
    def num_rows(self) -> int:
        return self.max_num_seqs or 64

    @property
    def num_tokens(self) -> int:
        return self.max_num_batched_tokens or 512

    def for_gpu(self) -> ScheduleConfig:
        """What was left open, as a GPU wants it."""
        num_rows, num_tokens = self.max_num_seqs or 256, self.max_num_batched_tokens or 8192
        return replace(self, max_num_seqs=num_rows, max_num_batched_tokens=num_tokens)


def split_parts(text: str) -> list[str]:
    """'suffix+draft:PATH' by drafter; a + that no drafter's name follows is part of a path."""
    names = "|".join(re.escape(name) for name in sorted(known_drafters(), key=len, reverse=True))
    return re.split(rf"\+(?=(?:{names})(?:[:+]|$))", text) if text else []


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecConfig:
    """What drafts, and how drafts are verified. Written 'NAME[:PATH][:KEY=VALUE]...'."""

    method: str = "auto"
    path: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    verifier: str = "exact"
    max_batch: int | None = None  # no drafting with more running requests than this
    always: bool = False  # draft as if extra rows cost nothing: for checks
    draft_tensor_parallel_size: int | None = None
    device: str | None = None  # of draft models; None: the target's
    revision: str | None = None  # of the drafter's files on the hub

    def __post_init__(self) -> None:
        _check_types(self)
        if find_drafter(self.method) is None:
            raise ConfigError(f"speculate: {_unknown_drafter(self.method)}")
        _one_of("verifier", self.verifier, VERIFIERS)

    @property
    def is_lossy(self) -> bool:
        """The verifier may change what the target would say."""
        return self.verifier in LOSSY

    @property
    def parts(self) -> list[SpecConfig]:
        """The drafters that a merge is made of."""
        return [SpecConfig.parse(part) for part in split_parts(self.options.get("parts", ""))]

    def __str__(self) -> str:
        """As `parse` reads it."""
        options = [f"{key}={value}" for key, value in self.options.items()]
        return ":".join([self.method, *([self.path] if self.path else []), *options])

    @property
    def is_synthetic(self) -> bool:
        """Its drafts are made up for a benchmark: acceptance says nothing about a drafter."""
        return self.method in SYNTHETIC

    @staticmethod
    def parse(text: str, **rest: Any) -> SpecConfig:
        """'ngram:max_match=4', 'eagle:PATH:tree=dynamic', 'package.module:Class:key=1', 'off'.

        'suffix+draft:PATH' are several, merged in one tree; options of the merge stand after
        '+merge:'.
        """
        if not isinstance(text, str):
            raise ConfigError(f"speculate={text!r} must be a text: NAME[:PATH][:KEY=VALUE]...")
        parts = split_parts(text)
        if len(parts) > 1:
            own = [part for part in parts if part.partition(":")[0] == MERGE]
            merging = dict(SpecConfig.parse(own[0]).options) if own else {}
            merging["parts"] = "+".join(part for part in parts if part not in own)
            return SpecConfig(method=MERGE, options=merging, **rest)
        name, *parts = text.split(":")
        if parts and names_module(name):  # a class of another package
            name = f"{name}:{parts.pop(0)}"
        path: str | None = None
        options: dict[str, str] = {}
        for part in parts:
            key, is_option, value = part.partition("=")
            if is_option and key.isidentifier():
                options[key] = value
            elif options:
                raise ConfigError(f"speculate={text!r}: {part!r} should be KEY=VALUE")
            else:
                path = part if path is None else f"{path}:{part}"
        return SpecConfig(method=name, path=path, options=options, **rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Over how many devices the target is split."""

    tensor_parallel_size: int = 1  # ranks that share every layer
    pipeline_parallel_size: int = 1  # stages of layers, each on devices of its own

    def __post_init__(self) -> None:
        _check_types(self)
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        _at_least("pipeline_parallel_size", self.pipeline_parallel_size, 1)

    @property
    def num_ranks(self) -> int:
        """Processes that hold the target together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything an engine is built from."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    spec: SpecConfig = field(default_factory=SpecConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    given: frozenset[str] = frozenset()  # arguments a user named, whatever their values
    is_greedy: bool = False  # only steps of greedy requests are captured before they come

    def __post_init__(self) -> None:
        size, draft_size = self.parallel.tensor_parallel_size, self.spec.draft_tensor_parallel_size
        if draft_size is not None and (draft_size < 1 or size % draft_size):
            raise ConfigError(
                f"speculative_draft_tensor_parallel_size={draft_size} must divide "
                f"tensor_parallel_size={size}"
            )


VllmConfig = Config  # vLLM's name


def read_options(options: type[T], given: Mapping[str, str], where: str) -> T:
    """A method's options dataclass from the KEY=VALUE texts a user wrote."""
    hints = get_type_hints(options)
    known = {f.name for f in fields(options)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for key, text in given.items():
        if key not in known:
            raise ConfigError(f"{where}: option {unknown(key, known)}")
        values[key] = _convert(hints[key], str(text), f"{where}: {key}")
    return options(**values)


def _convert(value_type: Any, text: str, where: str) -> Any:
    if value_type in (bool, bool | None):
        if text.lower() in ("true", "1", "yes", "on", "false", "0", "no", "off"):
            return text.lower() in ("true", "1", "yes", "on")
        raise ConfigError(f"{where}={text!r} must be true or false")
    for number in (int, float):
        if value_type in (number, number | None):
            try:
                return number(text)
            except ValueError:
                raise ConfigError(f"{where}={text!r} must be a number") from None
    return text


def json_object(name: str, text: str) -> dict[str, Any]:
    """What a user wrote as JSON; nothing is an empty object."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(f"{name}={text!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name}={text!r} is not a JSON object or a dict")
    return found


_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


@cache
def _hints(section: Hashable) -> dict[str, Any]:
    return get_type_hints(section)


def _check_types(section: Any) -> None:
    """Raise for a value of another type than its field's; a path is taken for a text."""
    for name, hint in _hints(type(section)).items():  # type: ignore[arg-type]
        value = getattr(section, name)
        value_type = next((each for each in _TYPE_NAMES if hint in (each, each | None)), None)
        if value_type is None or (value is None and hint != value_type):
            continue
        if value_type is str and isinstance(value, os.PathLike):
            object.__setattr__(section, name, os.fspath(value))
            continue
        accepted = (int, float) if value_type is float else value_type
        if not isinstance(value, accepted) or (isinstance(value, bool) and value_type is not bool):
            raise ConfigError(f"{name}={value!r} must be {_TYPE_NAMES[value_type]}")


def load_drafter(method: str) -> Any:
    """The class behind a method's name, with a clear word where another package's is missing."""
    try:
        return resolve(DRAFTERS, method)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"speculate={method!r}: {error}. Write it as package.module:Class, with the package "
            "installed or its folder on PYTHONPATH"
        ) from error


def _unknown_drafter(name: str) -> str:
    if not name:
        return "the method's name is empty; give one of " + ", ".join(sorted(known_drafters()))
    own = "one of your own is package.module:Class, with the package's folder on PYTHONPATH"
    return f"{unknown(name, known_drafters())} ({'several are A+B' if ',' in name else own})"


def _one_of(name: str, value: str, allowed: Any) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}: {unknown(value, allowed)}")


def _at_least(name: str, value: int | None, least: int, most: int | None = None) -> None:
    if value is not None and not least <= value <= (most or value):
        allowed = f"from {least} to {most}" if most else f"{least} or more"
        raise ConfigError(f"{name}={value} must be {allowed}")
