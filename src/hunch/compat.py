"""vLLM's and SGLang's argument names, translated to our config. All knowledge of them is here."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from hunch.config import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    SpecConfig,
    say_once,
)
from hunch.errors import ConfigError, RequestError
from hunch.registry import DRAFTERS, unknown
from hunch.types import SamplingParams

_SECTIONS = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "schedule": ScheduleConfig,
    "parallel": ParallelConfig,
}
_PLAIN = {  # argument -> section it is a field of, under the same name
    **dict.fromkeys(ModelConfig.__dataclass_fields__, "model"),
    **dict.fromkeys(CacheConfig.__dataclass_fields__, "cache"),
    **dict.fromkeys(ScheduleConfig.__dataclass_fields__, "schedule"),
    **dict.fromkeys(ParallelConfig.__dataclass_fields__, "parallel"),
}
_SPEC = {
    "speculate",
    "verifier",
    "always_draft",
    "speculative_model",
    "num_speculative_tokens",
    "ngram_prompt_lookup_max",
    "ngram_prompt_lookup_min",
    "speculative_device",
    "speculative_draft_tensor_parallel_size",
    "speculative_disable_by_batch_size",
    "spec_decoding_acceptance_method",
    "speculative_config",
}
_GRAPHS = "hunch captures a GPU's steps by itself, and a CPU has none to capture"
_ADAPTERS = "an adapter is merged into weights of its own: lora=PATH, or --lora-modules"
_RANKS = "ranks are processes of this machine, or those that torchrun started"
_NO_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    # argument -> values that ask for what hunch does anyway, and why others change nothing
    "use_v2_block_manager": ((True,), "there is one block manager, and it can do what v2 can"),
    "enforce_eager": ((False,), _GRAPHS),
    "max_seq_len_to_capture": ((), _GRAPHS),
    "compilation_config": ((), _GRAPHS),
    "enable_chunked_prefill": (
        (True,),
        "prompts above max_num_batched_tokens always go in chunks, which changes no text; give a "
        "larger max_num_batched_tokens",
    ),
    "disable_log_stats": ((True,), "only a server prints status lines"),
    "disable_log_requests": ((True,), "only a server has a log of requests"),
    "disable_custom_all_reduce": ((False,), "parts are added in the order of the ranks, always"),
    "distributed_executor_backend": (("mp", "external_launcher"), _RANKS),
    "worker_use_ray": ((False,), _RANKS),
    "swap_space": ((0,), "what is preempted is computed again, not swapped"),
    "cpu_offload_gb": ((0,), "weights stay on the device that computes with them"),
    "tokenizer_mode": (("auto",), "the same tokenizer is read in every mode"),
    "load_format": (("auto",), "the files say themselves what they are"),
    "speculative_disable_mqa_scorer": ((False,), "drafts are always checked in one pass"),
    "disable_logprobs_during_spec_decoding": ((False,), "logprobs are given to who asks for them"),
    "trust_remote_code": ((False,), "hunch never runs a model's own code"),
    "enable_lora": ((True,), _ADAPTERS),
    "max_loras": ((), _ADAPTERS),
    "max_lora_rank": ((), _ADAPTERS),
    "enable_auto_tool_choice": ((False,), "a model may call tools wherever a request brings some"),
}
_SGLANG_NO_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    "cuda_graph_max_bs": ((), _GRAPHS),
    "disable_cuda_graph": ((False,), _GRAPHS),
    "enable_torch_compile": ((False,), "hunch's kernels are compiled already"),
    "attention_backend": ((), "hunch has one attention per device"),
    "sampling_backend": ((), "hunch has one way to sample"),
    "skip_server_warmup": ((True,), "there is no warm-up to skip"),
}
_ONLY = {  # taken with these values alone
    "data_parallel_size": (1,),
    "trust_remote_code": (False, True),
    "tokenizer_mode": ("auto", "slow"),
    "load_format": ("auto", "safetensors", "pt", "gguf"),
    "dp_size": (1,),
}
_SPECULATIVE_CONFIG = {  # key of vLLM's speculative_config -> the flat argument it replaced
    "model": "speculative_model",
    "method": "method",
    "num_speculative_tokens": "num_speculative_tokens",
    "prompt_lookup_max": "ngram_prompt_lookup_max",
    "prompt_lookup_min": "ngram_prompt_lookup_min",
    "draft_tensor_parallel_size": "speculative_draft_tensor_parallel_size",
    "disable_by_batch_size": "speculative_disable_by_batch_size",
    "acceptance_method": "spec_decoding_acceptance_method",
    "rejection_sample_method": "spec_decoding_acceptance_method",
}
_METHODS = {  # vLLM's and SGLang's names of methods -> ours
    "draft_model": "draft",
    "mlp_speculator": "mlp",
    "[ngram]": "ngram",
    "deepseek_mtp": "mtp",
    "mimo_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
    "nextn": "mtp",
    "standalone": "draft",
}
_VERIFIERS = {
    "rejection_sampler": "exact",
    "strict": "exact",
    "typical_acceptance_sampler": "typical",
}
_SGLANG = {  # SGLang's engine arguments -> ours
    "model_path": "model",
    "tokenizer_path": "tokenizer",
    "context_length": "max_model_len",
    "mem_fraction_static": "gpu_memory_utilization",
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "random_seed": "seed",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "page_size": "block_size",
}
_SGLANG_SPEC = (  # what of SGLang's says how to draft
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
_WEIGHTLESS = ("off", "ngram", "suffix", "prediction", "recycling")  # methods without a model
_SGLANG_SAMPLING = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
_SGLANG_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


def config_from_vllm(**given: Any) -> Config:
    """Our config from vLLM's engine arguments and our own names; None means 'not given'."""
    given = {name: value for name, value in given.items() if value is not None}
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    spec: dict[str, Any] = {}
    for name, value in given.items():
        if name in _ONLY and value not in _ONLY[name]:
            allowed = " or ".join(map(repr, _ONLY[name]))
            raise ConfigError(f"{name}={value!r} is not supported; only {allowed}")
        if name in _PLAIN:
            is_bundle = name == "kv_events_config" and isinstance(value, Mapping)
            sections[_PLAIN[name]][name] = json.dumps(dict(value)) if is_bundle else value
        elif name in _SPEC:
            spec[name] = value
        elif name in _NO_EFFECT:
            _tell_no_effect(name, value, *_NO_EFFECT[name])
        elif name not in _ONLY:
            raise ConfigError(f"argument {unknown(name, known_arguments())}")
    parts: dict[str, Any] = {name: make(**sections[name]) for name, make in _SECTIONS.items()}
    return Config(**parts, spec=spec_from_vllm(**spec), given=frozenset(given))


