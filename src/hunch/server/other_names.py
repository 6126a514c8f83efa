"""What clients of vLLM, SGLang, llama.cpp and OpenRouter send beside OpenAI's fields, as ours.

A field that cannot be told apart from a misspelt one is still an error. One that asks for something
hunch does not do is taken where its value asks for nothing.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any

# The same under another name.
NAMES = {
    "regex": "guided_regex",  # SGLang
    "ebnf": "guided_grammar",
    "min_new_tokens": "min_tokens",
    "max_new_tokens": "max_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "grammar": "guided_grammar",  # llama.cpp
    "json_schema": "guided_json",
    "n_predict": "max_tokens",
    "n_cmpl": "n",
    "repeat_penalty": "repetition_penalty",
    "chat_template_args": "chat_template_kwargs",  # Dynamo
    "use_activation": "normalize",  # vLLM's embeddings
}

# Nothing that an answer shows depends on these.
# fmt: off
HINTS = frozenset({
    "request_id", "rid", "guided_decoding_backend", "mm_processor_kwargs", "kv_transfer_params",
    "ec_transfer_params", "vllm_xargs", "log_metrics", "data_parallel_rank", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "custom_params", "stream_reasoning",
    "return_cached_tokens_details", "session_id", "conversation_id", "routing_key", "no_logs",
    "routed_dp_rank", "custom_labels", "stream_interval", "cache_prompt", "id_slot",
    "timings_per_token", "n_keep", "return_progress", "t_max_predict_ms", "provider",
    "transforms", "route", "models", "plugins", "usage", "ttl", "keep_alive", "nvext",
    "draft_model", "prompt_cache_options", "return_weight_versions", "mm_payload",
    "media_io_kwargs", "routed_experts_prompt_start",
    # llama.cpp's: options of samplers that are off, and the order of those that are on
    "samplers", "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "dry_base", "min_keep",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold",
    "adaptive_decay", "backend_sampling", "response_fields", "n_cache_reuse", "n_discard",
    "t_max_prompt_ms", "sse_ping_interval", "parse_tool_calls", "chat_format",
})
# fmt: on

# Only these values ask for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("length_penalty", "typical_p", "tfs_z", "best_of"), (1,)),
    **dict.fromkeys(("separate_reasoning", "do_sample", "spaces_between_special_tokens"), (True,)),
    **dict.fromkeys(
        (
            *("mirostat", "dynatemp_range", "top_a", "xtc_probability", "dry_multiplier"),
            *("n_probs", "n_indent"),
        ),
        (0,),
    ),
    **dict.fromkeys(
        (
            *("use_beam_search", "early_stopping", "return_hidden_states"),
            *("return_prompt_token_ids", "return_entropy", "watermarking", "return_token_offsets"),
            *("return_prompt_text", "return_mm_kwargs", "return_sampling_mask"),
            *("return_routed_experts", "enable_response_messages", "echo", "post_sampling_probs"),
            *("grammar_lazy", "reasoning_in_content"),
        ),
        (False,),
    ),
    **dict.fromkeys(("logits_processors", "grammar_triggers", "preserved_tokens", "lora"), ([],)),
    "adaptive_target": (-1,),
    "generation_prompt": ("",),
    "custom_logit_processor": ("",),
    "truncation_side": ("left",),
    "include_reasoning": (True,),
    "padding": ("do_not_pad",),  # of embeddings, as the next two
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "session_params": ({},),
    "reasoning_format": ("auto", "deepseek"),
    "lora_path": ("",),
    "top_n_sigma": (-1, 0),
    "repeat_last_n": (-1,),
    "add_special_tokens": (False,),  # of a chat: its template has them
}

# Fields that are refused, and what to send in their place.
INSTEAD = {
    "functions": "send them as tools, their newer form",
    "function_call": "send tool_choice, its newer form",
    "extra_body": "it belongs to a client's call, which puts its fields beside the others",
    "web_search_options": "this server does not search the web",
    "moderation": "this server does not moderate",
    "audio": "the server takes and gives text alone",
    "separate_reasoning": "reasoning always stands in a field of its own",
    "guided_whitespace_pattern": "send guided_grammar or guided_regex, which say where spaces go",
    "lora": "an adapter has a name of its own: send it as model",
    "lora_path": "an adapter has a name of its own: send it as model",
    "repeat_last_n": "penalties look at all tokens: send -1",
    "session_params": "send the whole prompt; what it begins with is cached",
    "stop_regex": "send stop, strings that end the answer",
    "repetition_detection": "send repetition_penalty, or stop strings",
    "prompt_embeds": "send prompt: text or token ids",
    "previous_input_messages": "send previous_response_id, or all of input",
    "thinking_token_budget": "a chat takes it: /v1/chat/completions",
    "logprob_token_ids": "send top_logprobs, for the likeliest tokens",
    "token_ids_logprob": "send top_logprobs_num, for the likeliest tokens",
    "n_probs": "send logprobs: true and top_logprobs",
    **dict.fromkeys(("image_data", "audio_data", "video_data"), "the server takes text alone"),
    "images": "the server takes text alone",
    "prompt": "/v1/completions takes it; a chat takes messages, /generate text",
    "messages": "/v1/chat/completions takes them",
    "input": "/v1/responses takes it; /v1/chat/completions takes messages",
    "use_beam_search": "LLM.beam_search does it, without a server",
}


def _thinking(value: Any) -> dict[str, Any]:
    """`{"type": "disabled"}` or a bool: what templates of reasoning models read."""
    asked = value.get("type") != "disabled" if isinstance(value, Mapping) else bool(value)
    return {"chat_template_kwargs": {"enable_thinking": asked, "thinking": asked}}


def _reasoning(value: Any) -> dict[str, Any]:
    """OpenRouter's wrapping of the effort."""
    if not isinstance(value, Mapping):
        return {"reasoning_effort": value}
    found = {
        "reasoning_effort": value.get("effort"),
        "thinking_token_budget": value.get("max_tokens"),
    }
    if value.get("exclude"):
        found["include_reasoning"] = False
    if "enabled" in value and "effort" not in value:
        found |= _thinking(value["enabled"])
    return found


