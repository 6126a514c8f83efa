"""The policy: what to draft and how much, for the most expected tokens per second.

Expected tokens come from a running estimate of acceptance, seconds from measured steps (`costs`).
Zero nodes is an ordinary answer. Steps run by the host and captured steps share these functions.

A note like (DROP=99: 0.989) says what a rule is worth: the mean of `tests/policy_table.py DROP=99`,
which switches the rule off, divided by the mean with the rule. Decision 026 lists all of them.

Shape letters: R rows of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import exp, inf, log, log2

import numpy as np

from hunch.drafting.base import DeviceDrafter
from hunch.drafting.costs import CostCurve
from hunch.drafting.step_shapes import DraftSource, RowLengths, StepShape, StepShapes

# --- the choice -----------------------------------------------------------------------------------

# For requests that came together, a step's gain is the smallest gain of its rows, plus this share
# of what their mean is above it. In captured steps at most MAX_MORE tokens above it count.
TOGETHER, MAX_MORE = 0.35, 1.0


def gain_of_rows(gains: Sequence[float], weight: float, most: float = inf) -> float:
    """The gain of a step of requests that came together, from the tokens that each row gains.

    All rows of a step wait for all nodes that it checks, and such requests are done when the last
    of them is. So the smallest gain counts most. With a weight of 1 the mean counts alone, as in
    steps run by the host while requests keep coming: there each row has nodes of its own.
    """
    least = min(gains)
    return least + weight * min(sum(gains) / len(gains) - least, most)


def flowing_gain(gains: Sequence[float]) -> float:
    """The gain of a captured step while requests keep coming, from what each of its rows gains.

    A row that ends early makes room for the next request. So what counts is how many steps a token
    takes on average, which the harmonic mean of the rows' tokens per step says.
    """
    return len(gains) / sum([1.0 / (1.0 + gain) for gain in gains]) - 1.0


def best_rate(tokens: Sequence[float], seconds: Sequence[float], margin: float = 0.0) -> int:
    """The index of the best rate. Index 0 is plain decoding, which others must beat by `margin`."""
    best, most = 0, tokens[0] / seconds[0] * (1.0 + margin)
    for place in range(1, len(tokens)):
        rate = tokens[place] / seconds[place]
        if rate > most:
            best, most = place, rate
    return best


def best_count(chances: Sequence[float], cost: CostCurve, margin: float = 0.0) -> int:
    """How many of one row's nodes to check; `chances` are of its nodes, best first."""
    tokens = list(accumulate(chances, initial=1.0))
    return best_rate(tokens, [cost.seconds(1 + n) for n in range(len(tokens))], margin)


def share_nodes(
    chances: Sequence[Sequence[float]],
    limits: Sequence[int],
    cost: CostCurve,
    margin: float = 0.0,
    *,
    is_flowing: bool = False,
) -> list[int]:
    """How many of each row's nodes to check, for the most tokens per second of all rows.

    A row's chances are sorted, best first. So taking the best nodes of all rows takes a prefix of
    each row's nodes.
    """
    num_rows = len(chances)
    if num_rows == 1:
        return [best_count(chances[0][: limits[0]], cost, margin)]
    ranked = sorted(
        (-chance, row)
        for row, (own, limit) in enumerate(zip(chances, limits, strict=True))
        for chance in own[:limit]
    )
    weight = TOGETHER if cost.is_measured and not is_flowing else 1.0
    gains, tokens = [0.0] * num_rows, [1.0]
    for chance, row in ranked:
        gains[row] -= chance
        tokens.append(1.0 + gain_of_rows(gains, weight))
    seconds = [cost.seconds(num_rows + n) for n in range(len(tokens))]
    counts = [0] * num_rows
    for _, row in ranked[: best_rate(tokens, seconds, margin)]:
        counts[row] += 1
    return counts


# --- how many guesses will be accepted ------------------------------------------------------------

