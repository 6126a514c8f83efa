"""The acceptance estimate: how many of a row's guesses the target will accept.

It holds two log-odds: of a row's first guess, and of a further one after a right one. Each is the
sum of a prior, a term of the row, learned while its request runs, and a term that all requests
share.

All of it is scalar Python: steps have few rows, and for 8 of them numpy took twice as long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp, log, log2
from typing import NamedTuple

from hunch.drafting.step_shapes import DraftSource

COMMON_RATE = 0.003  # at which the shared terms learn, once many guesses were seen
PRIOR_GUESSES = 12.0  # guesses that count as much as the priors: the first ones teach more
HOPE_GUESSES = 16.0  # guesses after which half of the hope for a source is left
HOPE_ROWS = 4  # hope falls with the rows of a step: with many, a trial costs more, teaches faster
# Expected tokens are compared with accepted ones (`calibrate`): steps that the means cover,
# steps after which an unused source counts as right again, tokens that both means start with, and
# the largest correction.
CALIBRATED_STEPS, RECALIBRATED_STEPS, CALIBRATED_TOKENS, MAX_CALIBRATION = 60.0, 500.0, 4.0, 2.0
MIN_CHANCE, MAX_CHANCE = 0.02, 0.98  # bounds of chances
FINE = 8  # log-odds are rounded to one part in this many, so that chances can be cached
FLOOR = 0.05  # errors are divided by p (1 - p), or by this if it is more
FADE, COMMON_FADE = 0.003, 0.001  # what row and shared terms lose in a step without guesses
LEARNED_FADE = 0.002  # share of the learned guesses that a step without guesses forgets
DOUBT_FADE = 0.03
NEW_MATCH = 1.0  # doublings of the match that is assumed for a new row

HOPE = 0.8  # log-odds added for a network that was not tried yet
# Chances of a network's first guess and of a further one. For MERGED without the lookup's guesses,
# which have an estimate of their own.
NETWORK_PRIORS = {
    DraftSource.CHAIN: (0.5, 0.6),
    DraftSource.TREE: (0.65, 0.65),
    DraftSource.MERGED: (0.7, 0.68),
}


class LookupPrior(NamedTuple):
    """What is assumed of lookups before anything was learned.

    The length of the last match says most: over 1,200 answers the first guess was right 10% of the
    time without a match, 24% after a match of one token, 53% after three, 95% after sixteen.
    """

    chances: tuple[float, float]  # of the first guess and of a further one, without a match
    by_match: tuple[float, float]  # log-odds that each gains with every doubling of the match
    rate: float = 0.04
    doubt: float = 0.3


OWN_TEXT = LookupPrior((0.1, 0.6), (1.0, 0.5))
WITH_PHRASES = LookupPrior((0.25, 0.45), (0.75, 0.65))


class AcceptanceEstimate:
    """How many of a row's guesses will be accepted, by source.

    Sources differ in their priors alone: what is learned from one holds for all, as the noise of
    separate estimates would decide between them. The length of the match behind a row's next
    guesses may shift its log-odds; the learned terms are then what remains.
    """

    def __init__(
        self,
        num_rows: int,
        priors: Mapping[int, tuple[float, float]],  # by source: of the first and a further guess
        *,
        rate: float,
        num_levels: int | Mapping[int, int],  # by source
        by_match: tuple[float, float] = (0.0, 0.0),  # log-odds for every doubling of the match
        doubt: float = 0.0,  # log-odds taken off for a new row, see `gains`
        hope: float = 0.0,  # log-odds added for a source that was not tried yet
    ) -> None:
        self.priors = {
            source: (log_odds(first), log_odds(further))
            for source, (first, further) in priors.items()
        }
        self.rate, self.by_match, self.doubt, self.hope = rate, by_match, doubt, hope
        self.num_levels = (
            dict.fromkeys(priors, num_levels) if isinstance(num_levels, int) else dict(num_levels)
        )
        self.first, self.further = [0.0] * num_rows, [0.0] * num_rows  # terms of the rows
        self.doubts = [doubt] * num_rows
        # Doublings of the last match (0 tokens: none, 1: one, 3: two), behind the new guesses,
        # and of the one before it, behind the guesses that are compared next.
        self.match, self.before = [NEW_MATCH] * num_rows, [NEW_MATCH] * num_rows
        self.common_first = self.common_further = 0.0
        self.num_learned = 0.0  # guesses that the shared terms have learned from
        # By source: tokens expected of recently checked guesses, and tokens accepted.
        self.checked = dict.fromkeys(priors, (CALIBRATED_TOKENS, CALIBRATED_TOKENS))

    def start(self, rows: Sequence[int]) -> None:
        """New requests have these rows."""
        for row in rows:
            self.first[row] = self.further[row] = 0.0
            self.doubts[row] = self.doubt
        self.clear_match(rows)

    def clear_match(self, rows: Sequence[int]) -> None:
        """Nothing is known of these rows' next guesses."""
        for row in rows:
            self.match[row] = self.before[row] = NEW_MATCH

    def note_match(self, row: int, matched: int) -> None:
        """The row's new guesses follow a match of `matched` tokens."""
        self.before[row], self.match[row] = self.match[row], log2(1.0 + matched)

    def learn(
        self,
        row: int,
        run: int,  # leading guesses that were right
        compared: int,  # leading guesses that are known to be right or wrong
        source: int = DraftSource.LOOKUP,
        weight: float = 1.0,  # for the shared terms: one over the rows of the step
        num_checked: int = 0,  # nodes of the source that the target checked
        *,
        is_most: bool = False,
        num_levels: int | None = None,
    ) -> None:
        """Learn from one row's guesses.

        is_most: `run` is an upper bound, as another source's guesses were right as far.
        num_levels: levels that the source itself drafted, if not the usual number.
        """
        self.doubts[row] *= 1.0 - DOUBT_FADE
        if not compared:
            return
        levels = self.num_levels[source] if num_levels is None else num_levels
        odds, again = self.odds(row, source, self.before[row])
        if num_checked:
            most = min(num_checked, levels)
            (gain,) = _gains(odds, again, (most,), levels)
            came = min(run, most) if num_levels is None else run
            self.calibrate(source, gain, came, weight)
        (chance, scale), (further, further_scale) = _chance(odds), _chance(again)
        right, num_further = 1.0 if run else 0.0, min(run, levels) - 1.0
        asked = min(compared, levels) - 1.0
        if is_most and run:
            right, num_further, asked = _up_to(odds, again, min(run, levels))
        step = self.rate * scale * (right - chance)
        self.first[row] += step
        self.num_learned += 1.0
        common = max(weight * COMMON_RATE, 1.0 / (PRIOR_GUESSES + self.num_learned)) / self.rate
        self.common_first += common * step
        if asked:
            step = self.rate * further_scale * (num_further - asked * further)
            self.further[row] += step
            self.common_further += common * step

    def odds(self, row: int, source: int, match: float, more: float = 0.0) -> tuple[int, int]:
        """Log-odds (times FINE) of a row's first guess after this match, and of a further one."""
        (first, further), (by_first, by_further) = self.priors[source], self.by_match
        first += by_first * match + self.common_first + self.first[row] + more
        further += by_further * match + self.common_further + self.further[row] + more
        return round(FINE * first), round(FINE * further)

    def calibrate(self, source: int, gain: float, came: float, weight: float) -> None:
        """Of this source's guesses `gain` tokens were expected, and `came` were accepted."""
        for other, (expected, was) in self.checked.items():
            if other == source:
                kept = 1.0 - weight / CALIBRATED_STEPS
                self.checked[source] = kept * expected + weight * gain, kept * was + weight * came
            elif expected != was:  # an unused source slowly counts as right again
                kept = 1.0 - weight / RECALIBRATED_STEPS
                self.checked[other] = expected, kept * was + (1.0 - kept) * expected

    def fade(self, rows: Sequence[int]) -> None:
        """Forget a little, after a step without guesses: so an unused source is tried again."""
        for row in rows:
            self.first[row] *= 1.0 - FADE
            self.further[row] *= 1.0 - FADE
        self.common_first *= 1.0 - COMMON_FADE
        self.common_further *= 1.0 - COMMON_FADE
        self.num_learned *= 1.0 - LEARNED_FADE

    def gains(
        self,
        rows: Sequence[int],
        sizes: tuple[int, ...],
        source: int = DraftSource.LOOKUP,
        *,
        is_doubtful: bool = False,
        is_hopeful: bool = True,
    ) -> list[tuple[float, ...]]:
        """Expected tokens of each row, for each number of guesses in `sizes`.

        Rows of a step wait for one another, and of many new rows some will gain little. So with
        `is_doubtful` new rows are expected to gain less, the more rows the step has.
        """
        (by_first, by_further), prior = self.by_match, self.priors[source]
        hope = self.hope_left(len(rows)) if is_hopeful else 0.0
        first, further = prior[0] + self.common_first + hope, prior[1] + self.common_further + hope
        doublings = log2(len(rows)) if is_doubtful else 0.0
        most, right = self.num_levels[source], self.calibration(source)
        firsts, furthers, matches, doubts = self.first, self.further, self.match, self.doubts
        gains = []
        for row in rows:  # no calls in here: this runs for every row in every step
            match, doubt = matches[row], doublings * doubts[row]
            odds = round(FINE * (first + by_first * match + firsts[row] - doubt))
            again = round(FINE * (further + by_further * match + furthers[row] - doubt))
            gains.append(_gains(odds, again, sizes, most))
        if abs(right - 1.0) < 0.01:
            return gains
        return [
            tuple([min(right * gain, size) for gain, size in zip(some, sizes, strict=True)])
            for some in gains
        ]

    def hope_left(self, num_rows: int) -> float:
        """Log-odds added for the source, which fall as it is tried."""
        return (
            self.hope / (1.0 + self.num_learned / HOPE_GUESSES) / (1.0 + (num_rows - 1) / HOPE_ROWS)
        )

    def calibration(self, source: int) -> float:
        """Accepted tokens per expected one."""
        expected, came = self.checked[source]
        return min(max(came / expected, 1.0 / MAX_CALIBRATION), MAX_CALIBRATION)