CHAT: dict[str, Callable[[Any], dict[str, Any]]] = {
    "enable_thinking": _thinking,
    "thinking": _thinking,
    "reasoning": _reasoning,
    "documents": lambda value: {"chat_template_kwargs": {"documents": value}},
}


def as_ours(
    given: Mapping[str, Any], known: frozenset[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The body in our names, and fields that are refused, with the reason.

    What stands under its own name goes before what another name says. Fields that nobody knows
    stay: they are refused with the nearest name.
    """
    found: dict[str, Any] = {}
    later: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, value in given.items():
        if name in known:
            found[name] = value
        elif value is None or name in HINTS or _is_neutral(name, value):
            continue
        elif NAMES.get(name) in known:
            later[NAMES[name]] = value
        elif name == "structural_tag" and "structured_outputs" in known:  # SGLang
            later["structured_outputs"] = {name: value}
        elif name in CHAT and "messages" in known:
            _add(later, CHAT[name](value))
        elif name in INSTEAD:
            refused[name] = INSTEAD[name]
        elif name in NEUTRAL:
            refused[name] = f"only {' or '.join(map(repr, NEUTRAL[name]))} is taken"
        else:
            found[name] = value
    _add(later, found)
    return later, refused


def _is_neutral(name: str, value: Any) -> bool:
    return any(
        value == one and isinstance(value, bool) == isinstance(one, bool)
        for one in NEUTRAL.get(name, ())
    )


def _add(to: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Values for a template are joined, everything else is replaced."""
    for name, value in more.items():
        old = to.get(name)
        both = isinstance(old, dict) and isinstance(value, dict) and name == "chat_template_kwargs"
        to[name] = {**old, **value} if both and old else value


_EMBED = "POST /v1/embeddings gives texts as vectors, which a program can compare"
_ADAPTERS = "an adapter is loaded at the start: --lora-modules NAME=PATH"
_MODELS = "give `hunch serve` the models to serve; `hunch pull` fetches one"
_RUNNING = "start and stop the server instead: its memory goes with it"
_PATHS = {  # of other servers -> what to do where this one has none of them
    **dict.fromkeys(("rerank", "v1/rerank", "v2/rerank", "reranking", "v1/reranking"), _EMBED),
    **dict.fromkeys(("score", "v1/score", "classify", "pooling", "encode"), _EMBED),
    **dict.fromkeys(("embedding", "embeddings"), _EMBED),
    **dict.fromkeys(("api/pull", "api/push", "api/create", "api/copy", "api/delete"), _MODELS),
    **dict.fromkeys(("update_weights_from_disk", "update_weights_from_tensor"), _RUNNING),
    "slots": "no slots are kept in files: prefixes are found again by themselves",
    **dict.fromkeys(("v1/load_lora_adapter", "v1/unload_lora_adapter"), _ADAPTERS),
    **dict.fromkeys(("lora-adapters", "load_lora_adapter", "unload_lora_adapter"), _ADAPTERS),
    **dict.fromkeys(("sleep", "wake_up", "release_memory_occupation"), _RUNNING),
    **dict.fromkeys(("docs", "redoc"), "/openapi.json has the schema"),
    "abort_request": "a request ends when its connection is closed",
    "v1/batches": "send the requests side by side: they share steps",
    **dict.fromkeys(("v1/audio", "v1/images", "v1/videos"), "it reads and writes text alone"),
    "v1/conversations": "no conversations are kept: send previous_response_id",
    "v1/moderations": "it does not moderate",
    "v1/files": "it keeps no files: send texts with each request",
    "v1/fine_tuning": "`hunch train` trains drafters, and nothing else",
}


def instead_of(path: str, known: Collection[str] = ()) -> str:
    """What to do where a server has no such path, as the end of a sentence; often nothing.

    `known`: the paths it has.
    """
    words = path.strip("/").split("/")
    for count in (len(words), 2, 1):
        if found := _PATHS.get("/".join(words[:count])):
            return f": {found}"
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.8)
    return f"; did you mean {near[0]}?" if near else ""
