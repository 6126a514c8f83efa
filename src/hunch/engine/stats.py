"""Counts per sequence and in total, under the names that all hunch tools use."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from hunch.advice import AcceptanceWatch
from hunch.engine.plain_replay import NOT_READ, PlainReplay
from hunch.types import Capacity, RequestMetrics, RowResult, StepResult

NUM_RECENT = 1024  # values a histogram keeps for percentiles
SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.8,
    1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip


class Share(NamedTuple):
    """What one token, or one row, cost in a step."""

    target: float  # seconds per token processed or drafted
    draft: float  # seconds per row that may draft
    plain: float  # seconds per known token, had nothing been drafted
    read: float = 0.0  # `plain`, but of prompts' tokens, for which all of it is counted
    read_part: float = 0.0  # of the step, for a row that reads its prompt
    read_rows: int = 0  # that decode in this step


NO_SHARE = Share(0.0, 0.0, 0.0)
Check = tuple[str, int, int, int]  # how a draft fared: method, nodes, levels, nodes accepted


class Tally:
    """What one sequence, or many together, cost and gained."""

    __slots__ = (
        "arrived", "checks", "decode_draft", "decode_plain", "decode_target", "drafter_bytes",
        "drafter_share", "first_token", "gaps", "last_token", "reading", "reading_draft",
        "reading_target", "started", "steps", "tokens",
    )  # fmt: skip

    def __init__(
        self, arrived: float = 0.0, drafter_bytes: int = 0, drafter_share: float = 0.0
    ) -> None:
        self.tokens = 0
        self.steps = 0  # target passes that committed tokens
        self.checks: dict[Check, int] = {}  # how many drafts fared like this
        # Its share of passes that processed nothing but the last token and a draft, and what plain
        # passes would have cost for the same tokens:
        self.decode_target = 0.0
        self.decode_draft = 0.0
        self.decode_plain = 0.0
        self.reading_target = 0.0  # its share of all other passes
        self.reading_draft = 0.0
        self.reading = NOT_READ  # for replays
        self.drafter_bytes = drafter_bytes
        self.drafter_share = drafter_share  # its weights, in bytes per byte of the target's
        self.arrived = arrived
        self.started: float | None = None  # first given a row
        self.first_token: float | None = None
        self.last_token = 0.0
        self.gaps: list[float] = []  # seconds per token after the first

    def start(self, now: float) -> None:
        """The sequence was given a row; a second time after a preemption."""
        if self.started is None:
            self.started = now

    def add(self, row: RowResult, share: Share, now: float) -> None:
        """A step's result for this sequence, with its share of the step's seconds."""
        target = share.target * (row.num_processed + row.num_checked)
        if _is_reading(row):
            seconds = share.read * row.num_processed
            self.reading = self.reading.plus(seconds, share.read_part, share.read_rows)
        if not row.tokens:
            self.reading_target += target
            return
        if row.num_processed != 1:
            self.reading_target += target
            self.reading_draft += share.draft
            share = NO_SHARE
        levels = row.num_checked if row.num_levels is None else row.num_levels
        check = row.method, row.num_checked, levels, row.num_accepted
        self.add_tokens(len(row.tokens), check, share, now)

    def add_tokens(self, num_tokens: int, check: Check, share: Share, now: float) -> float:
        """`add` for a row that decodes and goes on; returns the gap before each of its tokens."""
        self.steps += 1
        self.tokens += num_tokens
        if num_checked := check[1]:
            self.checks[check] = self.checks.get(check, 0) + 1
        target, draft, plain, _, _, _ = share
        self.decode_target += target * (1 + num_checked)
        self.decode_draft += draft
        self.decode_plain += plain * num_tokens
        gap = (now - self.last_token) / num_tokens
        if self.first_token is None:
            self.first_token = now
        else:
            self.gaps += (gap,) * num_tokens
        self.last_token = now
        return gap

    def merge(self, other: Tally) -> None:
        """Add another's counts, without its times of arrival and the like."""
        for name in (
            "tokens", "steps", "reading_target", "reading_draft", "decode_target", "decode_draft",
            "decode_plain",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        # A copy, as the engine's thread may still change the other.
        for check, times in other.checks.copy().items():
            self.checks[check] = self.checks.get(check, 0) + times

    def stats(self, seconds: float | None = None) -> dict[str, Any]:
        """The keys of every report. Speeds that were not measured are None."""
        started = self.arrived if self.started is None else self.started
        if seconds is None:
            seconds = self.last_token - started
        per_pass = _ratio(self.tokens, self.steps)
        overhead = _ratio(self.decode_draft, self.decode_target)
        spent = self.decode_target + self.decode_draft
        drafters = self._drafters()
        drafted = sum([nodes for nodes, _ in drafters.values()])
        accepted = sum([nodes for _, nodes in drafters.values()])
        guessed_at, accepted_at = self.guessed_at, self.accepted_at
        num_levels = sum(guessed_at)
        per_level = _ratio(num_levels, self.steps)  # levels guessed per pass
        return {
            "tokens_per_second": _ratio(self.tokens, seconds),
            "steps": self.steps,
            "drafted": drafted,
            "accepted": accepted,
            "acceptance_rate": _ratio(accepted, drafted),
            "tokens_per_pass": per_pass,
            # Of the drafts that had a guess at each depth, the share whose guess was accepted.
            "per_position": [
                part / whole for part, whole in zip_longest(accepted_at, guessed_at, fillvalue=0)
            ],
            "draft_seconds": self.reading_draft + self.decode_draft,
            "target_seconds": self.reading_target + self.decode_target,
            "draft_overhead": overhead,
            "memory_bound_speedup": per_pass / (1 + overhead),
            "speedup": _ratio(self.decode_plain, spent) or None,
            "cost_per_token": _ratio(spent, self.decode_plain) or None,
            "drafter_bytes": self.drafter_bytes,
            "latency_ms": percentiles_ms(self.gaps),
            # Of the levels of a draft: a tree has several nodes on each, and one can be accepted.
            "level_acceptance": _ratio(accepted, num_levels),
            "max_tokens_per_pass": 1 + per_level,  # had every guess been right
            # memory_bound_speedup with the drafter's cost taken from its size, not from the clock.
            "memory_bound_speedup_by_size": per_pass / (1 + self.drafter_share * per_level),
            "queue_seconds": max(0.0, started - self.arrived),
            "first_token_seconds": None
            if self.first_token is None
            else self.first_token - self.arrived,
            "drafters": {
                name: {"drafted": drafted, "accepted": accepted}
                for name, (drafted, accepted) in drafters.items()
            },
            "drafts_by_accepted": self.by_accepted(),
        }

    def metrics(self, now: float) -> RequestMetrics:
        """The times of a finished request, as times of day."""
        since = time.time() - now
        first = self.first_token
        return RequestMetrics(
            arrival_time=since + self.arrived,
            first_scheduled_time=None if self.started is None else since + self.started,
            first_token_time=None if first is None else since + first,
            last_token_time=None if first is None else since + self.last_token,
            finished_time=since + now,
            num_generation_tokens=self.tokens,
        )

    def _drafters(self) -> dict[str, tuple[int, int]]:
        """Nodes drafted and accepted, by method."""
        found: dict[str, tuple[int, int]] = {}
        for (name, drafted, _, accepted), times in self.checks.copy().items():
            before = found.get(name, (0, 0))
            found[name] = before[0] + times * drafted, before[1] + times * accepted
        return found

    @property
    def guessed_at(self) -> list[int]:
        """Drafts that had a guess at each depth."""
        checks = self.checks.copy().items()
        return _at_least_each((levels, times) for (_, _, levels, _), times in checks)

    @property
    def accepted_at(self) -> list[int]:
        """Drafts whose guess there was accepted."""
        checks = self.checks.copy().items()
        return _at_least_each((accepted, times) for (*_, accepted), times in checks)

    def by_accepted(self) -> list[int]:
        """How many drafts had none of their nodes accepted, how many one, and so on."""
        found: list[int] = []
        for (*_, accepted), times in self.checks.copy().items():
            found += [0] * (accepted + 1 - len(found))
            found[accepted] += times
        return found


def _is_reading(row: RowResult) -> bool:
    """Whether it processed tokens of its prompt, or those of before a preemption."""
    return row.num_processed > 1 or (row.num_processed == 1 and not row.tokens)


def _at_least_each(counts: Iterable[tuple[int, int]]) -> list[int]:
    """From (value, count) pairs: how many values are 1 or more, 2 or more, ... to the largest."""
    found: list[int] = []
    for value, times in counts:
        found += [0] * (value - len(found))
        for place in range(value):
            found[place] += times
    return found


def together(tallies: Sequence[Tally]) -> Tally:
    """The samples of one request as one."""
    if len(tallies) == 1:
        return tallies[0]
    first = tallies[0]
    total = Tally(first.arrived, first.drafter_bytes, first.drafter_share)
    total.started = min((t.started for t in tallies if t.started is not None), default=None)
    total.first_token = min(
        (t.first_token for t in tallies if t.first_token is not None), default=None
    )
    total.last_token = max(tally.last_token for tally in tallies)
    for tally in tallies:
        total.merge(tally)
        total.gaps += tally.gaps
    return total


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float | None]:
    """The median, the 95th and the 99th percentile, in milliseconds."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {
        f"p{percent}": 1e3 * ordered[round(percent / 100 * last)] if ordered else None
        for percent in (50, 95, 99)
    }


class Histogram:
    """Counts per bucket for a metrics server, and recent values for percentiles."""

    __slots__ = ("_bucket", "_last", "bounds", "counts", "recent", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last: above every bound
        self.total = 0.0
        self.recent: deque[float] = deque(maxlen=NUM_RECENT)
        self._last, self._bucket = 0.0, 0  # the value before, and where it was counted

    def add(self, value: float, times: int = 1) -> None:
        if value != self._last:  # the rows of a step often waited equally long
            self._last, self._bucket = value, bisect_left(self.bounds, value)
        self.counts[self._bucket] += times
        self.total += value * times
        self.recent.extend((value,) * times)

    def snapshot(self) -> dict[str, Any]:
        return {
            "bounds": list(self.bounds),
            "counts": list(self.counts),
            "sum": self.total,
            "count": sum(self.counts),
            "ms": percentiles_ms(list(self.recent)),
        }


class EngineStats:
    """The engine's totals. Any thread may read them, as only whole values and copies are read."""

    def __init__(self, method: str = "auto") -> None:
        self.watch = AcceptanceWatch(method)
        self.replay = PlainReplay()
        self.done = Tally()  # of sequences that are over
        self.busy_seconds = 0.0
        self.num_steps = 0
        self.prompt_tokens = 0
        self.finished: Counter[str] = Counter()  # sequences by finish reason
        self.histograms = {
            name: Histogram()
            for name in ("ttft", "inter_token", "queue", "prefill", "decode", "inference", "e2e")
        }
        self._ttft, self._inter_token = self.histograms["ttft"], self.histograms["inter_token"]

    def share(self, result: StepResult) -> Share:
        """A step's seconds, shared among its rows: the target's by tokens, the draft's by rows."""
        self.num_steps += 1
        decoded = result.decoded
        num_decoded = 0 if decoded is None else len(decoded.tokens) - len(result.rows)
        num_tokens = 0 if decoded is None else sum(map(len, decoded.tokens))
        num_known = num_packed = num_drafting = num_rows = num_decoded
        if decoded is not None and decoded.num_checked is not None:
            num_packed += sum(decoded.num_checked)
        num_reading = num_read = 0
        for row in result.rows:
            num_known += row.num_processed
            num_packed += row.num_processed + row.num_checked
            num_rows += row.num_processed > 0
            if row.tokens:
                num_drafting += 1
                num_tokens += len(row.tokens)
            if _is_reading(row):
                num_reading += 1
                num_read += row.num_processed
        seconds, plain = result.target_seconds + result.draft_seconds, result.plain_seconds
        if num_rows:  # else all rows had ended before
            self.replay.add_step(num_rows, num_tokens, seconds, plain, is_reading=num_reading > 0)
        share = Share(
            target=result.target_seconds / max(num_packed, 1),
            draft=result.draft_seconds / max(num_drafting, 1),
            plain=plain / max(num_known, 1),
        )
        if not num_reading:
            return share
        return Share(*share[:3], plain / num_read, 1 / num_reading, num_rows - num_reading)

    def add(self, tally: Tally, row: RowResult, share: Share, now: float) -> bool:
        """Count a step's result for one sequence; True: it has the first token."""
        num_before = tally.tokens
        tally.add(row, share, now)
        if not row.tokens:
            return False
        if num_before:
            self._inter_token.add(tally.gaps[-1], len(row.tokens))
        return not num_before

    def begin(self, tally: Tally) -> None:
        """A request got the first token of its first answer."""
        assert tally.first_token is not None
        self._ttft.add(tally.first_token - tally.arrived)

    def add_gaps(self, gaps: Mapping[float, int]) -> None:
        """Add the gaps before tokens that rows of one step got, and how many had each."""
        for gap, times in gaps.items():
            self._inter_token.add(gap, times)

    def end(self, tally: Tally, reason: str) -> None:
        """A sequence is over."""
        self.done.merge(tally)
        self.replay.end(tally)
        self.finished[reason] += 1
        self.watch.add(tally.checks)

    def end_request(self, tally: Tally, now: float) -> None:
        """A request is over: all its answers count as one."""
        add = {name: histogram.add for name, histogram in self.histograms.items()}
        add["e2e"](now - tally.arrived)
        if tally.started is not None:
            add["queue"](tally.started - tally.arrived)
            add["inference"](now - tally.started)
            if tally.first_token is not None:
                add["prefill"](tally.first_token - tally.started)
                add["decode"](now - tally.first_token)

    def report(self, running: Sequence[Tally], capacity: Capacity) -> dict[str, Any]:
        """The common keys in total, and further counts for a metrics server."""
        total = Tally(0.0, capacity.drafter_bytes, capacity.drafter_share)
        total.merge(self.done)
        for tally in running:
            total.merge(tally)
        total.gaps = list(self.histograms["inter_token"].recent)
        saved = self.replay.saved(running, self.busy_seconds)
        total.decode_plain = max(total.decode_target + total.decode_draft + saved.in_steps, 0.0)
        report = total.stats(self.busy_seconds)
        report |= {
            "generation_tokens": total.tokens,
            "prompt_tokens": self.prompt_tokens,
            "num_steps": self.num_steps,
            "num_drafts": sum(total.checks.values()),
            "accepted_per_position": total.accepted_at,
            "guessed_per_position": total.guessed_at,
            "busy_seconds": self.busy_seconds,
            "time_saved_seconds": sum(saved),
            "finished": dict(self.finished),
            "histograms": {name: h.snapshot() for name, h in self.histograms.items()},
        }
        for key, name in (("ttft_ms", "ttft"), ("queue_ms", "queue"), ("e2e_ms", "e2e")):
            report[key] = report["histograms"][name]["ms"]
        return report
