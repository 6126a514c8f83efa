"""The estimate of the time saved, against numbers worked out by hand and against plain runs."""

from __future__ import annotations

import pytest

from engine.fake_runner import FakeCodec, FakeRunner
from hunch.config import Config
from hunch.engine import plain_replay
from hunch.engine.engine import Engine
from hunch.engine.plain_replay import PlainReplay, Reading, Replay, RowCosts, Text, _num_waited_for
from hunch.engine.stats import EngineStats, Tally
from hunch.types import Capacity, RowResult, SamplingParams, StepResult

CAPACITY = Capacity(num_blocks=1, block_size=1, max_rows=8, max_len=9, max_nodes=4)


class Play:
    """Steps played to `EngineStats`: a plain step of n rows takes 10 + n seconds, drafting and
    checking 2 more, the engine's work around a step half a second."""

    def __init__(self) -> None:
        self.stats, self.now = EngineStats(), 0.0

    def read(self, *tallies: Tally) -> None:
        """A step that reads these prompts."""
        for tally in tallies:
            tally.start(self.now)
        self._step(dict.fromkeys(tallies, (1, 5)), 20.0, 0.0)

    def decode(self, tokens: dict[Tally, int], times: int = 1) -> None:
        for _ in range(times):
            self._step({tally: (count, 1) for tally, count in tokens.items()}, 10 + len(tokens), 2)

    def _step(self, rows: dict[Tally, tuple[int, int]], plain: float, extra: float) -> None:
        self.now += plain + extra + 0.5
        self.stats.busy_seconds += plain + extra + 0.5
        results = [
            RowResult(row=place, tokens=[7] * num_tokens, num_processed=num_processed)
            for place, (num_tokens, num_processed) in enumerate(rows.values())
        ]
        result = StepResult(
            id=0, rows=results, target_seconds=plain, draft_seconds=extra, plain_seconds=plain
        )
        share = self.stats.share(result)
        for tally, row in zip(rows, results, strict=True):
            self.stats.add(tally, row, share, self.now)

    def end(self, *tallies: Tally) -> None:
        for tally in tallies:
            self.stats.end(tally, "length")

    def saved(self, *running: Tally) -> float:
        seconds: float = self.stats.report(running, CAPACITY)["time_saved_seconds"]
        assert seconds == self.stats.report(running, CAPACITY)["time_saved_seconds"]
        return seconds


def test_texts_of_one_length_that_come_together_end_together() -> None:
    """12 tokens each after the first, in 3, 6 and 12 steps: plain decoding takes 12 of 3 rows."""
    play, (a, b, c) = Play(), (Tally(), Tally(), Tally())
    play.read(a, b, c)
    play.decode({a: 4, b: 2, c: 1}, 3)
    play.end(a)
    play.decode({b: 2, c: 1}, 3)
    play.end(b)
    play.decode({c: 1}, 6)
    play.end(c)
    passes, drafts = 3 * 13 + 3 * 12 + 6 * 11, 12 * 2
    assert play.saved() == pytest.approx(12 * 13 - passes - drafts)
    report = play.stats.report((), CAPACITY)
    assert report["speedup"] == pytest.approx(12 * 13 / (passes + drafts))
    assert report["cost_per_token"] == pytest.approx((passes + drafts) / (12 * 13))


def test_one_text_saves_the_steps_that_it_does_not_take() -> None:
    play, text = Play(), Tally()
    play.read(text)
    play.decode({text: 3}, 4)
    assert play.saved(text) == pytest.approx(8 * (11 + 0.5) - 4 * 2)
    play.end(text)
    assert play.saved() == pytest.approx(8 * (11 + 0.5) - 4 * 2)


def test_where_new_texts_follow_those_that_end_rows_stay_in_use() -> None:
    """Two at once, 4 tokens each after the first, in 2 steps; then two more in their rows."""
    play = Play()
    for _ in range(2):
        texts = Tally(play.now), Tally(play.now)
        play.read(*texts)
        play.decode(dict.fromkeys(texts, 2), 2)
        play.end(*texts)
    assert play.saved() == pytest.approx((8 - 4) * (12 + 0.5) - 4 * 2)


