"""vLLM's argument names, translated to our config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hunch.compat.server_flags import as_argument
from hunch.compat.token_tree import NAME as TREE
from hunch.compat.token_tree import tree_options
from hunch.config import (
    CacheConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    SpecConfig,
    say_once,
)
from hunch.errors import ConfigError
from hunch.registry import DRAFTERS, unknown
from hunch.types import SamplingParams

_SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "schedule": ScheduleConfig,
    "parallel": ParallelConfig,
}
_PLAIN = {  # argument -> section it is a field of, under the same name
    field: name for name, section in _SECTIONS.items() for field in section.__dataclass_fields__
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
    "speculative_max_model_len",
    "spec_decoding_acceptance_method",
    "speculative_config",
}
GRAPHS = "hunch captures a GPU's steps by itself, and a CPU has none to capture"
_ADAPTERS = "an adapter is merged into weights of its own: lora=PATH, or --lora-modules"
_RANKS = "ranks are processes of this machine, or those that torchrun started"
_TEXT = "hunch reads text alone"
_FILES = "the files say themselves what they are"
_GRAMMARS = "llguidance reads every grammar"
_AS_TARGET = "a drafter is computed as its target is"
_ALL_GUESSES = "a head that reads the token before weighs all tokens by it"
_HASHES = "a block is found again as soon as all that depends on it is written"
_FLY = "rejection_sample_method='typical_acceptance_sampler' accepts more, and changes the text"
_PAYS = "how much is drafted and checked follows what is accepted and what passes cost"
_NO_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {
    # argument -> values that ask for what hunch does anyway, and why others change nothing
    "use_v2_block_manager": ((True,), "there is one block manager, and it can do what v2 can"),
    "enforce_eager": ((False,), GRAPHS),
    "max_seq_len_to_capture": ((), GRAPHS),
    "compilation_config": ((), GRAPHS),
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
    "load_format": (("auto",), _FILES),
    "limit_mm_per_prompt": ((), _TEXT),
    "disable_chunked_mm_input": ((), _TEXT),
    "async_scheduling": ((), "depth says how many steps are launched ahead; it changes no text"),
    "generation_config": (("auto", "vllm"), "llm.get_default_sampling_params() gives the model's"),
    "speculative_model_quantization": ((), _FILES),
    "speculative_disable_mqa_scorer": ((False,), "drafts are always checked in one pass"),
    "disable_logprobs_during_spec_decoding": ((False,), "logprobs are given to who asks for them"),
    "skip_tokenizer_init": ((False,), "the tokenizer is read all the same, and answers have texts"),
    "trust_remote_code": ((False,), "hunch never runs a model's own code"),
    "enable_lora": ((True,), _ADAPTERS),
    "max_loras": ((), _ADAPTERS),
    "max_lora_rank": ((), _ADAPTERS),
    "guided_decoding_backend": ((), _GRAMMARS),
    "structured_outputs_config": ((), _GRAMMARS),
    "max_logprobs": ((), "a request may ask for as many as there are tokens"),
    "model_impl": (("auto", "vllm"), "hunch has one of each family"),
    "enable_expert_parallel": ((False,), "experts are split over ranks as layers are"),
    "disable_cascade_attn": ((), "attention walks positions in one order, always"),
    "disable_async_output_proc": ((), "depth says how many steps are launched ahead"),
    "enable_sleep_mode": ((False,), "close() frees all memory"),
    "model_loader_extra_config": (({},), _FILES),
    "mm_processor_kwargs": (({},), _TEXT),
    "use_tqdm_on_load": ((), "models are loaded without a bar"),
    "enable_auto_tool_choice": ((False,), "a model may call tools wherever a request brings some"),
}
_ONLY = {  # taken with these values alone
    "data_parallel_size": (1,),
    "trust_remote_code": (False, True),
    "tokenizer_mode": ("auto", "slow"),
    "load_format": ("auto", "safetensors", "pt", "gguf", "bitsandbytes"),
    "dp_size": (1,),
    "task": ("generate", "auto", "embed", "embedding"),  # every model embeds: LLM.embed
    "runner": ("generate", "auto", "pooling"),
    "scheduling_policy": ("fcfs", "priority"),
}
_INSTEAD = {"data_parallel_size": "; a program or `hunch serve --replicas` for each device"}
_IN_CONFIG = ("hf_config_path", "rope_scaling", "rope_theta")
_COPY = "give it in hf_overrides, whose values stand in place of config.json's"
_BUNDLES = ("kv_events_config", "hf_overrides")  # kept as JSON
_DTYPES = {"half": "float16", "float": "float32"}
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
    "max_model_len": "speculative_max_model_len",
    "revision": "revision",
    "use_heterogeneous_vocab": "cross_vocab",
    TREE: TREE,
}
_SPECULATIVE_INSTEAD = {  # its keys that are refused, and what to give
    "tensor_parallel_size": "give draft_tensor_parallel_size",
    **dict.fromkeys(("fly_window_size", "fly_entropy_threshold", "fly_entropy_top_k"), _FLY),
    **dict.fromkeys(("target_model_config", "draft_model_config"), "give paths: model"),
    **dict.fromkeys(("target_parallel_config", "draft_parallel_config"), "give sizes"),
}
_SPECULATIVE_NO_EFFECT: dict[str, tuple[tuple[Any, ...], str]] = {  # its keys that change nothing
    **dict.fromkeys(("quantization", "draft_load_config", "code_revision"), ((), _FILES)),
    **dict.fromkeys(("attention_backend", "moe_backend", "kv_cache_dtype"), ((), _AS_TARGET)),
    "use_local_argmax_reduction": ((), "ranks exchange what a choice needs and no more"),
    "disable_logprobs": ((False,), "logprobs are given to who asks for them"),
    "disable_mqa_scorer": ((False,), "drafts are always checked in one pass"),
    "parallel_drafting": ((False,), _FILES),
    "enforce_eager": ((False,), GRAPHS),
    "disable_padded_drafter_batch": ((), "rows of different lengths share a step as they are"),
    "draft_sample_method": ((), "drafters guess with the target's own noise"),
    "enable_adaptive_verification": ((True,), _PAYS),
    "num_speculative_tokens_per_batch_size": ((), _PAYS),
    "suffix_decoding_max_tree_depth": ((), _PAYS),
    "suffix_decoding_max_spec_factor": ((), _PAYS),
    "suffix_decoding_min_token_prob": ((), _PAYS),
    "suffix_decoding_max_cached_requests": (
        (0,),
        "speculate='suffix:shared=true' looks into answers of other requests",
    ),
    **dict.fromkeys(("dspark_draft_topk", "markov_topk"), ((), _ALL_GUESSES)),
    "xpress_topc": ((), _ALL_GUESSES),
    "draft_lm_head_quantization": ((), _AS_TARGET),
    "index_share_for_mtp_iteration": ((), _FILES),
    **dict.fromkeys(("disable_eagle_block_drop", "disable_lookahead_block_hashes"), ((), _HASHES)),
}
_METHODS = {  # vLLM's and SGLang's names of methods -> ours
    "draft_model": "draft",
    "mlp_speculator": "mlp",
    "[ngram]": "ngram",
    "ngram_gpu": "ngram",
    "nextn": "mtp",
    "standalone": "draft",
}
_VERIFIERS = {
    "rejection_sampler": "exact",
    "standard": "exact",
    "strict": "exact",
    "probabilistic": "exact",
    "typical_acceptance_sampler": "typical",
}
WEIGHTLESS = ("off", "ngram", "suffix", "prediction", "recycling")  # methods without a model


def config_from_vllm(**given: Any) -> Config:
    """Our config from vLLM's engine arguments and our own names; None means 'not given'."""
    given = {name: value for name, value in given.items() if value is not None}
    given = known_names(given, known_arguments() | set(_IN_CONFIG))
    sections: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    spec: dict[str, Any] = {}
    for name, value in given.items():
        if name in _ONLY and value not in _ONLY[name]:
            allowed = " or ".join(map(repr, _ONLY[name])) + _INSTEAD.get(name, "")
            raise ConfigError(f"{name}={value!r} is not supported; only {allowed}")
        if name == "dtype" and (isinstance(value, str) or type(value).__module__ == "torch"):
            value = str(value).removeprefix("torch.")  # torch.float32 is "float32" too
            value = _DTYPES.get(value, value)
        if name == "max_model_len" and value in (-1, "auto"):
            continue  # as long as there is room for
        if name == "hf_overrides" and callable(value):
            raise ConfigError("hf_overrides: give a dict of what to change, not a function")
        if name in _PLAIN:
            is_bundle = name in _BUNDLES and isinstance(value, Mapping)
            sections[_PLAIN[name]][name] = json.dumps(dict(value)) if is_bundle else value
        elif name in _SPEC:
            spec[name] = value
        elif name in _NO_EFFECT:
            tell_no_effect(name, value, *_NO_EFFECT[name])
        elif name in _IN_CONFIG:
            raise ConfigError(f"{name}: {_COPY}")
    parts: dict[str, Any] = {name: make(**sections[name]) for name, make in _SECTIONS.items()}
    return Config(**parts, spec=spec_from_vllm(**spec), given=frozenset(given))


