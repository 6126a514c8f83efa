"""The acceptance estimate: how many of a row's guesses the target will accept.

That number is the row's *gain*: tokens beside the one that a step always brings. Steps run by the
host and captured steps share the estimate. Seconds are in `costs`, the choice in `policy`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import exp, log, log2

from hunch.drafting.step_shapes import DraftSource

COMMON_RATE = 0.003  # learning rate of the terms that all requests share, after many guesses
PRIOR_GUESSES = 12.0  # the priors count as much as this many guesses, so the first teach more
CALIBRATION_RATE, MAX_CALIBRATION = 0.02, 2.0  # of the factor on gains, by source
FADE = 0.003  # share that terms lose in a step without guesses, so that a source is tried again
FINE = 8  # log-odds are rounded to multiples of 1/FINE, so that chances can be cached
NEW_MATCH = 0.7  # log2(1 + length) of the match that is assumed for a new row
# Priors of lookups in the row's own text, and of those with a phrase table. The first pair: chances
# without a match, of the first guess and of a further one after a right one. The second pair: what
# each doubling of the match adds to their log-odds. Over 1,200 answers, the first guess was right
# 10% of the time without a match, 24% after one of one token, 53% after three, 95% after sixteen.
OWN_TEXT, WITH_PHRASES = ((0.1, 0.6), (1.0, 0.5)), ((0.25, 0.45), (0.75, 0.65))
# The same chances of a network's guesses, set high so that it is tried. Those of MERGED leave out
# the lookup's guesses, which have their own estimate.
NETWORK_PRIORS = {
    DraftSource.CHAIN: (0.6, 0.65), DraftSource.TREE: (0.68, 0.68),
    DraftSource.MERGED: (0.72, 0.7), DraftSource.LARGE: (0.75, 0.73),
}  # fmt: skip
HOST_PRIOR = (0.6, 0.7)  # the same of a network in steps run by the host
Odds = tuple[int, int]  # log-odds times FINE: of the first guess, and of a further one


class AcceptanceEstimate:
    """How many of a row's guesses will be accepted, by source.

    It keeps two log-odds: that a row's first guess is right, and that a further one is right after
    a right one. Each is a sum of three terms: the source's prior, a term of the row, learned while
    its request runs, and a term that all requests share. Learned terms do not depend on the source:
    with separate ones, noise would decide between sources. If the log-odds also depend on the match
    behind a row's guesses (`by_match`), the learned terms are what the match does not explain.

    All of it is scalar Python: steps have few rows, and with 8 of them numpy took twice as long.
    """

    def __init__(
        self,
        num_rows: int,
        priors: Mapping[int, tuple[float, float]],  # by source: of the first and a further guess
        *,
        rate: float,
        num_levels: int | Mapping[int, int],  # by source, or of all
        by_match: tuple[float, float] = (0.0, 0.0),  # log-odds added by each doubling of the match
    ) -> None:
        self.priors = {one: (log_odds(p), log_odds(more)) for one, (p, more) in priors.items()}
        self.rate, self.by_match = rate, by_match
        if isinstance(num_levels, int):
            num_levels = dict.fromkeys(priors, num_levels)
        self.num_levels = num_levels
        self.first, self.further = [0.0] * num_rows, [0.0] * num_rows  # terms of the rows
        # log2(1 + length) of the match behind each row's newest guesses.
        self.match = [NEW_MATCH] * num_rows
        self.common_first = self.common_further = 0.0
        self.num_learned = 0  # guesses that the shared terms have learned from
        self.calibration = dict.fromkeys(priors, 1.0)  # factor on gains, by source

    def start(self, rows: Sequence[int]) -> None:
        """New requests have these rows."""
        for row in rows:
            self.first[row] = self.further[row] = 0.0
            self.match[row] = NEW_MATCH

    def learn(
        self,
        row: int,
        run: int,  # leading guesses that were right
        compared: int,  # leading guesses that are known to be right or wrong
        source: int = DraftSource.LOOKUP,
        weight: float = 1.0,  # of the row, for the shared terms: 1 / number of rows in the step
        num_levels: int | None = None,  # levels that the source drafted, if not the usual number
        match: float = NEW_MATCH,  # by which the number of guesses was chosen
    ) -> Odds:
        """Learn from one row's guesses; returns the log-odds that they had."""
        found = odds, further_odds = self.odds(row, source, match)
        if not compared:
            return found
        levels = self.num_levels[source] if num_levels is None else num_levels
        (chance, scale), (further, further_scale) = _chance(odds), _chance(further_odds)
        step = self.rate * scale * ((run > 0) - chance)
        self.first[row] += step
        self.num_learned += 1
        common = max(weight * COMMON_RATE, 1.0 / (PRIOR_GUESSES + self.num_learned)) / self.rate
        self.common_first += common * step
        if num_further := min(compared, levels) - 1:
            step = self.rate * further_scale * (min(run, levels) - 1 - num_further * further)
            self.further[row] += step
            self.common_further += common * step
        return found

    def calibrate(self, source: int, error: float) -> None:
        """Correct this source's gains by the mean `relative_error` of a step's rows."""
        factor = self.calibration[source] * exp(CALIBRATION_RATE * error)
        self.calibration[source] = min(max(factor, 1.0 / MAX_CALIBRATION), MAX_CALIBRATION)

    def fade(self, rows: Sequence[int], weight: float = 1.0) -> None:
        """Forget a little after a step without guesses, so that an unused source is tried again.

        weight: of these rows, for the shared terms: their share of the step's rows.
        """
        kept, kept_common = 1.0 - FADE, 1.0 - FADE * weight
        for row in rows:
            self.first[row] *= kept
            self.further[row] *= kept
        self.common_first *= kept_common
        self.common_further *= kept_common

    def odds(self, row: int, source: int, match: float) -> Odds:
        """The log-odds of a row's guesses after this match."""
        (first, further), (by_first, by_further) = self.priors[source], self.by_match
        first += by_first * match + self.common_first + self.first[row]
        further += by_further * match + self.common_further + self.further[row]
        return round(FINE * first), round(FINE * further)

    def gains(
        self, rows: Sequence[int], sizes: tuple[int, ...], source: int = DraftSource.LOOKUP
    ) -> list[list[float]]:
        """The gain of each row, for each number of guesses in `sizes`, the smallest first."""
        most, factor, match = self.num_levels[source], self.calibration[source], self.match
        each = [_gains(*self.odds(row, source, match[row]), sizes, most) for row in rows]
        gains = [[factor * gain for gain in some] for some in each]
        for some in gains:
            if some[0] > sizes[0]:  # else no other is above its size either
                some[:] = map(min, some, sizes)
        return gains

    def gain(self, odds: Odds, source: int, size: int) -> float:
        """The gain of `size` guesses with these log-odds."""
        (gain,) = _gains(*odds, (size,), self.num_levels[source])
        return min(self.calibration[source] * gain, size)


