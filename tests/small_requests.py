"""Requests of a tiny model, of several kinds, for tests that compare texts."""

from __future__ import annotations

from typing import Any

from hunch import LLM, SamplingParams

SMALL: dict[str, Any] = {
    "device": "cpu", "kv_bytes": 4_000_000, "max_model_len": 128, "block_size": 4,
}  # fmt: skip
PROMPTS = [[5, 6, 7, 8] * 4, [9, 4], list(range(10, 31)), [7, 7, 7, 7, 7]]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    "filters": SamplingParams(temperature=0.9, top_p=0.9, top_k=20, max_tokens=16, seed=5),
    "penalties": SamplingParams(temperature=0.8, presence_penalty=0.7, max_tokens=12, seed=8),
}


def tokens(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]
