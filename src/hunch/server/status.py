"""The line every ten seconds: how fast, how full, what speculation brought, as vLLM prints it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hunch.server import logs
from hunch.server.service import Service

_TOTALS = (
    "prompt_tokens", "generation_tokens", "steps", "drafted", "accepted", "num_drafts",
    "prefix_hits", "prefix_queries",
)  # fmt: skip


class StatusLines:
    """Compares the engine's totals with those of the line before."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._last: Mapping[str, Any] = {}
        self._time = time.monotonic()
        self._is_quiet = True  # an idle server says so once

    async def run(self) -> None:
        interval = self._service.settings.stats_interval
        while interval > 0:
            await asyncio.sleep(interval)
            self.tell()

    def tell(self) -> None:
        now, stats = time.monotonic(), self._service.engine.stats()
        seconds = now - self._time
        self._time, last, self._last = now, self._last, stats
        if any((stats.get(name) or 0) < (last.get(name) or 0) for name in _TOTALS):
            # An engine was started again, and counts from nothing; which of several is not known.
            last = stats if "num_replicas" in stats else {}
        gained = {name: (stats.get(name) or 0) - (last.get(name) or 0) for name in _TOTALS}
        is_quiet = not any(gained.values()) and not stats.get("num_running")
        if is_quiet and self._is_quiet:
            return
        self._is_quiet = is_quiet
        line = (
            f"Engine 000: Avg prompt throughput: {gained['prompt_tokens'] / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {gained['generation_tokens'] / seconds:.1f} tokens/s, "
            f"Running: {stats.get('num_running', 0)} reqs, "
            f"Waiting: {stats.get('num_waiting', 0)} reqs, "
            f"KV cache usage: {100 * (stats.get('kv_usage') or 0):.1f}%, "
            f"Prefix cache hit rate: {100 * _share(gained, 'prefix_hits', 'prefix_queries'):.1f}%"
        )
        logs.event(logging.INFO, line)
        if gained["drafted"]:
            name = "accepted_per_position"
            before = [*(last.get(name) or ()), *[0] * len(stats[name])]
            accepted_at = [now - then for now, then in zip(stats[name], before, strict=False)]
            self._tell_speculation(gained, accepted_at, seconds)

    def _tell_speculation(
        self, gained: Mapping[str, float], accepted_at: Sequence[int], seconds: float
    ) -> None:
        """vLLM's figures of the drafts since the last line: the mean number of tokens that a step
        committed, and by position the share of drafts that were accepted up to there."""
        drafts = max(gained["num_drafts"], 1)
        rates = ", ".join(f"{number / drafts:.3f}" for number in accepted_at)
        length = 1 + gained["accepted"] / drafts
        line = (
            f"SpecDecoding metrics: Mean acceptance length: {length:.2f}, "
            f"Accepted throughput: {gained['accepted'] / seconds:.2f} tokens/s, "
            f"Drafted throughput: {gained['drafted'] / seconds:.2f} tokens/s, "
            f"Accepted: {gained['accepted']:.0f} tokens, "
            f"Drafted: {gained['drafted']:.0f} tokens, "
            f"Per-position acceptance rate: {rates}, "
            f"Avg Draft acceptance rate: {100 * _share(gained, 'accepted', 'drafted'):.1f}%"
        )
        logs.event(logging.INFO, line)


def _share(gained: Mapping[str, float], part: str, whole: str) -> float:
    return gained[part] / gained[whole] if gained[whole] else 0.0
