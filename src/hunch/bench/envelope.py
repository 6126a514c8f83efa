"""Is `auto` as fast as the fastest other method at every load? Decided round by round.

In a round all methods get the same requests at the same moments, so what is compared is the ratio
of two methods' times in one round. The fastest of several noisy times would be faster than any
method, so it is not used: `auto` is within the tolerance of the fastest method exactly if it is
within that of each of the others, and each is tested by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hunch.bench.analysis import plain_of
from hunch.bench.intervals import Interval, mean_ratio
from hunch.bench.records import Point, Report, Run

TOLERANCE = 0.02  # by which `auto` may be slower than the fastest other method
MIN_ROUNDS = 4  # rounds of every point, before decided ones are left out
YES, NO, OPEN = "yes", "no", "not decided"


@dataclass(frozen=True, slots=True)
class Envelope:
    """`auto` at one point beside every other method."""

    point: dict[str, Any]
    ratios: Mapping[str, Interval]  # the method's time over auto's: 1 is as fast, more is slower
    num_rounds: int  # of auto
    plain: str

    @property
    def best(self) -> str:
        """The method that leaves `auto` the least."""
        return min(self.ratios, key=lambda method: self.ratios[method].value)

    @property
    def ratio(self) -> Interval:
        return self.ratios[self.best]

    @property
    def words(self) -> str:
        """The ratio in words: one round has no interval."""
        return str(self.ratio) if self.num_rounds > 1 else f"{self.ratio.value:.3f}"

    @property
    def verdict(self) -> str:
        """Whether `auto` is within the tolerance of all the others: yes, no or not decided."""
        verdicts = [verdict(interval) for interval in self.ratios.values()]
        return NO if NO in verdicts else YES if set(verdicts) == {YES} else OPEN

    @property
    def is_below_plain(self) -> bool:
        return verdict(self.ratios[self.plain]) == NO

    def to_json(self) -> dict[str, Any]:
        ratios = {
            method: {
                "value": one.value,
                "low": one.low,
                "high": one.high if math.isfinite(one.high) else None,
            }
            for method, one in self.ratios.items()
        }
        return {
            "point": self.point, "best": self.best, "within_2_percent": self.verdict,
            "num_rounds": self.num_rounds, "ratios": ratios,
        }  # fmt: skip


def verdict(ratio: Interval) -> str:
    """Whether a method's time over that of `auto` is at least 1 less the tolerance."""
    if ratio.low >= 1 - TOLERANCE:
        return YES
    return NO if ratio.high < 1 - TOLERANCE else OPEN


def is_auto(method: str) -> bool:
    return method.partition(":")[0] == "auto"


def envelope(report: Report) -> list[Envelope]:
    """`auto` beside all other methods, point by point."""
    found = (_at(report, point) for point in report.points())
    return [one for one in found if one is not None]


def open_methods(report: Report, point: Point) -> set[str]:
    """Methods for which another round could decide something at this point.

    A method needs no more rounds once `auto` is known to be within the tolerance of it. None does
    once `auto` is known to be slower than one of them: that decides the point.
    """
    found = _at(report, point)
    if found is None:
        return set(report.methods())
    left = {method for method, one in found.ratios.items() if verdict(one) == OPEN}
    if not left or found.verdict == NO:
        return set()
    return left | {method for method in report.methods() if is_auto(method)}


def _at(report: Report, point: Point) -> Envelope | None:
    plain = plain_of(report)
    autos = [method for method in report.methods() if is_auto(method)]
    # Beside `auto` itself, `auto` with other options is one of the methods it is compared with.
    auto = "auto" if "auto" in autos else next(iter(autos), None)
    mine = report.find(auto, point) if auto is not None else None
    if mine is None or plain is None or auto == plain:
        return None
    ratios: dict[str, Interval] = {}
    for run in report.runs:
        if run.point == point and run is not mine:
            interval = mean_ratio(_seconds_of_rounds(run, mine))
            if interval is not None:
                ratios[run.method] = interval
    if plain not in ratios:
        return None
    return Envelope(dict(point), ratios, len(mine.rounds), plain)


def _seconds_of_rounds(one: Run, two: Run) -> list[tuple[float, float]]:
    """For each round that both have, the seconds of its requests: those of `one` and of `two`.

    Where texts differ in length, the other's seconds are those for as many tokens.
    """
    pairs = []
    for first, second in zip(one.rounds, two.rounds, strict=False):
        mine, theirs = ({answer.id: answer for answer in one.counted} for one in (first, second))
        both = sorted(mine.keys() & theirs.keys())
        if both:
            tokens = {name: mine[name].num_tokens for name in both}
            seconds = sum(
                theirs[name].end_to_end * tokens[name] / max(theirs[name].num_tokens, 1)
                for name in both
            )
            pairs.append((sum(mine[name].end_to_end for name in both), seconds))
    return pairs
