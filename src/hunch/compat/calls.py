"""vLLM's calls of an `LLM` and their arguments that hunch has not, each with the reason."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hunch.compat.metrics import Metric, metrics_of
from hunch.errors import RequestError
from hunch.types import SamplingParams, plain_only

_WORKERS = "reaches into vLLM's workers, which hunch has not"
_SLEEP = "close() frees all memory, and LLM(...) loads the model again"
_REQUESTS = "LLM.generate answers a batch, AsyncLLM.generate requests as they come"
_CONFIG = "config has what the engine was given, model_config the context that it has"
_ADAPTER = "give the engine lora=PATH, which merges one adapter"
_TASKS = "hunch generates and embeds (LLM.generate, LLM.chat, LLM.embed)"
_METHODS = {
    "beam_search": "LLM.beam_search searches; SamplingParams(n=4) gives several sampled answers",
    "classify": _TASKS,
    "score": "the vectors of LLM.embed have length 1: the product of two is their cosine",
    "reward": _TASKS,
    **dict.fromkeys(("engine_core", "add_request", "enqueue", "step"), _REQUESTS),
    **dict.fromkeys(("model_config", "get_model_config", "get_vllm_config"), _CONFIG),
    **dict.fromkeys(
        ("vllm_config", "cache_config", "parallel_config", "scheduler_config"), _CONFIG
    ),
    **dict.fromkeys(("model_executor", "output_processor", "scheduler"), _WORKERS),
    **dict.fromkeys(("supported_tasks", "get_supported_tasks"), _TASKS),
    **dict.fromkeys(("add_lora", "remove_lora", "list_loras", "pin_lora"), _ADAPTER),
    "reset_mm_cache": "hunch reads text alone",
    "preprocess_chat": "encode_messages gives a chat as token ids",
    "do_log_stats": "stats() has the totals, under hunch's names",
    "shutdown_background_loop": "shutdown() ends it",
    "from_pretrained": "LLM(PATH or NAME) loads a model",
    "collective_rpc": _WORKERS,
    "apply_model": _WORKERS,
    "set_tokenizer": "give LLM(tokenizer=PATH)",
    # of SGLang's engine
    "rerank": _TASKS,
    "abort_request": "leaving the loop over a stream ends its request",
    **dict.fromkeys(("open_session", "close_session"), "give the whole text: prefixes are cached"),
    **dict.fromkeys(("load_lora_adapter", "unload_lora_adapter"), _ADAPTER),
    **dict.fromkeys(("update_weights_from_disk", "update_weights_from_tensor"), _SLEEP),
    **dict.fromkeys(("update_weights_from_distributed", "init_weights_update_group"), _SLEEP),
    **dict.fromkeys(("save_sharded_model", "save_remote_model"), "weights stay in their files"),
    "get_model_info": "config has what the engine was given",
    **dict.fromkeys(("release_memory_occupation", "resume_memory_occupation"), _SLEEP),
    "get_weights_by_name": _WORKERS,
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping"), _SLEEP),
    "start_profile": "give torch.profiler the call itself",
    "stop_profile": "give torch.profiler the call itself",
}
_TEXT = "hunch reads text alone"
_ADAPTERS = "an adapter is merged into weights of its own: LLM(lora=PATH)"
_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    # argument -> values that ask for what hunch does anyway, and what to do in place of others
    "lora_request": ((None,), _ADAPTERS),
    "prompt_adapter_request": ((None,), _ADAPTERS),
    "priority": ((None, 0), "generate takes it"),
    "prompt_token_ids": ((None,), "give token ids as prompts"),
    "prompt_text": ((None,), 'give {"prompt": TEXT, "prompt_token_ids": IDS} as the prompt'),
    "truncate_prompt_tokens": ((None,), "give the last tokens of the prompt alone"),
    "data_parallel_rank": ((None, 0), "there is one engine"),
    "guided_options_request": ((None,), "give SamplingParams(structured_outputs=...)"),
    "tokenization_kwargs": ((None, {}), "give token ids as prompts"),
    "trace_headers": ((None, {}), "only a server writes traces"),
    "mm_processor_kwargs": ((None, {}), _TEXT),
    "use_tqdm": ((None, True, False), "only generate and chat have a bar"),
    "concurrency_limit": ((None,), "max_num_seqs says how many run at once"),
    "chat_template_content_format": (("auto", "string", "openai"), "one of these"),
}


class VllmCalls:
    """vLLM's methods over what hunch has; others that are asked for say what to do instead."""

    stats: Callable[[], dict[str, Any]]
    reset_cache: Callable[..., bool]

    def get_metrics(self) -> list[Metric]:
        """Totals since the start, by vLLM's names; `stats` has more of them."""
        return metrics_of(self.stats())

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; whether none is left. Running requests go on as they are, and
        what they hold is forgotten only where it is asked for."""
        return self.reset_cache(is_held_too=reset_running_requests)

    if not TYPE_CHECKING:  # type checkers shall go on to find names that are not there

        def __getattr__(self, name: str) -> Any:
            class_name = type(self).__name__
            if name in _METHODS:
                raise AttributeError(f"{class_name}.{name} is not covered: {_METHODS[name]}")
            raise AttributeError(f"{class_name!r} object has no attribute {name!r}")


def wishes_of(call: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `given` that mean something here; others of vLLM's may only ask for nothing."""
    kept = plain_only(call, given, _ARGUMENTS)
    for name in kept:
        if name not in known:
            is_sampling = name in SamplingParams.__dataclass_fields__
            hint = "; it goes into SamplingParams(...)" if is_sampling else ""
            raise RequestError(f"{call}: {name!r} is not an argument of it{hint}")
    return kept
