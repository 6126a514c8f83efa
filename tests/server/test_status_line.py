"""The status line's figures of speculation are vLLM's, of what happened since the line before."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from hunch.server.status import StatusLines


def totals(drafts: int, drafted: int, accepted_at: list[int], tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": 10,
        "generation_tokens": tokens,
        "steps": drafts,
        "num_drafts": drafts,
        "drafted": drafted,
        "accepted": sum(accepted_at),
        "accepted_per_position": accepted_at,
        "num_running": 1,
    }


def test_length_and_positions_are_of_the_drafts_since_the_last_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "hunch")
    monkeypatch.setattr(logging.getLogger("hunch"), "propagate", True)
    reports = iter([totals(100, 300, [80, 40, 20], 240), totals(150, 450, [90, 45, 22, 5], 400)])
    service: Any = SimpleNamespace(engine=SimpleNamespace(stats=lambda: next(reports)))
    lines = StatusLines(service)
    lines.tell()
    lines.tell()
    first, second = [text for text in caplog.messages if text.startswith("SpecDecoding")]
    # vLLM: 1 + accepted / drafts; accepted at a position / drafts.
    assert "Mean acceptance length: 2.40" in first
    assert "Per-position acceptance rate: 0.800, 0.400, 0.200," in first
    assert "Mean acceptance length: 1.44" in second
    assert "Per-position acceptance rate: 0.200, 0.100, 0.040, 0.100," in second
    assert "Avg Draft acceptance rate: 14.7%" in second
