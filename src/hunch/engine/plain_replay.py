"""Estimates what plain decoding of the same texts would have taken.

A replay runs texts again in a model of the engine. They start in the order in which they really
started, not before they arrived, and not more at once than really ran at once. A step gives each of
them one token, and takes as long as a plain step with that many rows was found to take. So texts of
one length that come together end together, as in plain decoding, and as long as new ones come, rows
that become free are taken again.

A second replay gives each text as many steps as it really took. What the model leaves out is then
left out of both, and their difference is what fewer steps saved.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from operator import sub
from typing import NamedTuple, Protocol

MAX_TEXTS = 128  # ended texts that one replay holds
_OLD = 1e-3  # steps that all earlier replays' steps with a number of rows count as
_NEAR = 2  # a text that arrives so many steps after another has ended has waited for that
_NO_STEPS = (0.0, 0.0, 0.0, 0.0)


class Reading(NamedTuple):
    """The steps that read a sequence's prompt. Where others read in the same step, it has a part of
    it."""

    seconds: float = 0.0  # had nothing been drafted
    num_steps: float = 0.0  # parts of steps
    num_rows: float = 0.0  # parts of the rows that decoded in them
    num_chunks: int = 0  # whole steps

    def plus(self, seconds: float, part: float, num_rows: int) -> Reading:
        """After one more step."""
        return Reading(
            self.seconds + seconds,
            self.num_steps + part,
            self.num_rows + part * num_rows,
            self.num_chunks + 1,
        )


NOT_READ = Reading()


class Counts(Protocol):
    """What a sequence has got until now; see `stats.Tally`."""

    arrived: float
    started: float | None
    last_token: float
    tokens: int
    steps: int
    reading: Reading


class Text(NamedTuple):
    """What a replay knows of a sequence: its counts since the period began."""

    started: float  # when it was given a row
    arrived: float
    last_token: float  # when it came
    reading: Reading
    num_tokens: int  # without the first, if a step that read the prompt gave it
    num_passes: int  # for these
    is_over: bool


class Saved(NamedTuple):
    """Seconds that drafts saved; below 0: what they cost."""

    in_steps: float = 0.0
    around_steps: float = 0.0  # the engine's work around steps that were not needed


class Estimate(NamedTuple):
    """What a replay found."""

    saved: Saved
    plain_end: float  # when plain decoding would have ended


class RowCosts:
    """Mean seconds of plain steps, by their number of rows."""

    def __init__(self) -> None:
        # Steps, their seconds, their tokens, and seconds times tokens.
        self._sums: dict[int, tuple[float, float, float, float]] = {}

    def record(self, num_rows: int, seconds: float, num_tokens: float) -> None:
        """A step with this many rows would have taken so long; it gave each row these tokens."""
        steps, all_seconds, tokens, product = self._sums.get(num_rows, _NO_STEPS)
        self._sums[num_rows] = (
            steps + 1,
            all_seconds + seconds,
            tokens + num_tokens,
            product + seconds * num_tokens,
        )

    def make_old(self) -> None:
        """Keep the means, until new ones replace them."""
        for num_rows, (steps, seconds, tokens, product) in self._sums.items():
            by_step, by_token = _OLD / steps, _OLD / (tokens or 1.0)
            self._sums[num_rows] = _OLD, seconds * by_step, tokens * by_token, product * by_token

    def curve(self, max_rows: int, *, by_token: bool) -> list[float]:
        """Seconds of a step by number of rows, from 0 rows (what a step takes anyway) to
        `max_rows`.

        by_token: a step counts as often as it gave tokens, as plain decoding takes one for each.
        Between known numbers of rows the curve is straight. Beyond them it goes on as straight, but
        more rows never take less time, nor more than in proportion.
        """
        known = []
        for num_rows, (steps, seconds, tokens, product) in sorted(self._sums.copy().items()):
            if by_token and tokens:
                known.append((num_rows, product / tokens))
            elif not by_token:
                known.append((num_rows, seconds / steps))
        if not known:
            return [0.0] * (max_rows + 1)
        found, place, last = list[float](), 1, len(known) - 1
        for num_rows in range(max_rows + 1):
            while place < last and known[place][0] < num_rows:
                place += 1
            (x1, y1) = known[min(place, last)]
            (x0, y0) = known[max(place - 1, 0)]
            value = y0 if x0 == x1 else y0 + (y1 - y0) * (num_rows - x0) / (x1 - x0)
            if num_rows < x0:
                value = min(max(value, y0 * num_rows / x0), y0)
            elif num_rows > x1:
                value = min(max(value, y1), y1 * num_rows / x1)
            found.append(value)
        return found


class PlainReplay:
    """Counts what drafts saved, from one period to the next.

    A period lasts until a request comes when plain decoding would have nothing to do either, or
    that has waited for all before. A period of many texts is cut. Any thread may ask for what was
    saved.
    """

    def __init__(self) -> None:
        self.costs = RowCosts()
        self._period = Period(Saved(), -inf, 0.0, {})
        # The last answer without running texts, and where it was given: replays take time.
        self._last: tuple[tuple[Period, int, int], Estimate] | None = None

    def add_step(
        self, num_rows: int, num_tokens: int, inside: float, plain: float, *, is_reading: bool
    ) -> None:
        """A step of this many rows gave them these tokens.

        inside: seconds that it took; plain: seconds had nothing been drafted.
        is_reading: it read prompts too.
        """
        period = self._period
        period.num_steps += 1
        period.inside += inside
        period.extra += inside - plain
        if num_rows > period.max_rows:
            period.max_rows = num_rows
        if not is_reading:
            self.costs.record(num_rows, plain, num_tokens / num_rows)

    def end(self, tally: Counts) -> None:
        """A sequence is over."""
        if tally.started is not None:
            self._period.texts.append(self._period.text(tally, is_over=True))

    def come(self, now: float, busy_seconds: float) -> None:
        """A request comes while nothing runs."""
        if not (texts := self._period.texts):
            return
        is_next = now - texts[-1].last_token <= self._period.near(busy_seconds)
        if is_next or now >= self._estimate([], busy_seconds).plain_end:
            max_rows = 0 if is_next else self._period.max_rows
            self.begin(now, [], busy_seconds)
            self._period.max_rows = max_rows  # as many may come at once again

    @property
    def is_long(self) -> bool:
        return len(self._period.texts) >= MAX_TEXTS

    def begin(self, now: float, running: Iterable[Counts], busy_seconds: float) -> None:
        """Begin another period, in which these go on with what they have not done yet."""
        running = [tally for tally in running if tally.started is not None]
        if not running and not self._period.texts:
            return
        saved = self.saved(running, busy_seconds)
        before = {tally: _text(tally, is_over=False) for tally in running}
        self._period = Period(saved, now if running else -inf, busy_seconds, before)
        self.costs.make_old()

    def saved(self, running: Iterable[Counts], busy_seconds: float) -> Saved:
        """What all texts have saved; `running`: those that are not over."""
        return self._estimate(running, busy_seconds).saved

    def _estimate(self, running: Iterable[Counts], busy_seconds: float) -> Estimate:
        period = self._period  # another thread may begin the next one
        texts = period.texts.copy()
        num_over, place = len(texts), (period, len(texts), period.num_steps)
        texts += [period.text(t, is_over=False) for t in running if t.started is not None]
        if all(text.num_tokens == text.num_passes for text in texts):
            saved = Saved(period.saved.in_steps - period.extra, period.saved.around_steps)
            return Estimate(saved, max((text.last_token for text in texts), default=-inf))
        last = self._last
        if last is not None and last[0] == place and len(texts) == num_over:
            return last[1]
        estimate = self._replay(period, texts, busy_seconds)
        if len(texts) == num_over:
            self._last = place, estimate
        return estimate

    def _replay(self, period: Period, texts: list[Text], busy_seconds: float) -> Estimate:
        texts.sort()
        num_steps, max_rows = max(period.num_steps, 1), max(period.max_rows, 1)
        around = max(0.0, busy_seconds - period.busy_before - period.inside) / num_steps
        num_before = _num_waited_for(texts, period.near(busy_seconds))
        began = max(period.began, texts[0].arrived)
        seconds, steps, ends = list[float](), list[float](), list[float]()
        for is_plain in (True, False):
            curve = self.costs.curve(max_rows, by_token=is_plain)
            # Texts arrive by the clock, which in the real steps ran on while they drafted.
            replay = Replay(curve, began, around if is_plain else around + period.extra / num_steps)
            for text, num_over in zip(texts, num_before, strict=True):
                replay.start(text, text.num_tokens if is_plain else text.num_passes, num_over)
            replay.finish()
            seconds.append(replay.seconds)
            steps.append(replay.num_steps)
            ends.append(replay.clock)
        in_steps = seconds[0] - seconds[1] - period.extra
        around_steps = around * (steps[0] - steps[1])
        before = period.saved
        saved = Saved(before.in_steps + in_steps, before.around_steps + around_steps)
        return Estimate(saved, ends[0])


class Period:
    """The time that one replay covers."""

    __slots__ = (
        "before", "began", "busy_before", "extra", "inside", "max_rows", "num_steps", "saved",
        "texts",
    )  # fmt: skip

    def __init__(
        self, saved: Saved, began: float, busy_before: float, before: dict[Counts, Text]
    ) -> None:
        self.saved = saved  # before it
        self.began = began  # -inf: with its first text
        self.busy_before = busy_before
        self.before = before  # what texts had that ran already
        self.texts: list[Text] = []  # that are over
        self.num_steps = self.max_rows = 0
        self.inside = self.extra = 0.0

    def near(self, busy_seconds: float) -> float:
        """Seconds between two moments that are near each other."""
        return _NEAR * (busy_seconds - self.busy_before) / max(self.num_steps, 1)

    def text(self, tally: Counts, *, is_over: bool) -> Text:
        text = _text(tally, is_over=is_over)
        if (old := self.before.get(tally)) is None:
            return text
        return text._replace(
            reading=Reading(*map(sub, text.reading, old.reading)),
            num_tokens=text.num_tokens - old.num_tokens,
            num_passes=text.num_passes - old.num_passes,
        )


def _text(tally: Counts, *, is_over: bool) -> Text:
    assert tally.started is not None
    # A prompt whose last token alone was not cached is decoded as other tokens are.
    num_first = min(tally.reading.num_chunks, 1)
    return Text(
        tally.started,
        tally.arrived,
        tally.last_token,
        tally.reading,
        max(tally.tokens - num_first, 0),
        max(tally.steps - num_first, 0),
        is_over,
    )


def _num_waited_for(texts: Sequence[Text], near: float) -> list[int]:
    """For each text that came because others were over: how many were. Others: 0.

    Who sends a request for each answer sends it later if the answer comes later. Each end is waited
    for by one text, unless more came.
    """
    ends = sorted(text.last_token for text in texts if text.is_over)
    found, following = [], len(ends) + 1
    for text in reversed(texts):
        num_over, num_old = bisect_right(ends, text.arrived), bisect_left(ends, text.arrived - near)
        if num_over > num_old:
            num_over = following = max(num_old + 1, min(num_over, following - 1))
        else:
            num_over = 0
        found.append(num_over)
    return found[::-1]


class Replay:
    """Runs texts in order, from one start or end to the next."""

    def __init__(self, costs: list[float], began: float, idle: float) -> None:
        self.seconds = 0.0  # of steps, without what a step takes longer for prompts' tokens
        self.num_steps = 0.0
        self._costs, self._max_rows = costs, len(costs) - 1
        self.clock, self._idle = began, idle  # `idle`: seconds between two steps
        self._given = 0  # tokens that a row that was there from the beginning has been given
        self._ends: list[tuple[int, bool]] = []  # of the rows: `_given` then, and `is_over`
        self._num_over = 0
        # Texts that are not over, of unknown length. They keep their rows, and their part of the
        # steps is not counted. If others need the rows, they leave them.
        self._num_open = 0
        self._readers: list[tuple[Text, int]] = []  # start with the next step; with their steps

    def start(self, text: Text, num_steps: int, num_over: int) -> None:
        """A text starts, after so many are over, or when it arrives."""
        arrived = -inf if num_over else text.arrived
        while self._ends or self._readers:
            is_free = len(self._ends) + len(self._readers) < self._max_rows
            if is_free and self.clock >= arrived and self._num_over >= num_over:
                break
            if self._readers:
                self._read()
            else:
                self._run(arrived if is_free and self._num_over >= num_over else inf)
        self.clock = max(self.clock, arrived)
        self._readers.append((text, num_steps))

    def finish(self) -> None:
        if self._readers:
            self._read()
        while self._ends:
            self._run(inf)

    def _read(self) -> None:
        """Run the steps that read prompts; other rows get tokens in them."""
        num_live = len(self._ends)
        cost = self._costs[num_live]
        num_chunks = max(text.reading.num_chunks for text, _ in self._readers)
        self.seconds += num_chunks * cost
        self.num_steps += num_chunks
        self.clock += num_chunks * (cost + self._idle)
        self._given += num_chunks
        self._leave()
        for text, num_steps in self._readers:
            self.clock += self._longer(text.reading)
            heappush(self._ends, (self._given + num_steps, text.is_over))
        self._readers.clear()
        self._leave()

    def _longer(self, reading: Reading) -> float:
        """Seconds that steps took longer because of a prompt's tokens in them."""
        if not reading.num_steps:
            return 0.0
        num_rows = min(round(reading.num_rows / reading.num_steps), self._max_rows)
        return max(0.0, reading.seconds - reading.num_steps * self._costs[num_rows])

    def _run(self, until: float) -> None:
        """Run until the next text ends, but not longer than `until`, to the nearest step."""
        num_live = len(self._ends)
        num_rows = min(num_live + self._num_open, self._max_rows)
        cost, num_steps = self._costs[num_rows], self._ends[0][0] - self._given
        step = cost + self._idle
        if self.clock + num_steps * step > until:
            num_steps = min(num_steps, round((until - self.clock) / step))
            self.clock = max(until, self.clock + num_steps * step)
        else:
            self.clock += num_steps * step
        part = num_steps * num_live / num_rows
        self.seconds += part * cost
        self.num_steps += part
        self._given += num_steps
        self._leave()

    def _leave(self) -> None:
        """The rows of texts that have all their tokens become free."""
        while self._ends and self._ends[0][0] <= self._given:
            is_over = heappop(self._ends)[1]
            self._num_over += is_over
            self._num_open += not is_over
