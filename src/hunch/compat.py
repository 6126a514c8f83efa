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
)
from hunch.errors import ConfigError, RequestError
from hunch.registry import DRAFTERS, unknown
from hunch.types import SamplingParams, Speculation

log = logging.getLogger("hunch")

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
    "speculative_draft_tensor_parallel_size",
    "speculative_disable_by_batch_size",
    "spec_decoding_acceptance_method",
    "speculative_config",
}
_NO_EFFECT = {  # taken because scripts carry them; hunch needs none of them
    "use_v2_block_manager",
    "enforce_eager",
    "enable_chunked_prefill",
    "disable_log_stats",
    "disable_log_requests",
    "disable_custom_all_reduce",
    "swap_space",
    "cpu_offload_gb",
    "download_dir",
    "tokenizer_mode",
    "load_format",
    "max_seq_len_to_capture",
    "speculative_disable_mqa_scorer",
    "disable_logprobs_during_spec_decoding",
    "distributed_executor_backend",
    "worker_use_ray",
    "cuda_graph_max_bs",
    "log_level",
}
_ONLY = {  # taken with these values alone
    "pipeline_parallel_size": (1,),
    "quantization": (None,),
    "kv_cache_dtype": ("auto",),
    "trust_remote_code": (False, True),
    "pp_size": (1,),
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
    "random_seed": "seed",
    "max_running_requests": "max_num_seqs",
    "chunked_prefill_size": "max_num_batched_tokens",
    "page_size": "block_size",
    "speculative_draft_model_path": "speculative_model",
    "speculative_num_draft_tokens": "num_speculative_tokens",
}
_SGLANG_SAMPLING = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
}
_SGLANG_GRAMMARS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar"}


def config_from_vllm(**given: Any) -> Config:
    """Our config from vLLM's engine arguments and our own names; None means 'not given'."""
    given = {name: value for name, value in given.items() if value is not None}
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    spec: dict[str, Any] = {}
    for name, value in given.items():
        if name in _PLAIN:
            sections[_PLAIN[name]][name] = value
        elif name in _SPEC:
            spec[name] = value
        elif name in _ONLY:
            _check_only(name, value)
        elif name not in _NO_EFFECT:
            raise ConfigError(f"argument {unknown(name, known_arguments())}")
    parts: dict[str, Any] = {name: make(**sections[name]) for name, make in _SECTIONS.items()}
    return Config(**parts, spec=spec_from_vllm(**spec))


def known_arguments() -> set[str]:
    return set(_PLAIN) | _SPEC | _NO_EFFECT | set(_ONLY)


def _check_only(name: str, value: Any) -> None:
    if value not in _ONLY[name]:
        allowed = " or ".join(map(repr, _ONLY[name]))
        raise ConfigError(f"{name}={value!r} is not supported; only {allowed}")
    if name == "trust_remote_code" and value:
        log.warning("trust_remote_code has no effect: hunch never runs a model's own code")


def spec_from_vllm(**given: Any) -> SpecConfig:
    """What drafts, from `speculate=...`, vLLM's flat arguments or its speculative_config."""
    bundle = given.pop("speculative_config", None)
    if bundle is not None:
        given = {**_unbundle(bundle), **given}
    verifier = given.pop("spec_decoding_acceptance_method", None)
    rest = {"verifier": given.pop("verifier", _VERIFIERS.get(verifier, verifier) or "exact")}
    if "speculative_disable_by_batch_size" in given:  # vLLM: off from that many requests on
        rest["max_batch"] = int(given.pop("speculative_disable_by_batch_size")) - 1
    rest["always"] = given.pop("always_draft", False)
    size = given.pop("speculative_draft_tensor_parallel_size", None)
    rest["draft_tensor_parallel_size"] = size
    own = given.pop("speculate", None)
    if own is not None:
        if given:
            raise ConfigError(f"give either speculate or {', '.join(sorted(given))}, not both")
        return SpecConfig.parse(own, **rest)
    return _spec_from_flat(given, rest)


def _spec_from_flat(given: dict[str, Any], rest: dict[str, Any]) -> SpecConfig:
    model, method = given.get("speculative_model"), given.get("method")
    num_tokens = given.get("num_speculative_tokens")
    if model is None and method is None:
        if given:
            raise ConfigError(f"{', '.join(sorted(given))}: also give speculative_model")
        return SpecConfig(**rest)
    if method is None:
        method = "ngram" if model == "[ngram]" else "auto"  # auto with a path: its config says
    method = _METHODS.get(str(method).lower(), str(method).lower())
    if method not in DRAFTERS:
        raise ConfigError(f"speculative method {unknown(method, {*DRAFTERS, *_METHODS})}")
    options: dict[str, str] = {}
    if num_tokens is not None:
        if int(num_tokens) < 1:
            raise ConfigError(f"num_speculative_tokens={num_tokens} must be 1 or more")
        options["num_nodes"] = str(num_tokens)
    if method == "ngram":
        longest = int(
            given.get("ngram_prompt_lookup_max") or given.get("ngram_prompt_lookup_min") or 4
        )
        shortest = int(given.get("ngram_prompt_lookup_min") or 1)
        options |= {"max_match": str(longest), "min_match": str(shortest)}
    return SpecConfig(
        method=method, path=None if method == "ngram" else model, options=options, **rest
    )


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
    if "model_path" not in given and "model" not in given:
        raise ConfigError("model_path is missing")
    algorithm = given.pop("speculative_algorithm", None)
    steps, width = (
        given.pop("speculative_num_steps", None),
        given.pop("speculative_eagle_topk", None),
    )
    if given.pop("disable_radix_cache", None):
        given["enable_prefix_caching"] = False
    ours = {_SGLANG.get(name, name): value for name, value in given.items()}
    if algorithm is not None:
        path, size = ours.pop("speculative_model", None), ours.pop("num_speculative_tokens", None)
        name = _METHODS.get(str(algorithm).lower(), str(algorithm).lower())
        parts = [name] + ([str(path)] if path else [])
        if size is not None:
            parts.append(f"num_nodes={size}")
        if width is not None and int(width) > 1:
            parts += ["tree=dynamic", f"branch={width}"]
            parts += [f"depth={steps}"] if steps is not None else []
        ours["speculate"] = ":".join(parts)
    elif ours.get("speculative_model") and ours.get("num_speculative_tokens") is None and steps:
        ours["num_speculative_tokens"] = steps
    return config_from_vllm(**ours)


def sampling_from_sglang(given: Mapping[str, Any] | None) -> SamplingParams:
    """SGLang's sampling dict; its defaults (temperature 1, 128 new tokens)."""
    values: dict[str, Any] = {"max_tokens": 128}
    for name, value in (given or {}).items():
        if name in _SGLANG_GRAMMARS:
            asked = None if value is None else {_SGLANG_GRAMMARS[name]: value}
            values["structured_outputs"] = asked or values.get("structured_outputs")
            continue
        ours = _SGLANG_SAMPLING.get(name, name)
        if name == "no_stop_trim":
            ours = "include_stop_str_in_output"
        elif name == "spaces_between_special_tokens":
            continue
        elif name == "speculation":
            value = Speculation(**value)
        if ours not in SamplingParams.__dataclass_fields__:
            known = {*SamplingParams.__dataclass_fields__, *_SGLANG_SAMPLING, *_SGLANG_GRAMMARS}
            raise RequestError(f"sampling parameter {unknown(name, known)}")
        values[ours] = value
    return SamplingParams(**{name: value for name, value in values.items() if value is not None})