COMMON_RATE = 0.003  # learning rate of the terms that all requests share, after many guesses
PRIOR_GUESSES = 12.0  # the priors count as much as this many guesses, so the first teach more
CALIBRATION_RATE, MAX_CALIBRATION = 0.02, 2.0  # of the factor on expected tokens, by source
FADE = 0.003  # share that terms lose in a step without guesses, so that a source is tried again
FINE = 8  # log-odds are rounded to multiples of 1/FINE, so that chances can be cached
NEW_MATCH = 0.7  # log2(1 + length) of the match that is assumed for a new row
# Two pairs for lookups: the chance of the first guess, and of a further one after a right one, both
# without a match; and what each doubling of the match adds to the log-odds of both. Over 1,200
# answers the first guess was right 10% of the time without a match, 24% after a match of one token,
# 53% after three, 95% after sixteen.
OWN_TEXT, WITH_PHRASES = ((0.1, 0.6), (1.0, 0.5)), ((0.25, 0.45), (0.75, 0.65))
# The same chances of a network's guesses, set high so that it is tried. Those of MERGED leave out
# the lookup's guesses, which have their own estimate.
NETWORK_PRIORS = {
    DraftSource.CHAIN: (0.6, 0.65), DraftSource.TREE: (0.7, 0.7), DraftSource.MERGED: (0.75, 0.7),
}  # fmt: skip


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
        # Matches are stored as log2(1 + length). `match` is behind the row's newest guesses,
        # `before` behind the guesses that will be compared next.
        self.match, self.before = [NEW_MATCH] * num_rows, [NEW_MATCH] * num_rows
        self.common_first = self.common_further = 0.0
        self.num_learned = 0  # guesses that the shared terms have learned from
        self.calibration = dict.fromkeys(priors, 1.0)  # factor on expected tokens, by source

    def start(self, rows: Sequence[int]) -> None:
        """New requests have these rows."""
        for row in rows:
            self.first[row] = self.further[row] = 0.0
        self.clear_match(rows)

    def clear_match(self, rows: Sequence[int]) -> None:
        """Nothing is known about these rows' next guesses."""
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
        weight: float = 1.0,  # of the row, for the shared terms: 1 / number of rows in the step
        num_levels: int | None = None,  # levels that the source drafted, if not the usual number
    ) -> None:
        """Learn from one row's guesses."""
        if not compared:
            return
        levels = self.num_levels[source] if num_levels is None else num_levels
        odds, further_odds = self.odds(row, source, self.before[row])
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

    def calibrate(self, source: int, expected: float, accepted: float, weight: float) -> None:
        """Compare the tokens expected of this source's guesses with those that were accepted."""
        error = weight * (accepted - expected) / max(expected, 1.0)
        factor = self.calibration[source] * exp(CALIBRATION_RATE * error)
        self.calibration[source] = min(max(factor, 1.0 / MAX_CALIBRATION), MAX_CALIBRATION)

    def fade(self, rows: Sequence[int]) -> None:
        """Forget a little after a step without guesses, so that an unused source is tried again."""
        kept = 1.0 - FADE
        for row in rows:
            self.first[row] *= kept
            self.further[row] *= kept
        self.common_first *= kept
        self.common_further *= kept

    def odds(self, row: int, source: int, match: float) -> tuple[int, int]:
        """Log-odds (times FINE) of a row's first guess after this match, and of a further one."""
        (first, further), (by_first, by_further) = self.priors[source], self.by_match
        first += by_first * match + self.common_first + self.first[row]
        further += by_further * match + self.common_further + self.further[row]
        return round(FINE * first), round(FINE * further)

    def gains(
        self, rows: Sequence[int], sizes: tuple[int, ...], source: int = DraftSource.LOOKUP
    ) -> list[tuple[float, ...]]:
        """Expected tokens of each row, for each number of guesses in `sizes`."""
        most, factor = self.num_levels[source], self.calibration[source]
        each = [_gains(*self.odds(row, source, self.match[row]), sizes, most) for row in rows]
        return [
            tuple([min(factor * gain, size) for gain, size in zip(some, sizes, strict=True)])
            for some in each
        ]

    def gain(self, row: int, source: int, size: int) -> float:
        """Expected tokens of the `size` guesses that will be compared next."""
        odds, most = self.odds(row, source, self.before[row]), self.num_levels[source]
        return min(self.calibration[source] * _gains(*odds, (size,), most)[0], size)


def log_odds(chance: float) -> float:
    return log(chance / (1.0 - chance))


@lru_cache(maxsize=1 << 12)
def _chance(odds: int) -> tuple[float, float]:
    """The chance for rounded log-odds, and how much these change per change of the chance."""
    chance = min(max(1.0 / (1.0 + exp(-odds / FINE)), 0.02), 0.98)
    return chance, 1.0 / max(chance * (1.0 - chance), 0.05)


@lru_cache(maxsize=1 << 16)
def _gains(odds: int, further_odds: int, sizes: tuple[int, ...], most: int) -> tuple[float, ...]:
    """Expected tokens for each number of guesses; those past `most` add none."""
    (first, _), (further, _) = _chance(odds), _chance(further_odds)
    return tuple([first * (1.0 - further ** min(size, most)) / (1.0 - further) for size in sizes])


# --- who drafts in captured steps -----------------------------------------------------------------

# Groups of sources are compared by the logarithms of their expected rates, averaged over recent
# steps; LEAD_RATE is the weight of the newest. Switching costs time, so another group must lead by
# CHANGE. A head cannot catch up, so doing without it must lead by DROP before it is dropped. New
# requests then do without it for DROPPED steps. (LEAD_RATE=1: 0.988; DROP=99: 0.989)
LEAD_RATE, CHANGE, DROP, DROPPED = 0.1, 0.02, 0.12, 400
MAX_CATCH_UP = 32  # missed tokens that a draft model may read per token that its row can still get


