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


@pytest.fixture
def seen_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The server's log is seen by `caplog`."""
    caplog.set_level(logging.INFO, "hunch")
    monkeypatch.setattr(logging.getLogger("hunch"), "propagate", True)


def tell(reports: list[dict[str, Any]]) -> None:
    """The lines that a server writes between whose looks the engine reported these."""
    waiting = iter(reports)
    service: Any = SimpleNamespace(engine=SimpleNamespace(stats=lambda: next(waiting)))
    lines = StatusLines(service)
    for _ in reports:
        lines.tell()


@pytest.mark.usefixtures("seen_log")
def test_length_and_positions_are_of_the_drafts_since_the_last_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell([totals(100, 300, [80, 40, 20], 240), totals(150, 450, [90, 45, 22, 5], 400)])
    first, second = [text for text in caplog.messages if text.startswith("SpecDecoding")]
    # vLLM: 1 + accepted / drafts; accepted at a position / drafts.
    assert "Mean acceptance length: 2.40" in first
    assert "Per-position acceptance rate: 0.800, 0.400, 0.200," in first
    assert "Mean acceptance length: 1.44" in second
    assert "Per-position acceptance rate: 0.200, 0.100, 0.040, 0.100," in second
    assert "Avg Draft acceptance rate: 14.7%" in second


@pytest.mark.usefixtures("seen_log")
def test_an_engine_that_was_started_again_counts_from_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tell([totals(100, 300, [80, 40, 20], 240), totals(10, 30, [5, 4, 1], 20)])
    assert not any(": -" in text for text in caplog.messages)
    assert "Accepted: 10 tokens, Drafted: 30 tokens" in caplog.messages[-1]
    caplog.clear()
    of_two = {"num_replicas": 2, "num_running": 0}  # the other one's totals are in the sum, too
    tell([totals(100, 300, [80, 40, 20], 240) | of_two, totals(60, 130, [5, 4, 1], 20) | of_two])
    assert not any(": -" in text for text in caplog.messages)
    assert "Avg generation throughput: 0.0 tokens/s" in caplog.messages[-1]