def host_estimate(num_rows: int, num_levels: int) -> AcceptanceEstimate:
    """The estimate of one network in steps run by the host.

    It has a single source, which stands for whatever the network drafts: the default of `gains`.
    """
    return AcceptanceEstimate(
        num_rows, {DraftSource.LOOKUP: HOST_PRIOR}, rate=0.1, num_levels=num_levels
    )


def relative_error(expected: float, accepted: float) -> float:
    """How far the guesses that were accepted are above or below the gain expected of them."""
    return (accepted - expected) / max(expected, 1.0)


def log_match(num_tokens: int) -> float:
    """A match's length as estimates take it."""
    return log2(1.0 + num_tokens)


def log_odds(chance: float) -> float:
    return log(chance / (1.0 - chance))


@lru_cache(maxsize=1 << 12)
def _chance(odds: int) -> tuple[float, float]:
    """The chance for rounded log-odds, and how much these change per change of the chance."""
    unlikely = min(-odds / FINE, 99.0)  # there is no bound where guesses are never right
    chance = min(max(1.0 / (1.0 + exp(unlikely)), 0.02), 0.98)
    return chance, 1.0 / max(chance * (1.0 - chance), 0.05)


@lru_cache(maxsize=1 << 16)
def _gains(odds: int, further_odds: int, sizes: tuple[int, ...], most: int) -> tuple[float, ...]:
    """The gain for each number of guesses; those past `most` add nothing."""
    (first, _), (further, _) = _chance(odds), _chance(further_odds)
    return tuple([first * (1.0 - further ** min(size, most)) / (1.0 - further) for size in sizes])
