"""Whether `auto` is within 2% of the fastest method: decided on rounds whose truth is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hunch.bench.envelope import MIN_ROUNDS, NO, OPEN, YES, envelope
from hunch.bench.intervals import mean_ratio
from hunch.bench.loads import Job, Load
from hunch.bench.measure import Cell, make_jobs, measure
from hunch.bench.records import Answer, Report, Round
from hunch.bench.report import as_markdown, findings
from hunch.bench.workloads import Prompt

JOBS = make_jobs([Prompt(f"p{n}", "all", text="x") for n in range(4)], None, {"max_tokens": 8})


class Sleeper:
    """A method whose requests take known seconds, but for what a round does to all of them."""

    def __init__(self, name: str, seconds: dict[float, float], noise: float, seed: int) -> None:
        self.name, self.seconds, self.noise = name, seconds, noise
        self.chooser = random.Random(f"{seed} {name}")
        self.num_turns: Counter[float] = Counter()

    def warm(self, jobs: Sequence[Job], load: Load) -> None: ...

    def drive(
        self, jobs: Sequence[Job], load: Load, on_answer: Callable[[str, Any], None] | None = None
    ) -> Round:
        assert load.rate is not None
        self.num_turns[load.rate] += 1
        shared = random.Random(self.num_turns[load.rate]).gauss(0, 0.2)  # a busy machine hits all
        factor = 1 + shared / 10 + self.noise * self.chooser.gauss(0, 1)
        seconds = self.seconds[load.rate] * factor
        answers = [
            Answer(job.id, "all", 4, 8, 0.0, seconds / 4, seconds * (1 + n / 8), digest=job.id)
            for n, job in enumerate(jobs)
        ]
        return Round(sum(a.end_to_end for a in answers), answers)

    def close(self) -> None: ...


def measured(
    times: dict[str, dict[float, float]], noise: float, rounds: int, seed: int = 0,
    until_decided: bool = True,
) -> tuple[Report, dict[str, Sleeper]]:  # fmt: skip
    report = Report("sweep", {"urls": []}, {})
    subjects = {name: Sleeper(name, some, noise, seed) for name, some in times.items()}
    cells = [Cell({"rate": rate}, Load(rate=rate), JOBS) for rate in times["auto"]]
    measure(list(subjects.values()), cells, rounds, report, until_decided=until_decided)
    return report, subjects


def test_rounds_go_where_something_is_left_to_decide() -> None:
    times = {
        "off": {1.0: 2.0, 8.0: 1.0},  # auto is far ahead at 1, and as fast at 8
        "fixed 3": {1.0: 1.5, 8.0: 1.5},
        "auto": {1.0: 1.0, 8.0: 1.0},
    }
    report, subjects = measured(times, noise=0.03, rounds=80, seed=1)
    assert [one.verdict for one in envelope(report)] == [YES, YES]
    assert all(method.num_turns[1.0] == MIN_ROUNDS for method in subjects.values())
    assert subjects["fixed 3"].num_turns[8.0] == MIN_ROUNDS
    assert MIN_ROUNDS < subjects["off"].num_turns[8.0] == subjects["auto"].num_turns[8.0] < 80
    again = dict(subjects["auto"].num_turns)
    cells = [Cell({"rate": rate}, Load(rate=rate), JOBS) for rate in times["auto"]]
    measure(list(subjects.values()), cells, 80, report, until_decided=True)
    assert subjects["auto"].num_turns == again  # what is decided stays so


def test_what_is_said_of_every_rate() -> None:
    times = {"off": {1.0: 2.0, 8.0: 0.9, 9.0: 1.0}, "auto": {1.0: 1.0, 8.0: 1.0, 9.0: 1.0}}
    report, _ = measured(times, noise=0.01, rounds=5)
    report.find("auto", {"rate": 9.0}).rounds[2].answers[0].end_to_end *= 1.4  # type: ignore
    said = findings(report)
    one = next(line for line in said if line.startswith("auto (rate 1.0)"))
    assert one.endswith("of the speed of off over 4 rounds; within 2%: yes")
    assert any("rate 8.0" in line and line.endswith("within 2%: no") for line in said)
    assert any("rate 9.0" in line and "not decided (give more --repeats)" in line for line in said)
    assert "auto is SLOWER than plain decoding at rate 8.0" in said


def test_auto_with_other_options_is_one_of_the_others() -> None:
    times = {"off": {1.0: 2.0}, "auto:phrases=off": {1.0: 0.8}, "auto": {1.0: 1.0}}
    report, _ = measured(times, noise=0.01, rounds=5)
    (line,) = [one for one in findings(report) if one.startswith("auto: ")]
    assert "of the speed of auto:phrases=off" in line
    assert line.endswith("within 2%: no")


def test_one_round_decides_nothing_and_that_is_said_once() -> None:
    times = {"off": {1.0: 2.0, 8.0: 0.9}, "auto": {1.0: 1.0, 8.0: 1.0}}
    report, _ = measured(times, noise=0.01, rounds=1)
    lines = [line for line in findings(report) if "auto (" in line or "round" in line]
    assert [line.partition(":")[0] for line in lines[:-1]] == ["auto (rate 1.0)", "auto (rate 8.0)"]
    assert all(line.endswith("in one round") for line in lines[:-1])
    assert lines[-1].startswith("one round does not show how rounds differ, so it decides nothing")
    assert "not decided" not in as_markdown(report)


@pytest.mark.parametrize(
    ("truth", "right", "num_wrong"), [(1.0, YES, 1), (0.955, NO, 1), (1.06, YES, 0), (0.90, NO, 0)]
)
def test_few_sweeps_are_wrong_though_they_stop_when_decided(
    truth: float, right: str, num_wrong: int
) -> None:
    """Three rivals as fast as each other: picking the fastest of noisy ones would fail auto."""
    rivals = {name: {8.0: truth} for name in ("off", "fixed 3", "fixed 7")}
    said: Counter[str] = Counter()
    for seed in range(24):
        report, _ = measured({**rivals, "auto": {8.0: 1.0}}, 0.02, 24, seed)
        said[envelope(report)[0].verdict] += 1
    assert said[right] > 16
    assert 24 - said[right] - said[OPEN] <= num_wrong


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    chooser = random.Random(0)
    for count in (3, 5, 12, 20):
        inside = 0
        for _ in range(200):
            pairs = [(0.97 * (1 + chooser.gauss(0, 0.03)), 1.0) for _ in range(count)]
            found = mean_ratio(pairs, num_draws=300)
            assert found is not None
            inside += found.low <= 0.97 <= found.high
        assert 0.91 <= inside / 200 <= 0.98


def test_the_example_of_the_page_of_metrics() -> None:
    assert str(mean_ratio([(1.02, 1), (1.00, 1), (1.01, 1)])) == "1.010 [0.983, 1.037]"
    few = mean_ratio([(1.04, 1), (0.98, 1), (1.01, 1)])
    assert few is not None
    assert few.low < 0.98 < few.high


def test_one_round_decides_nothing() -> None:
    report, _ = measured({"off": {1.0: 9.0}, "auto": {1.0: 1.0}}, 0.0, 1, until_decided=False)
    assert envelope(report)[0].verdict == OPEN
    assert any("9.000 of the speed of off in one round" in line for line in findings(report))
    assert mean_ratio([]) is None