def log_odds(chance: float) -> float:
    return log(chance / (1.0 - chance))


@lru_cache(maxsize=1 << 12)
def _chance(odds: int) -> tuple[float, float]:
    """The chance of (rounded) log-odds, and the factor that makes it move by the learning rate."""
    chance = min(max(1.0 / (1.0 + exp(-odds / FINE)), MIN_CHANCE), MAX_CHANCE)
    return chance, 1.0 / max(chance * (1.0 - chance), FLOOR)


@lru_cache(maxsize=1 << 16)
def _gains(odds: int, again: int, sizes: tuple[int, ...], most: int) -> tuple[float, ...]:
    """Expected tokens for each number of guesses; those past `most` add none."""
    (first, _), (further, _) = _chance(odds), _chance(again)
    return tuple([first * (1.0 - further ** min(size, most)) / (1.0 - further) for size in sizes])


@lru_cache(maxsize=1 << 12)
def _up_to(odds: int, again: int, most: int) -> tuple[float, float, float]:
    """What to learn if at most `most` guesses were right: the expected number of right first ones,
    of right further ones, and of further ones that were compared."""
    (first, _), (further, _) = _chance(odds), _chance(again)
    shares = [1.0 - first, *(first * (1.0 - further) * further**n for n in range(most))]
    total = sum(shares)
    right = 1.0 - shares[0] / total
    num_right = sum(run * share for run, share in enumerate(shares)) / total
    return right, num_right - right, num_right


@lru_cache(maxsize=1 << 14)
def of_either(one: tuple[int, int], most: int, other: tuple[int, int], other_most: int) -> float:
    """Expected tokens of two drafts that are checked beside each other, by their log-odds."""
    missed = [1.0] * max(most, other_most)  # by level: chances that neither is right so far
    for (odds, again), levels in ((one, most), (other, other_most)):
        (first, _), (further, _) = _chance(odds), _chance(again)
        for level in range(levels):
            missed[level] *= 1.0 - first * further**level
    return len(missed) - sum(missed)
