"""The arguments of `LLM` and `AsyncLLM` with their types, for editors and type checkers.

What each means stands in config.py; vLLM's names are translated in compat/. None: not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any, TypedDict


class Arguments(TypedDict, total=False):
    # how to draft
    speculate: str | None
    verifier: str | None
    always_draft: bool | None
    speculative_config: Mapping[str, Any] | str | None
    speculative_model: str | None
    num_speculative_tokens: int | None
    ngram_prompt_lookup_max: int | None
    ngram_prompt_lookup_min: int | None
    speculative_draft_tensor_parallel_size: int | None
    speculative_device: str | None
    speculative_disable_by_batch_size: int | None
    speculative_max_model_len: int | None
    spec_decoding_acceptance_method: str | None
    # the target
    tokenizer: str | PathLike[str] | None
    revision: str | None
    hf_overrides: str | dict[str, Any] | None
    download_dir: str | PathLike[str] | None
    dtype: str | None
    kv_cache_dtype: str | None
    quantization: str | None
    device: str | None
    max_model_len: int | None
    seed: int | None
    threads: int | None
    kernels: str | None
    activation_bits: int | str | None
    chat_template: str | None
    tool_call_parser: str | None
    reasoning_parser: str | None
    logprobs_mode: str | None
    tensor_parallel_size: int | None
    pipeline_parallel_size: int | None
    engines_per_device: int | None
    enable_lora: bool | None
    lora: str | None
    max_loras: int | None
    max_lora_rank: int | None
    # KV cache and batches
    block_size: int | None
    kv_bytes: int | None
    num_blocks: int | None
    gpu_memory_utilization: float | None
    enable_prefix_caching: bool | None
    kv_events_config: str | dict[str, Any] | None
    max_num_seqs: int | None
    max_num_batched_tokens: int | None
    max_queue: int | None
    depth: int | None
    # vLLM's, taken with one value alone or without effect: compat/ says which and why
    data_parallel_size: int | None
    dp_size: int | None
    trust_remote_code: bool | None
    tokenizer_mode: str | None
    load_format: str | None
    task: str | None
    runner: str | None
    generation_config: str | None
    limit_mm_per_prompt: Any
    disable_chunked_mm_input: bool | None
    async_scheduling: bool | None
    speculative_model_quantization: str | None
    use_v2_block_manager: bool | None
    enforce_eager: bool | None
    max_seq_len_to_capture: int | None
    compilation_config: Any
    enable_chunked_prefill: bool | None
    disable_log_stats: bool | None
    disable_log_requests: bool | None
    disable_custom_all_reduce: bool | None
    distributed_executor_backend: str | None
    worker_use_ray: bool | None
    swap_space: float | None
    cpu_offload_gb: float | None
    speculative_disable_mqa_scorer: bool | None
    disable_logprobs_during_spec_decoding: bool | None
    enable_auto_tool_choice: bool | None
    guided_decoding_backend: str | None
    structured_outputs_config: Any
    max_logprobs: int | None
    model_impl: str | None
    enable_expert_parallel: bool | None
    disable_cascade_attn: bool | None
    disable_async_output_proc: bool | None
    enable_sleep_mode: bool | None
    model_loader_extra_config: Any
    mm_processor_kwargs: Any
    use_tqdm_on_load: bool | None
    scheduling_policy: str | None
    skip_tokenizer_init: bool | None
