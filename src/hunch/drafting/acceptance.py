"""The acceptance estimate: how many of a row's guesses the target will accept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp, log, log2
from typing import NamedTuple

from hunch.drafting.step_shapes import DraftSource

COMMON_RATE = 0.003  # at which the shared terms learn, once many guesses were seen
# Guesses that count as much as the priors: the first ones teach more (PRIOR_GUESSES=1e9: together
# 0.99, at worst 0.78).
PRIOR_GUESSES = 12.0
HOPE_GUESSES = 16.0  # guesses after which half of the hope for a source is left
HOPE_ROWS = 4  # hope falls with the rows of a step: with many, a trial costs more, teaches faster
MIN_CHANCE, MAX_CHANCE = 0.02, 0.98  # bounds of chances
FINE = 8  # log-odds are rounded to one part in this many, so that chances can be cached
FLOOR = 0.05  # errors are divided by p (1 - p), or by this if it is more
# Expected tokens are compared with accepted ones, by source: steps that the means cover, and tokens
# that both start with, and the largest correction (MAX_CALIBRATION=1: late host 0.98, a draft model
# 0.99, at worst 0.86).
CALIBRATED_STEPS, CALIBRATED_TOKENS, MAX_CALIBRATION = 60.0, 4.0, 2.0
FADE = 0.003  # what the terms lose in a step without guesses, so that a source is tried again
NEW_MATCH = 0.7  # doublings of the match that is assumed for a new row


class LookupPrior(NamedTuple):
    """What is assumed of lookups before anything was learned.

    The length of the last match says most: over 1,200 answers the first guess was right 10% of the
    time without a match, 24% after a match of one token, 53% after three, 95% after sixteen.
    """

    chances: tuple[float, float]  # of the first guess and of a further one, without a match
    by_match: tuple[float, float]  # log-odds that each gains with every doubling of the match


OWN_TEXT = LookupPrior((0.1, 0.6), (1.0, 0.5))
WITH_PHRASES = LookupPrior((0.25, 0.45), (0.75, 0.65))
# Chances of a network's first guess and of a further one. For MERGED without the lookup's guesses,
# which have an estimate of their own.
NETWORK_PRIORS = {
    DraftSource.CHAIN: (0.5, 0.6),
    DraftSource.TREE: (0.65, 0.65),
    DraftSource.MERGED: (0.7, 0.68),
}


class AcceptanceEstimate:
    """How many of a row's guesses will be accepted, by source.

    It holds two log-odds: of a row's first guess, and of a further one after a right one. Each is
    the sum of a source's prior, a term of the row, learned while its request runs, and a term that
    all requests share. Sources differ in their priors alone, as the noise of separate estimates
    would decide between them. The length of the match behind a row's next guesses may shift its
    log-odds; the learned terms are then what remains.

    All of it is scalar Python: steps have few rows, and for 8 of them numpy took twice as long.
    """

    def __init__(
        self,
        num_rows: int,
        priors: Mapping[int, tuple[float, float]],  # by source: of the first and a further guess
        *,
        rate: float,
        num_levels: int | Mapping[int, int],  # by source
        by_match: tuple[float, float] = (0.0, 0.0),  # log-odds for every doubling of the match
        hope: float = 0.0,  # log-odds added for a source that was not tried yet
    ) -> None:
        self.priors = {
            source: (log_odds(first), log_odds(further))
            for source, (first, further) in priors.items()
        }
        self.rate, self.by_match, self.hope = rate, by_match, hope
        self.num_levels = (
            dict.fromkeys(priors, num_levels) if isinstance(num_levels, int) else dict(num_levels)
        )
        self.first, self.further = [0.0] * num_rows, [0.0] * num_rows  # terms of the rows
        # Doublings of the last match (0 tokens: none, 1: one, 3: two), behind the new guesses,
        # and of the one before it, behind the guesses that are compared next.
        self.match, self.before = [NEW_MATCH] * num_rows, [NEW_MATCH] * num_rows
        self.common_first = self.common_further = 0.0
        self.num_learned = 0  # guesses that the shared terms have learned from
        # By source: tokens expected of recently checked guesses, and tokens accepted.
        self.checked = dict.fromkeys(priors, (CALIBRATED_TOKENS, CALIBRATED_TOKENS))

    def start(self, rows: Sequence[int]) -> None:
        """New requests have these rows."""
        for row in rows:
            self.first[row] = self.further[row] = 0.0
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
        num_levels: int | None = None,  # that the source drafted, if not the usual number
    ) -> None:
        """Learn from one row's guesses."""
        if not compared:
            return
        levels = self.num_levels[source] if num_levels is None else num_levels
        odds, again = self.odds(row, source, self.before[row])
        (chance, scale), (further, further_scale) = _chance(odds), _chance(again)
        step = self.rate * scale * ((run > 0) - chance)
        self.first[row] += step
        self.num_learned += 1
        common = max(weight * COMMON_RATE, 1.0 / (PRIOR_GUESSES + self.num_learned)) / self.rate
        self.common_first += common * step
        asked = min(compared, levels) - 1
        if asked:
            step = self.rate * further_scale * (min(run, levels) - 1 - asked * further)
            self.further[row] += step
            self.common_further += common * step

    def calibrate(self, source: int, expected: float, came: float, weight: float) -> None:
        """Of this source's guesses so many tokens were expected, and so many were accepted."""
        kept, (before, was) = 1.0 - weight / CALIBRATED_STEPS, self.checked[source]
        self.checked[source] = kept * before + weight * expected, kept * was + weight * came

    def calibration(self, source: int) -> float:
        """Accepted tokens per expected one."""
        expected, came = self.checked[source]
        return min(max(came / expected, 1.0 / MAX_CALIBRATION), MAX_CALIBRATION)

    def fade(self, rows: Sequence[int]) -> None:
        """Forget a little, after a step without guesses: so an unused source is tried again."""
        kept = 1.0 - FADE
        for row in rows:
            self.first[row] *= kept
            self.further[row] *= kept
        self.common_first *= kept
        self.common_further *= kept

    def odds(self, row: int, source: int, match: float, more: float = 0.0) -> tuple[int, int]:
        """Log-odds (times FINE) of a row's first guess after this match, and of a further one."""
        (first, further), (by_first, by_further) = self.priors[source], self.by_match
        first += by_first * match + self.common_first + self.first[row] + more
        further += by_further * match + self.common_further + self.further[row] + more
        return round(FINE * first), round(FINE * further)

    def gains(
        self, rows: Sequence[int], sizes: tuple[int, ...], source: int = DraftSource.LOOKUP
    ) -> list[tuple[float, ...]]:
        """Expected tokens of each row, for each number of guesses in `sizes`."""
        most, hope = self.num_levels[source], self.hope_left(len(rows))
        right = self.calibration(source)
        gains = [
            _gains(*self.odds(row, source, self.match[row], hope), sizes, most) for row in rows
        ]
        return [
            tuple([min(right * gain, size) for gain, size in zip(some, sizes, strict=True)])
            for some in gains
        ]

    def gain(self, row: int, source: int, match: float, num_guesses: int) -> float:
        """Expected tokens of so many guesses after this match."""
        return _gains(*self.odds(row, source, match), (num_guesses,), self.num_levels[source])[0]

    def hope_left(self, num_rows: int) -> float:
        """Log-odds added for the source, which fall as it is tried."""
        tried = 1.0 + self.num_learned / HOPE_GUESSES
        return self.hope / tried / (1.0 + (num_rows - 1) / HOPE_ROWS)


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


@lru_cache(maxsize=1 << 14)
def gain_of_either(
    one: tuple[int, int], most: int, other: tuple[int, int], other_most: int
) -> float:
    """Expected tokens of two drafts that are checked beside each other, by their log-odds."""
    missed = [1.0] * max(most, other_most)  # by level: chances that neither is right so far
    for (odds, again), levels in ((one, most), (other, other_most)):
        (first, _), (further, _) = _chance(odds), _chance(again)
        for level in range(levels):
            missed[level] *= 1.0 - first * further**level
    return len(missed) - sum(missed)