def known_arguments() -> set[str]:
    return set(_PLAIN) | _SPEC | set(_NO_EFFECT) | set(_ONLY)


def known_to_sglang() -> set[str]:
    own = {*_SGLANG_SPEC, *_SGLANG_NO_EFFECT, "disable_radix_cache", "log_level"}
    return {*known_arguments(), *_SGLANG, *own}


def _tell_no_effect(name: str, value: Any, quiet: tuple[Any, ...], why: str) -> None:
    if value not in quiet:
        say_once(f"{name}={value!r} has no effect: {why}")


def unused_arguments(config: Config, device: str) -> list[str]:
    """What was given and has no meaning on this kind of device, a sentence each."""
    cache, given, words = config.cache, config.given, []
    if "gpu_memory_utilization" in given and (cache.num_blocks or cache.kv_bytes):
        words.append("gpu_memory_utilization has no effect beside kv_bytes or num_blocks")
    elif "gpu_memory_utilization" in given and device == "cpu":
        words.append("gpu_memory_utilization has no effect on a CPU: kv_bytes says how much KV")
    if "activation_bits" in given and (device != "cpu" or config.model.kernels == "torch"):
        words.append("activation_bits has no effect: only a CPU's own kernels round activations")
    if {"kv_bytes", "num_blocks"} <= given:
        words.append("kv_bytes has no effect beside num_blocks")
    if config.spec.draft_tensor_parallel_size and config.spec.method in _WEIGHTLESS:
        words.append(f"draft_tensor_parallel_size has no effect: {config.spec.method} has no model")
    if config.spec.device and config.spec.method in _WEIGHTLESS:
        words.append(f"speculative_device has no effect: {config.spec.method} has no model")
    return words