def known_names(given: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """The arguments by `known` names; flags of servers say what they mean."""
    taken: dict[str, Any] = {}
    for name, value in given.items():
        meant = {name: value} if name in known else as_argument(name, value, known)
        if meant is None and name in SamplingParams.__dataclass_fields__:
            raise ConfigError(f"argument {name!r} goes into SamplingParams({name}=...)")
        if meant is None:
            raise ConfigError(f"argument {unknown(name, known)}")
        for ours, one in meant.items():
            if ours != name and ours in given:
                raise ConfigError(f"give either {name} or {ours}, not both")
            taken[ours] = one
    return taken


def known_arguments() -> set[str]:
    return set(_PLAIN) | _SPEC | set(_NO_EFFECT) | set(_ONLY)


def without_effect() -> dict[str, str]:
    """vLLM's arguments that change nothing here, with the reason."""
    return {name: why for name, (_, why) in _NO_EFFECT.items()}


def tell_no_effect(name: str, value: Any, quiet: tuple[Any, ...], why: str) -> None:
    if value not in quiet:
        say_once(f"{name}={value!r} has no effect: {why}")


def unused_arguments(config: Config, device: str) -> list[str]:
    """What was given and has no meaning on this kind of device, a sentence each."""
    cache, given, words = config.cache, config.given, []
    if "gpu_memory_utilization" in given and (cache.num_blocks or cache.kv_bytes):
        words.append("gpu_memory_utilization has no effect beside kv_bytes or num_blocks")
    elif "gpu_memory_utilization" in given and device == "cpu":
        words.append("gpu_memory_utilization has no effect on a CPU: kv_bytes says how much KV")
    if config.model.activation_bits != "auto" and (
        device != "cpu" or config.model.kernels == "torch"
    ):
        words.append("activation_bits has no effect: only a CPU's own kernels round activations")
    if {"kv_bytes", "num_blocks"} <= given:
        words.append("kv_bytes has no effect beside num_blocks")
    if config.spec.draft_tensor_parallel_size and config.spec.method in WEIGHTLESS:
        words.append(f"draft_tensor_parallel_size has no effect: {config.spec.method} has no model")
    if config.spec.device and config.spec.method in WEIGHTLESS:
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
        rest["max_batch"] = whole(given, "speculative_disable_by_batch_size", 2) - 1
        del given["speculative_disable_by_batch_size"]
    rest["always"] = given.pop("always_draft", False)
    if "speculative_draft_tensor_parallel_size" in given:
        size = whole(given, "speculative_draft_tensor_parallel_size", 1)
        rest["draft_tensor_parallel_size"] = size
        del given["speculative_draft_tensor_parallel_size"]
    rest["device"] = given.pop("speculative_device", None)
    rest["revision"] = given.pop("revision", None)
    own = given.pop("speculate", None)
    if own is not None:
        if given:
            raise ConfigError(f"give either speculate or {', '.join(sorted(given))}, not both")
        return SpecConfig.parse(own, **rest)
    return _spec_from_flat(given, rest)


def whole(given: Mapping[str, Any], name: str, least: int) -> int:
    value = given[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{name}={value!r} must be a whole number, {least} or more")
    return value


def _spec_from_flat(given: dict[str, Any], rest: dict[str, Any]) -> SpecConfig:
    model, method = given.get("speculative_model"), given.get("method")
    if model is None and method is None:
        if given:
            raise ConfigError(
                f"{', '.join(sorted(given))}: also say what drafts: speculative_model, or the "
                "'method' of speculative_config, for example 'ngram'"
            )
        return SpecConfig(**rest)
    if method is None:
        # With a path, `auto` takes the method that its config names.
        method = "ngram" if model in ("ngram", "[ngram]") else "auto"
    method = method_of(str(method), "speculative method")
    if method in WEIGHTLESS and model not in (None, f"[{method}]", method):
        raise ConfigError(f"speculative_model={model!r}: the method {method} reads no model")
    options: dict[str, str] = {}
    num_tokens = None
    if "num_speculative_tokens" in given:
        num_tokens = whole(given, "num_speculative_tokens", 1)
        options["num_nodes"] = str(num_tokens)
    if TREE in given and method in WEIGHTLESS:
        say_once(f"{TREE} has no effect: {method} has no model")
    elif TREE in given:
        options = tree_options(given[TREE], method, num_tokens)
    if method == "ngram":
        options |= _lookup_lengths(given)
    if "speculative_max_model_len" in given and method in WEIGHTLESS:
        say_once(f"speculative_max_model_len has no effect: {method} has no model")
    elif "speculative_max_model_len" in given:
        options["window"] = str(whole(given, "speculative_max_model_len", 1))
    if given.get("cross_vocab"):
        options["cross_vocab"] = "true"
    for name in ("ngram_prompt_lookup_max", "ngram_prompt_lookup_min"):
        if name in given and method != "ngram":
            say_once(f"{name} has no effect: what drafts is {method}, not ngram")
    path = None if method in WEIGHTLESS else model
    return SpecConfig(method=method, path=path, options=options, **rest)


def method_of(theirs: str, what: str) -> str:
    """Our name of a method; vLLM has one of its own for every family's MTP layers."""
    name = theirs.lower()
    name = "mtp" if name.endswith("_mtp") else _METHODS.get(name, name)
    if name not in DRAFTERS:
        raise ConfigError(f"{what}: {unknown(name, {*DRAFTERS, *_METHODS})}")
    return name


def _lookup_lengths(given: Mapping[str, Any]) -> dict[str, str]:
    """The longest and the shortest match: 4 and 1, unless given."""
    lengths = {
        name: whole(given, f"ngram_prompt_lookup_{name}", 1)
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
    taken: dict[str, Any] = {}
    for key, value in bundle.items():
        if str(key).startswith("synthetic_") or value == "synthetic":
            raise ConfigError(
                f"speculative_config: {key}: give speculate='synthetic:tokens_per_pass=N' instead"
            )
        if value is not None and (instead := _SPECULATIVE_INSTEAD.get(key)):
            raise ConfigError(f"speculative_config: {key}: {instead}")
        if key in _SPECULATIVE_INSTEAD:
            continue
        if key not in _SPECULATIVE_CONFIG and key not in _SPECULATIVE_NO_EFFECT:
            known = {*_SPECULATIVE_CONFIG, *_SPECULATIVE_NO_EFFECT}
            raise ConfigError(f"speculative_config: key {unknown(str(key), known)}")
        if value is None:
            continue
        if key in _SPECULATIVE_CONFIG:
            taken[_SPECULATIVE_CONFIG[key]] = value
        else:
            tell_no_effect(f"speculative_config: {key}", value, *_SPECULATIVE_NO_EFFECT[key])
    return taken
