"""The conclusions of a report: speed-ups with intervals, and where a method starts to cost time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from hunch.bench.intervals import Interval, ratio_of_sums
from hunch.bench.records import Point, Report, Run

PLAIN = "off"
LOAD_AXES = {"rate": "requests per second", "concurrency": "requests at once"}


def seconds_by_prompt(run: Run) -> dict[str, list[float]]:
    """End-to-end seconds of each request in every round, per token of its answer."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for answer in run.answers():
        seconds[answer.id].append(answer.end_to_end / max(answer.num_tokens, 1))
    return seconds


def _tables(base: Run, other: Run) -> tuple[list[list[float]], list[list[float]]]:
    """The seconds of the requests that both have, a line each, cut to the rounds that all have.

    Seconds are per token, times the tokens of `base`, as texts may differ in length.
    """
    first, second = seconds_by_prompt(base), seconds_by_prompt(other)
    tokens = {answer.id: answer.num_tokens for answer in base.answers()}
    both = sorted(first.keys() & second.keys())
    tables = []
    for some in (first, second):
        num_rounds = min((len(some[name]) for name in both), default=0)
        tables.append([[tokens[name] * x for x in some[name][:num_rounds]] for name in both])
    return tables[0], tables[1]


def speedup(base: Run, other: Run) -> Interval | None:
    """Time of `base` over time of `other` for the same requests; None without any."""
    return ratio_of_sums(*_tables(base, other))


def plain_of(report: Report) -> str | None:
    """The method others are compared with: plain decoding, else the first."""
    methods = report.methods()
    return PLAIN if PLAIN in methods else (methods[0] if methods else None)


def base_of(report: Report, run: Run) -> Run | None:
    """The run to compare with: the method of `plain_of` at the same point."""
    plain = plain_of(report)
    return None if plain is None else report.find(plain, run.point)


def speedups(report: Report) -> dict[str, list[tuple[dict[str, Any], Interval]]]:
    """By method: each point with the speed-up against plain decoding there."""
    found: dict[str, list[tuple[dict[str, Any], Interval]]] = defaultdict(list)
    for run in report.runs:
        base = base_of(report, run)
        if base is None or run is base:
            continue
        interval = speedup(base, run)
        if interval is not None:
            found[run.method].append((run.point, interval))
    return dict(found)


def num_equal(report: Report, run: Run) -> tuple[int, int] | None:
    """The numbers of answers equal to plain decoding's at the same point, and of all answers; None
    for plain itself."""
    base = base_of(report, run)
    if base is None:
        return None
    expected = {answer.id: answer.digest for answer in base.answers()}
    both = [answer for answer in run.answers() if answer.id in expected]
    return sum(answer.digest == expected[answer.id] for answer in both), len(both)


def is_all_equal(report: Report) -> bool:
    """Whether every method wrote plain decoding's text at every point."""
    counts = [num_equal(report, run) for run in report.runs]
    return all(count is None or count[0] == count[1] for count in counts)


@dataclass(frozen=True, slots=True)
class Inversion:
    """Where a method starts to cost time as the load rises."""

    method: str
    axis: str  # "rate" or "concurrency"
    others: dict[str, Any]  # the other axes' values
    at: float | None  # the load; None: it does not within the measured loads
    is_always: bool  # it costs time from the first measured load on
    last: float  # the highest load measured

    def __str__(self) -> str:
        unit = LOAD_AXES[self.axis]
        method = label(self.method)
        if self.is_always:
            return f"{method}: costs time at every measured load (from {self.at:g} {unit})"
        if self.at is None:
            return f"{method}: pays or breaks even up to {self.last:g} {unit}"
        return f"{method}: costs time from {self.at:.3g} {unit} on"


def load_axis(report: Report) -> str | None:
    """The axis of load that was swept."""
    for axis in LOAD_AXES:
        values = {point[axis] for point in report.points() if axis in point}
        if len(values) > 1:
            return axis
    return None


def inversions(report: Report) -> list[Inversion]:
    """One for each method and combination of the axes that are not the load."""
    axis = load_axis(report)
    if axis is None:
        return []
    found = []
    for method, points in speedups(report).items():
        lines: dict[str, list[tuple[float, Interval]]] = defaultdict(list)
        rest: dict[str, dict[str, Any]] = {}
        for point, interval in points:
            others = {name: value for name, value in point.items() if name != axis}
            rest[repr(others)] = others
            lines[repr(others)].append((float(point[axis]), interval))
        for key, line in lines.items():
            found.append(_inversion(method, axis, rest[key], sorted(line, key=lambda x: x[0])))
    return found


def _inversion(
    method: str, axis: str, others: dict[str, Any], line: Sequence[tuple[float, Interval]]
) -> Inversion:
    """The load at which the curve crosses 1 for good, beyond noise, on a logarithmic axis."""
    costing = [place for place, (_, interval) in enumerate(line) if interval.is_below_one]
    last = line[-1][0]
    paying = [place for place, (_, interval) in enumerate(line) if interval.value >= 1.0]
    if not costing or (paying and paying[-1] > costing[-1]):
        return Inversion(method, axis, others, None, False, last)
    place = (paying[-1] if paying else -1) + 1  # from here on it never pays again
    if place == 0:
        return Inversion(method, axis, others, line[0][0], True, last)
    (x0, before), (x1, after) = line[place - 1], line[place]
    share = (before.value - 1) / (before.value - after.value)
    at = math.exp(math.log(x0) + share * (math.log(x1) - math.log(x0)))
    return Inversion(method, axis, others, at, False, last)


def time_saved(report: Report, run: Run) -> dict[str, float | None] | None:
    """Seconds saved against plain decoding: by the clock, and as the engine counts them.

    Both are the median round's, times the rounds, so that a pause of the machine in one round does
    not count.
    """
    base = base_of(report, run)
    if base is None or run is base or not run.rounds or not base.rounds:
        return None
    count = min(len(base.rounds), len(run.rounds))
    plain_seconds, seconds = (
        count * median(one.seconds for one in some.rounds[:count]) for some in (base, run)
    )
    counted = [one.counts.get("time_saved_seconds") for one in run.rounds[:count]]
    known = [one for one in counted if one is not None]
    return {
        "plain": plain_seconds,
        "by_clock": plain_seconds - seconds,
        "by_engine": count * median(known) if known else None,
    }


def label(method: str) -> str:
    """A method's readable name: `suffix:num_nodes=3:adaptive=false` drafts a fixed 3."""
    name, _, rest = method.replace(":adaptive=false", "").partition(":num_nodes=")
    is_fixed = rest.isdigit() and ":adaptive=false" in method
    return f"{name}, fixed {rest}" if is_fixed else method


def describe_point(point: Point, axes: Sequence[str]) -> str:
    return ", ".join(f"{name} {point[name]}" for name in axes if name in point) or "all"


def in_brackets(point: Point, axes: Sequence[str]) -> str:
    """The point in brackets, behind a word; empty if no axis distinguishes points."""
    return f" ({describe_point(point, axes)})" if axes else ""


def varied_axes(points: Iterable[Point]) -> list[str]:
    """Axes with more than one value."""
    values: dict[str, set[str]] = defaultdict(set)
    for point in points:
        for name, value in point.items():
            values[name].add(repr(value))
    return [name for name, some in values.items() if len(some) > 1]