def spec_from_vllm(**given: Any) -> SpecConfig:
    """What drafts, from `speculate=...`, vLLM's flat arguments or its speculative_config."""
    bundle = given.pop("speculative_config", None)
    if bundle is not None:
        unbundled = _unbundle(bundle)
        if twice := sorted(set(unbundled) & set(given)):
            raise ConfigError(f"{', '.join(twice)}: given in speculative_config and beside it")
        given = {**unbundled, **given}
    method = given.pop("spec_decoding_acceptance_method", None)
    verifier = given.pop("verifier", None)
    if verifier is not None and method is not None:
        raise ConfigError("give either verifier or spec_decoding_acceptance_method, not both")
    if method is not None and not isinstance(method, str):
        raise ConfigError(f"spec_decoding_acceptance_method={method!r} must be a text")
    theirs = None if method is None else _VERIFIERS.get(method, method)
    rest: dict[str, Any] = {"verifier": verifier or theirs or "exact"}
    if "speculative_disable_by_batch_size" in given:  # vLLM: off from that many requests on
        rest["max_batch"] = _whole(given, "speculative_disable_by_batch_size", 2) - 1
        del given["speculative_disable_by_batch_size"]
    rest["always"] = given.pop("always_draft", False)
    if "speculative_draft_tensor_parallel_size" in given:
        size = _whole(given, "speculative_draft_tensor_parallel_size", 1)
        rest["draft_tensor_parallel_size"] = size
        del given["speculative_draft_tensor_parallel_size"]
    rest["device"] = given.pop("speculative_device", None)
    own = given.pop("speculate", None)
    if own is not None:
        if given:
            raise ConfigError(f"give either speculate or {', '.join(sorted(given))}, not both")
        return SpecConfig.parse(own, **rest)
    return _spec_from_flat(given, rest)