class SourceChoice:
    """Chooses the source that drafts in each captured step; switching sources costs time.

    A network can only draft for rows of which it has seen every token. A draft model does not see
    the tokens of steps without it; before it drafts again, a pass of it over the missed tokens is
    launched between two captured steps. A head reads the target's states, so it cannot catch up:
    it follows every step until it is dropped, and then does not draft again for the running rows.
    A waiting tree can only be checked by a step for trees; others drop it.
    """

    def __init__(self, drafter: DeviceDrafter, shapes: StepShapes, rows: RowLengths) -> None:
        num_rows, sources = len(rows.known), {shape.source for shape in shapes.all}
        self.rows = rows
        # The network is a draft model.
        self.can_catch_up = bool(shapes.network_sources) and drafter.network is not None
        self.can_drop = DraftSource.LOOKUP_ALONE in sources  # the network is a head beside lookups
        self.is_current = np.zeros(num_rows, dtype=np.bool_)  # the network has seen all of the row
        # The source of each row's waiting draft, as of the last step launched.
        self.waiting = np.full(num_rows, DraftSource.NOBODY)
        self.dropped_steps = 0  # steps still to come without the dropped head
        self._trees = [one for one in shapes.network_sources if drafter.depth(one)]
        # Within a group, switching costs nothing: a head's chains and lookups are one group.
        alone = {one for one in sources if one < 0 or self.can_catch_up or one in self._trees}
        self.groups = {one: one if one in alone else DraftSource.LOOKUP for one in sources}
        # Means of the logarithms of recent expected rates, by power of two of rows and group.
        self._recent: dict[tuple[int, int], float] = {}

    def start(self, ids: list[int], *, is_first: bool) -> None:
        """Requests came into these rows; is_first: no others are running."""
        self.is_current[ids] = self.can_drop and not self.dropped_steps
        self.waiting[ids] = DraftSource.NOBODY
        if is_first:
            self._recent.clear()

    def is_ready(self, shape: StepShape, row_R: np.ndarray) -> bool:
        """Whether a step of these rows can have this shape without catching up first."""
        return not (self.can_catch_up and shape.source > 0) or bool(self.is_current[row_R].all())

    def is_dropped(self, ids: list[int]) -> np.ndarray:
        """For each row, whether the head was dropped."""
        return ~self.is_current[ids] & self.can_drop

    def note_launch(self, shape: StepShape, row_R: np.ndarray) -> StepShape:
        """Note that a step of this shape is launched next; returns the shape that it can have.

        If the rows' waiting trees cannot be checked by such a step, it checks no nodes.
        """
        source, is_tree = shape.source, shape.source in self._trees
        if self._trees and not is_tree and np.isin(self.waiting[row_R], self._trees).any():
            shape = StepShape(0, source)
        self.waiting[row_R] = source
        if source < 0 or (self.can_catch_up and not source):
            self.is_current[row_R] = False  # the network misses its tokens
        return shape

    def choose(self, row_R: np.ndarray, rates: Mapping[int, float]) -> int:
        """The group with the best mean rate of recent steps, less the price of switching to it.

        rates: the best expected tokens per second of each group, for the next step.
        """
        if len(rates) == 1:
            return next(iter(rates))
        is_current_R = self.is_current[row_R]
        is_current = bool(is_current_R.all())
        if self.dropped_steps:
            self.dropped_steps -= 1
            return DraftSource.LOOKUP_ALONE
        if self.can_drop and not is_current:  # the head still follows some of the rows, or none
            return DraftSource.LOOKUP if is_current_R.any() else DraftSource.LOOKUP_ALONE
        can_use = is_current or not self.can_catch_up or self._can_catch_up_on(row_R)
        waiting, best, most = self.groups.get(int(self.waiting[row_R[0]])), 0, -inf
        size, weight = (len(row_R) - 1).bit_length(), 1.0 - (1.0 - LEAD_RATE) ** len(row_R)
        for group, rate in rates.items():
            now = log(rate)
            mean = self._recent.get((size, group), now)
            score = self._recent[size, group] = mean + weight * (now - mean)
            score += CHANGE * (group == waiting) - DROP * (group == DraftSource.LOOKUP_ALONE)
            score -= CHANGE * (self.can_catch_up and (group > 0) != is_current)
            if score > most and (can_use or group <= 0):
                best, most = group, score
        if best == DraftSource.LOOKUP_ALONE:
            self.dropped_steps = DROPPED
            self._recent.clear()
        return best

    def _can_catch_up_on(self, row_R: np.ndarray) -> bool:
        """Whether these rows can still get enough tokens for a draft model to catch up on them."""
        rows = self.rows
        missing = (rows.known[row_R] - rows.computed[-1, row_R]).sum()
        to_come = (rows.end[row_R] - rows.known[row_R]).sum()
        return bool(missing <= MAX_CATCH_UP * to_come)