def test_a_text_that_goes_on_pays_its_part_only() -> None:
    play, (a, b) = Play(), (Tally(), Tally())
    play.read(a, b)
    play.decode({a: 4, b: 2}, 3)
    play.end(a)
    # Of 12 steps the last 6 are half b's, which has no tokens for them yet.
    assert play.saved(b) == pytest.approx((6 + 6 / 2 - 3) * (12 + 0.5) - 3 * 2)
    play.decode({b: 2}, 3)
    play.end(b)
    passes = 3 * 12 + 3 * 11
    assert play.saved() == pytest.approx(12 * 12 - passes - 6 * 2 + 6 * 0.5)


def test_drafts_that_are_never_accepted_cost_time() -> None:
    play, texts = Play(), [Tally(), Tally()]
    play.read(*texts)
    play.decode(dict.fromkeys(texts, 1), 5)
    play.end(*texts)
    assert play.saved() == pytest.approx(-5 * 2)


def test_texts_without_tokens_count_nothing() -> None:
    play, (a, b, never) = Play(), (Tally(), Tally(), Tally())
    play.read(a, b)
    play.end(never, b)
    play.decode({a: 2}, 2)
    play.end(a)
    assert play.saved(Tally()) == pytest.approx(2 * (11 + 0.5) - 2 * 2)


def _text(
    arrived: float, num_tokens: int, *, last: float = 0.0, reading: Reading | None = None
) -> Text:
    reading = Reading(20.0, 1.0, 0.0, 1) if reading is None else reading
    return Text(arrived, arrived, last, reading, num_tokens, num_tokens, True)


@pytest.mark.parametrize(
    ("arrived", "seconds", "num_steps"),
    [
        # 1 + 2 steps, one that reads and gives the first text a token, 3 with both, 4 alone
        (44.0, 9 + 2 * 11 + 11 + 3 * 12 + 4 * 11, 11),
        (1000.0, 9 + 10 * 11 + 9 + 3 * 11, 15),  # nothing to do before it comes
    ],
)
def test_texts_start_when_they_arrive(arrived: float, seconds: float, num_steps: int) -> None:
    replay = Replay([9.0, 11.0, 12.0], 0.0, 0.0)
    replay.start(_text(0.0, 10), 10, 0)
    replay.start(_text(arrived, 3), 3, 0)
    replay.finish()
    assert (replay.seconds, replay.num_steps) == (seconds, num_steps)


def test_texts_beyond_the_rows_wait_for_one() -> None:
    replay = Replay([9.0, 11.0, 12.0], 0.0, 0.0)
    for _ in range(3):
        replay.start(_text(0.0, 4), 4, 0)
    replay.finish()
    assert replay.seconds == 9 + 4 * 12 + 9 + 4 * 11


def test_who_comes_when_others_end_waits_for_as_many() -> None:
    texts = [_text(0.0, 5, last=10.0), _text(0.0, 5, last=10.0), _text(0.0, 5, last=30.0)]
    texts += [_text(10.5, 5, last=50.0), _text(10.5, 5, last=60.0), _text(20.0, 5, last=70.0)]
    assert _num_waited_for(texts, 2.0) == [0, 0, 0, 1, 2, 0]


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = RowCosts()
    assert costs.curve(2, by_token=True) == [0, 0, 0]
    costs.record(4, 8.0, 1.0)
    assert costs.curve(6, by_token=True) == [8.0] * 7  # nothing else is known
    costs.record(2, 6.0, 1.0)
    costs.record(2, 9.0, 2.0)
    assert costs.curve(6, by_token=False) == [7.0, 7.25, 7.5, 7.75, 8.0, 8.25, 8.5]
    assert costs.curve(3, by_token=True)[2] == 8.0  # (6 + 2 * 9) / 3
    costs.make_old()
    assert costs.curve(2, by_token=True)[2] == pytest.approx(8.0)
    costs.record(2, 5.0, 1.0)
    assert costs.curve(2, by_token=True)[2] == pytest.approx(5.0, rel=0.01)


