"""The engine's totals as vLLM's `LLM.get_metrics()` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A value by vLLM's name."""

    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Gauge(Metric):
    value: float


@dataclass(frozen=True, kw_only=True)
class Counter(Metric):
    value: int


@dataclass(frozen=True, kw_only=True)
class Vector(Metric):
    values: list[int]


@dataclass(frozen=True, kw_only=True)
class Histogram(Metric):
    count: int
    sum: float
    buckets: dict[str, int]  # upper bound -> values up to it


_GAUGES = {
    "num_requests_running": "num_running",
    "num_requests_waiting": "num_waiting",
    "kv_cache_usage_perc": "kv_usage",
}
_COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "generation_tokens",
    "spec_decode_num_drafts": "num_drafts",
    "spec_decode_num_draft_tokens": "drafted",
    "spec_decode_num_accepted_tokens": "accepted",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "ttft",
    "inter_token_latency_seconds": "inter_token",
    "e2e_request_latency_seconds": "e2e",
}


def metrics_of(stats: Mapping[str, Any]) -> list[Metric]:
    """Those of `LLM.stats()` that vLLM has too."""
    found: list[Metric] = []
    found += [Gauge(name=f"vllm:{name}", value=stats[key]) for name, key in _GAUGES.items()]
    found += [Counter(name=f"vllm:{name}", value=stats[key]) for name, key in _COUNTERS.items()]
    per_position = list(stats["accepted_per_position"])
    found.append(Vector(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=per_position))
    for name, key in _HISTOGRAMS.items():
        found.append(_histogram(f"vllm:{name}", stats["histograms"][key]))
    return found


def _histogram(name: str, counted: Mapping[str, Any]) -> Histogram:
    bounds = [*map(str, counted["bounds"]), "+Inf"]
    buckets, so_far = {}, 0
    for bound, count in zip(bounds, counted["counts"], strict=True):
        so_far += count
        buckets[bound] = so_far
    return Histogram(name=name, count=counted["count"], sum=counted["sum"], buckets=buckets)
