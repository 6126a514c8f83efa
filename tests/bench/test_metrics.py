"""Every figure of docs/metrics.md on numbers computed by hand, and percentiles against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from hunch.bench import analysis, environment, metrics
from hunch.bench.records import Answer, Report, Round, Run
from hunch.bench.report import findings, rows
from hunch.errors import ConfigError


def answer(name: str = "a", **changes: object) -> Answer:
    """20 tokens in 8 passes: first token after 0.1 s, the last after 0.48 s."""
    values: dict[str, object] = {
        "id": name, "category": "chat", "num_prompt_tokens": 10, "num_tokens": 20, "start": 0.0,
        "first_token": 0.1, "end_to_end": 0.48, "num_passes": 8, "drafted": 24, "accepted": 12,
    }  # fmt: skip
    return Answer(**{**values, **changes})  # type: ignore[arg-type]


def test_the_worked_example_of_the_docs() -> None:
    # 8 passes, 3 guesses each, 12 of the 24 accepted: 12 + 8 of the target's own = 20 tokens.
    assert metrics.acceptance_rate(12, 24) == 0.5
    assert metrics.tokens_per_pass(20, 8) == 2.5
    # 8 guesses at each position; right 6, 4 and 2 times.
    assert metrics.per_position([8, 8, 8], [6, 4, 2]) == [0.75, 0.5, 0.25]
    # A guess costs 0.05 of a pass: 2.5 / (0.05 * 3 + 1).
    assert metrics.memory_bound_speedup(2.5, 0.05 * 3) == pytest.approx(2.5 / 1.15)
    assert metrics.draft_overhead(0.06, 0.40) == pytest.approx(0.15)
    assert metrics.token_rate_ratio(50.0, 25.0) == 2.0
    assert metrics.energy_per_token(90.0, 20) == 4.5
    # 0.38 s for the 19 tokens after the first.
    assert answer().per_token == pytest.approx(0.02)


def test_expected_tokens_is_the_sum_of_the_chances() -> None:
    # 1 + 0.8 + 0.64 + 0.512
    assert metrics.expected_tokens(0.8, 3) == pytest.approx(2.952)
    assert metrics.expected_tokens(1.0, 5) == 6
    assert metrics.expected_tokens(0.0, 5) == 1


def test_nothing_drafted_gives_no_rate() -> None:
    assert metrics.acceptance_rate(0, 0) is None
    assert metrics.tokens_per_pass(0, 0) is None
    assert metrics.energy_per_token(None, 10) is None
    assert metrics.percentile([], 50) is None


@pytest.mark.parametrize("percent", [0, 50, 90, 95, 99, 100])
def test_percentiles_are_numpys(percent: int) -> None:
    values = [0.3, 5.0, 1.25, 2.0, 9.5, 0.01, 4.4]
    assert metrics.percentile(values, percent) == pytest.approx(np.percentile(values, percent))


def test_figures_of_a_run() -> None:
    counts = {
        "draft_seconds": 0.06, "target_seconds": 0.40, "time_saved_seconds": 0.3,
        "cpu_seconds": 0.9,
        "guessed_per_position": [8, 8, 8], "accepted_per_position": [6, 4, 2],
        "drafters": {"ngram": {"drafted": 24, "accepted": 12}, "draft": {"drafted": 0,
                                                                         "accepted": 0}},
    }  # fmt: skip
    slow = answer("slow", first_token=0.3, end_to_end=0.68, gaps=[0.1, 0.28])
    first = Round(0.5, [answer()], counts, joules=45.0)
    second = Round(1.0, [slow, answer("warm", is_warmup=True)], {}, joules=60.0)
    found = metrics.figures(Run("ngram", {}, [first, second]), {"first_token": 0.2})
    assert found["num_answers"] == 2  # the warm-up is no answer, but it took its time
    assert found["tokens_per_second"] == pytest.approx(40.0)  # 20 / 0.5 and 40 / 1.0
    assert found["requests_per_second"] == pytest.approx(2.0)
    assert found["first_token"]["p50"] == pytest.approx(0.2)
    assert found["tokens_per_pass"] == 2.5
    assert found["acceptance_rate"] == 0.5
    assert found["per_position"] == [0.75, 0.5, 0.25]
    assert found["memory_bound_speedup"] == pytest.approx(2.5 / 1.15)
    assert found["drafters"] == {"ngram": {"drafted": 24, "accepted": 12, "acceptance_rate": 0.5}}
    assert found["energy_per_token"] == pytest.approx(105.0 / 60)
    assert found["cpu_per_token"] == pytest.approx(0.015)  # 0.9 s for 60 tokens, warm-up and all
    assert found["end_to_end"]["p50"] == pytest.approx(0.58)  # 0.48 s and 0.68 s
    assert found["per_token"]["p50"] == pytest.approx(0.02)  # 0.38 s / 19, both
    assert found["gap"]["p50"] == pytest.approx(0.19)  # only one was seen as a stream
    assert found["draft_overhead"] == pytest.approx(0.15)
    assert found["goodput_share"] == 0.5
    assert found["goodput"] == pytest.approx(1.0)


def test_savings_of_moments_are_not_spoken_of() -> None:
    for seconds, is_told in ((0.4, True), (0.004, False)):
        turn = Round(seconds, [answer()], {"time_saved_seconds": seconds / 10})
        runs = [Run(method, {}, [turn] * 2) for method in ("off", "ngram")]
        told = findings(Report("bench", {}, {}, runs))
        assert any("by the clock" in line for line in told) == is_told


def test_time_saved_is_what_the_clock_says_beside_what_the_engine_counts() -> None:
    """Plain decoding took 0.8 s; the method took 0.4 s, and its engine counts 0.38 s."""
    plain = Run("off", {}, [Round(0.8, [answer()])])
    method = Run("ngram", {}, [Round(0.4, [answer()], {"time_saved_seconds": 0.38})])
    report = Report("bench", {}, {}, [plain, method])
    found = analysis.time_saved(report, method)
    assert found == {"plain": 0.8, "by_clock": pytest.approx(0.4), "by_engine": 0.38}
    assert analysis.time_saved(report, plain) is None
    assert [row["token_rate_ratio"] for row in rows(report)] == [1.0, 2.0]  # 50 over 25 tok/s
    for seconds, counted in ((0.4, 0.38), (1.9, 0.35)):  # in the last one the machine stood still
        plain.rounds.append(Round(0.8, [answer()]))
        method.rounds.append(Round(seconds, [answer()], {"time_saved_seconds": counted}))
    found = analysis.time_saved(report, method)
    expected = {"plain": 2.4, "by_clock": 1.2, "by_engine": 1.14}
    assert found == {name: pytest.approx(value) for name, value in expected.items()}


def test_a_server_that_tells_nothing_has_no_passes() -> None:
    found = metrics.figures(Run("server", {}, [Round(1.0, [answer(num_passes=None)])]))
    assert found["tokens_per_pass"] is None
    assert found["tokens_per_second"] == 20


def test_limits_are_read_in_milliseconds_by_vllms_names() -> None:
    assert metrics.read_limits("ttft:200 tpot:30,e2e:4000") == {
        "first_token": 0.2, "per_token": 0.03, "end_to_end": 4.0,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="ttft:200"):
        metrics.read_limits("speed:3")
    limits = metrics.read_limits("itl:30")
    assert limits == metrics.read_limits("gap:30")
    answer = Answer("a", "chat", 8, 3, 0.0, 0.1, 0.15, gaps=[0.02, 0.03])
    assert metrics.is_good(answer, limits)
    answer.gaps[0] = 0.04  # the mean would do
    assert not metrics.is_good(answer, limits)


def test_a_machine_that_was_not_ours_alone_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 100 seconds of all CPUs 40 were used, by others, and 5 taken by the machine's host."""
    seconds = iter([(0.0, 0.0, 0.0), (40.0, 5.0, 100.0)])
    monkeypatch.setattr(environment, "_all_seconds", lambda: next(seconds))
    monkeypatch.setattr(environment.BusyWatch, "_own_seconds", lambda self: 0.0)
    shares = environment.BusyWatch().shares()
    assert shares == {"busy_share": 0.4, "taken_share": 0.05}
    others, taken = environment.busy_words(shares)
    assert "40%" in others
    assert "5%" in taken
    assert environment.busy_words({"busy_share": 0.01, "taken_share": 0.0}) == []
    assert environment.busy_words({}) == []