def _whole(given: Mapping[str, Any], name: str, least: int) -> int:
    value = given[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number, {least} or more")
    return value


def _spec_from_flat(given: dict[str, Any], rest: dict[str, Any]) -> SpecConfig:
    model, method = given.get("speculative_model"), given.get("method")
    if model is None and method is None:
        if given:
            raise ConfigError(f"{', '.join(sorted(given))}: also give speculative_model")
        return SpecConfig(**rest)
    if method is None:
        method = "ngram" if model == "[ngram]" else "auto"  # auto with a path: its config says
    method = _METHODS.get(str(method).lower(), str(method).lower())
    if method not in DRAFTERS:
        raise ConfigError(f"speculative method {unknown(method, {*DRAFTERS, *_METHODS})}")
    if method in _WEIGHTLESS and model not in (None, f"[{method}]", method):
        raise ConfigError(f"speculative_model={model!r}: the method {method} reads no model")
    options: dict[str, str] = {}
    if "num_speculative_tokens" in given:
        options["num_nodes"] = str(_whole(given, "num_speculative_tokens", 1))
    if method == "ngram":
        options |= _lookup_lengths(given)
    for name in ("ngram_prompt_lookup_max", "ngram_prompt_lookup_min"):
        if name in given and method != "ngram":
            say_once(f"{name} has no effect: what drafts is {method}, not ngram")
    path = None if method in _WEIGHTLESS else model
    return SpecConfig(method=method, path=path, options=options, **rest)


def _lookup_lengths(given: Mapping[str, Any]) -> dict[str, str]:
    """vLLM: what is not said of the longest and shortest match is as the other."""
    lengths = {
        name: _whole(given, f"ngram_prompt_lookup_{name}", 1)
        for name in ("max", "min")
        if f"ngram_prompt_lookup_{name}" in given
    }
    shortest = lengths.get("min", 1)
    longest = lengths.get("max", max(4, shortest))
    if shortest > longest:
        raise ConfigError(
            f"ngram_prompt_lookup_min={shortest} is above ngram_prompt_lookup_max={longest}"
        )
    return {"max_match": str(longest), "min_match": str(shortest)}


def _unbundle(bundle: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(bundle, str):
        try:
            bundle = json.loads(bundle)
        except json.JSONDecodeError as error:
            raise ConfigError(f"speculative_config is not JSON: {error}") from None
    if not isinstance(bundle, Mapping):
        raise ConfigError("speculative_config must be a dict or a JSON object")
    for key in bundle:
        if key not in _SPECULATIVE_CONFIG:
            raise ConfigError(f"speculative_config: key {unknown(key, _SPECULATIVE_CONFIG)}")
    return {_SPECULATIVE_CONFIG[k]: value for k, value in bundle.items() if value is not None}


def config_from_sglang(**given: Any) -> Config:
    """Our config from SGLang's engine arguments; vLLM's and our own names are taken too."""
    given = {name: value for name, value in given.items() if value is not None}
    if "model_path" not in given and "model" not in given:
        raise ConfigError("model_path is missing")
    for name in given:
        if name not in known_to_sglang():
            raise ConfigError(f"argument {unknown(name, known_to_sglang())}")
        if name in _SGLANG and _SGLANG[name] in given:
            raise ConfigError(f"give either {name} or {_SGLANG[name]}, not both")
    for name in [name for name in given if name in _SGLANG_NO_EFFECT]:
        _tell_no_effect(name, given.pop(name), *_SGLANG_NO_EFFECT[name])
    if "log_level" in given:
        _set_log_level(given.pop("log_level"))
    if given.pop("disable_radix_cache", False):
        given["enable_prefix_caching"] = False
    asked = {name: given.pop(name) for name in _SGLANG_SPEC if name in given}
    if asked:
        if "speculate" in given:
            raise ConfigError(f"give either speculate or {', '.join(sorted(asked))}, not both")
        given["speculate"] = _speculate_by_sglang(asked, given.pop("speculative_model", None))
    return config_from_vllm(**{_SGLANG.get(name, name): value for name, value in given.items()})


def _speculate_by_sglang(asked: dict[str, Any], path: str | None) -> str:
    """SGLang's speculative arguments as NAME[:PATH][:KEY=VALUE]...

    There, num_draft_tokens counts the token the target itself says: a chain of num_steps guesses
    has num_steps + 1. A tree keeps eagle_topk nodes of each level and looks at as many children.
    """
    path = asked.get("speculative_draft_model_path", path)
    algorithm = asked.get("speculative_algorithm")
    if algorithm is None and path is None:
        raise ConfigError(f"{', '.join(sorted(asked))}: also give speculative_algorithm")
    name = "auto" if algorithm is None else str(algorithm).lower()
    name = _METHODS.get(name, name)
    if name not in DRAFTERS:
        raise ConfigError(f"speculative_algorithm: {unknown(name, {*DRAFTERS, *_METHODS})}")
    if path is not None and name in _WEIGHTLESS:
        raise ConfigError(f"speculative_draft_model_path={path!r}: {name} reads no model")
    steps, width, size = (
        _whole(asked, key, least) if key in asked else None
        for key, least in (
            ("speculative_num_steps", 1),
            ("speculative_eagle_topk", 1),
            ("speculative_num_draft_tokens", 2),
        )
    )
    parts = [name] + ([str(path)] if path else [])
    if width is not None and width > 1 and name not in _WEIGHTLESS:
        parts += ["tree=dynamic", f"branch={width}", f"width={width}"]
        parts += [f"depth={steps}"] if steps is not None else []
    else:
        if width is not None and width > 1:
            say_once(f"speculative_eagle_topk={width} has no effect: {name} drafts a chain")
        if steps is not None and size is not None and size != steps + 1:
            say_once(
                f"speculative_num_draft_tokens={size} has no effect: a chain of "
                f"speculative_num_steps={steps} guesses is checked with {steps + 1} tokens"
            )
        size = size if steps is None else steps + 1
    return ":".join(parts + ([f"num_nodes={size - 1}"] if size is not None else []))


def _set_log_level(level: Any) -> None:
    levels = ("debug", "info", "warning", "error", "critical")
    if not isinstance(level, str) or level.lower() not in levels:
        raise ConfigError(f"log_level={level!r} must be one of {', '.join(levels)}")
    logging.getLogger("hunch").setLevel(level.upper())


def sampling_from_sglang(given: Mapping[str, Any] | None) -> SamplingParams:
    """SGLang's sampling dict; its defaults (temperature 1, 128 new tokens)."""
    values: dict[str, Any] = {"max_tokens": 128}
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"sampling_params: a {type(given).__name__} given, not a dict")
    for name, value in (given or {}).items():
        if value is None:
            continue
        if name in _SGLANG_GRAMMARS:
            if "structured_outputs" in values:
                raise RequestError(f"{name}: only one of {', '.join(_SGLANG_GRAMMARS)}")
            values["structured_outputs"] = {_SGLANG_GRAMMARS[name]: value}
            continue
        if name == "spaces_between_special_tokens":
            _tell_no_effect(name, value, (True,), "text is what the tokenizer makes of the tokens")
            continue
        ours = _SGLANG_SAMPLING.get(name, name)
        if ours not in SamplingParams.__dataclass_fields__:
            known = {*SamplingParams.__dataclass_fields__, *_SGLANG_SAMPLING, *_SGLANG_GRAMMARS}
            raise RequestError(f"sampling parameter {unknown(name, known)}")
        values[ours] = value
    return SamplingParams(**values)