class TimedRunner(FakeRunner):
    """Passes take 5 ms and so much per token, a level drafted 0.1 ms, launching a step 0.6 ms."""

    now, per_token = 0.0, 4e-4

    def submit(self, plan):
        super().submit(plan)
        result = self._results[-1][0]
        num_known = sum(row.num_processed for row in result.rows)
        num_packed = num_known + sum(row.num_checked for row in result.rows)
        result.target_seconds = 5e-3 + self.per_token * num_packed
        result.plain_seconds = 5e-3 + self.per_token * num_known
        result.draft_seconds = 1e-4 * max(row.num_waiting for row in result.rows)
        self.now += 6e-4 + result.target_seconds + result.draft_seconds


LENGTHS = (40, 60, 50, 70)
LOADS = {  # rows, requests, requests at once, lengths
    "one by one": (1, 6, 6, (40,)),
    "together": (8, 8, 8, (40,)),
    "together, of other lengths": (8, 8, 8, LENGTHS),
    "together, more than rows": (4, 24, 24, (40,)),
    "always four": (8, 40, 4, LENGTHS),
}


def play_load(load: str, max_nodes: int, per_token: float) -> tuple[float, float]:
    """The seconds that a load took, and those that the engine says it saved."""
    max_rows, num_requests, at_once, lengths = LOADS[load]
    runner = TimedRunner(max_nodes=max_nodes, max_rows=max_rows, num_blocks=1024)
    runner.per_token = per_token
    engine = Engine(Config(), runner, FakeCodec(), clock=lambda: runner.now)
    todo, num_open = list(range(num_requests)), 0
    while todo or num_open:
        while todo and num_open < at_once:
            number, num_open = todo.pop(0), num_open + 1
            length = lengths[number % len(lengths)]
            params = SamplingParams(max_tokens=length, ignore_eos=True, seed=number)
            engine.add(str(number), [number // 20 + 1, number % 20 + 1] * 4, params)
        num_open -= sum(output.finished for output in engine.step())
    return runner.now, engine.stats()["time_saved_seconds"]


@pytest.mark.parametrize("per_token", [4e-4, 3e-3])  # the second: drafts hardly pay, or do not
@pytest.mark.parametrize("load", LOADS)
def test_the_time_saved_is_what_the_same_requests_take_less(load: str, per_token: float) -> None:
    plain, said_of_plain = play_load(load, 0, per_token)
    seconds, said = play_load(load, 4, per_token)
    assert said_of_plain == pytest.approx(0.0, abs=1e-9)
    assert said == pytest.approx(plain - seconds, abs=1e-3 * plain)


def test_a_long_time_is_replayed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = play_load("always four", 0, 4e-4)
    seconds, whole = play_load("always four", 4, 4e-4)
    periods = []
    begin = PlainReplay.begin
    monkeypatch.setattr(plain_replay, "MAX_TEXTS", 10)
    monkeypatch.setattr(
        PlainReplay, "begin", lambda self, *args: periods.append(1) or begin(self, *args)
    )
    _, in_parts = play_load("always four", 4, 4e-4)
    assert len(periods) == 4
    assert whole == pytest.approx(plain - seconds, rel=0.01)
    assert in_parts == pytest.approx(plain - seconds, rel=0.05)


@pytest.mark.parametrize(("pause", "is_told"), [(0.1, True), (0.001, False), (100.0, False)])
def test_after_all_answers_a_replay_begins_again(pause: float, is_told: bool) -> None:
    """Two calls one after the other: the second would have come later to plain decoding."""
    said, seconds = [], []
    for max_nodes in (0, 4):
        runner = TimedRunner(max_nodes=max_nodes, max_rows=4)
        engine = Engine(Config(), runner, FakeCodec(), clock=lambda runner=runner: runner.now)
        for call in range(2):
            for number in range(4):
                params = SamplingParams(max_tokens=40, ignore_eos=True, seed=number)
                engine.add(f"{call}-{number}", [call + 1, number + 1] * 4, params)
            while engine.has_work():
                engine.step()
            if is_told:
                engine.end_period()
            runner.now += pause
        said.append(engine.stats()["time_saved_seconds"])
        seconds.append(engine.stats()["busy_seconds"])
    assert said == [0.0, pytest.approx(seconds[0] - seconds[1], rel=0.01)]
