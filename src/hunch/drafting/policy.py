"""The policy: what to draft and how much, for the most expected tokens per second.

Expected tokens come from a running estimate of acceptance (`acceptance`), seconds from measured
steps (`costs`). Zero nodes is an ordinary answer. Steps run by the host and captured steps share
the rule and the estimate. Captured steps also choose which source drafts.

A *gain* is the number of tokens that a row is expected to get from its draft, beside the one that a
step always brings. *Expected tokens* include that one.

A note like (DROP_MARGIN=99: 0.989) says what a rule is worth: the mean of `tests/policy_table.py
DROP_MARGIN=99`, which switches the rule off, divided by the mean with the rule. Decision 026 lists
all of them.

Shape letters: R rows of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import inf, log, sqrt

import numpy as np

from hunch.drafting.acceptance import (
    OWN_TEXT,
    WITH_PHRASES,
    AcceptanceEstimate,
    host_estimate,
    log_match,
)
from hunch.drafting.base import DeviceDrafter
from hunch.drafting.costs import CostCurve, StepCosts
from hunch.drafting.network_rows import NetworkRows
from hunch.drafting.step_shapes import SURE_MATCH, DraftSource, StepKey, StepShape, StepShapes

# --- the choice -----------------------------------------------------------------------------------


def tokens_per_step(gains: Sequence[float]) -> float:
    """The expected tokens of a row in a step: a mean over its rows, from the gain of each.

    All rows wait for all nodes that a step checks. A row needs 1 / (1 + gain) steps for a token, so
    the mean is taken of these: their root mean square, in which slow rows count for more. The
    result is its inverse.
    """
    return sqrt(len(gains) / sum([(1.0 + gain) ** -2 for gain in gains]))


def best_rate(tokens: Sequence[float], seconds: Sequence[float], margin: float = 0.0) -> int:
    """The index of the best rate. Index 0 is plain decoding, which others must beat by `margin`."""
    best, most = 0, tokens[0] / seconds[0] * (1.0 + margin)
    for place in range(1, len(tokens)):
        rate = tokens[place] / seconds[place]
        if rate > most:
            best, most = place, rate
    return best


def best_count(chances: Sequence[float], cost: CostCurve, margin: float = 0.0) -> int:
    """How many of one row's nodes to check; `chances` says how likely each is, best first."""
    tokens = list(accumulate(chances, initial=1.0))
    return best_rate(tokens, [cost.seconds(1 + n) for n in range(len(tokens))], margin)


def share_nodes(
    chances: Sequence[Sequence[float]], limits: Sequence[int], cost: CostCurve, margin: float = 0.0
) -> list[int]:
    """How many of each row's nodes to check, for the most tokens per second of all rows.

    A row's chances are sorted, best first. So the best nodes of all rows are the first nodes of
    each.
    """
    num_rows = len(chances)
    if num_rows == 1:
        return [best_count(chances[0][: limits[0]], cost, margin)]
    ranked = sorted(
        (-chance, row)
        for row, (own, limit) in enumerate(zip(chances, limits, strict=True))
        for chance in own[:limit]
    )
    gains, tokens = [0.0] * num_rows, [1.0]
    for chance, row in ranked:
        gains[row] -= chance
        tokens.append(tokens_per_step(gains))
    seconds = [cost.seconds(num_rows + n) for n in range(len(tokens))]
    counts = [0] * num_rows
    for _, row in ranked[: best_rate(tokens, seconds, margin)]:
        counts[row] += 1
    return counts


# --- steps run by the host ------------------------------------------------------------------------

MIN_TIMED = 4  # drafts to time before their times count, as the first ones wait for memory
NETWORK_MARGIN = 0.05  # share by which a draft with the network must beat one without it


class HostPolicy:
    """Which rows a network on the host drafts for, and how many levels."""

    def __init__(
        self,
        cost: CostCurve,
        *,
        num_rows: int,
        max_nodes: int,
        num_levels: int,
        share: float,  # seconds of a level per second of a pass, until levels were timed
        is_adaptive: bool,  # False: all levels, for all rows whose lookup does not promise more
    ) -> None:
        self.cost, self.share, self.is_adaptive = cost, share, is_adaptive
        is_chain = max_nodes == num_levels
        # Sizes that may be drafted, as nodes and levels: chains of any length, or the whole tree.
        whole = [(max_nodes, num_levels)]
        self.sizes = [(n, n) for n in range(1, num_levels + 1)] if is_chain else whole
        self.estimate = host_estimate(num_rows, num_levels)
        self.level_cost = CostCurve()  # seconds of one level, by rows
        self._num_timed = 0

    def timed(self, num_rows: int, num_levels: int, seconds: float) -> None:
        """Drafting `num_levels` levels for `num_rows` rows took this long."""
        if self.cost.is_measured:
            self._num_timed += 1
            self.level_cost.record(num_rows, seconds / num_levels)

    def plan(
        self, ids: Sequence[int], limits: Sequence[int], others: Sequence[tuple[int, float]]
    ) -> tuple[list[int], int]:
        """The rows that the network drafts for, as places in `ids`, and how many levels.

        limits: most nodes of each row; 0: the network does not draft for it.
        others: what each row has without the network: its number of nodes, and its gain.
        """
        levels = tuple(level for _, level in self.sizes)
        places = [place for place, limit in enumerate(limits) if limit]
        each = self.estimate.gains([ids[place] for place in places], levels)
        gains = dict(zip(places, each, strict=True))
        num_nodes, without = sum(n for n, _ in others), [gain for _, gain in others]
        choices: list[tuple[list[int], int]] = [([], 0)]
        tokens = [tokens_per_step(without)]
        seconds = [self.cost.seconds(len(ids) + num_nodes)]
        for at, (size, num_levels) in enumerate(self.sizes):
            asked, nodes, gained = [], num_nodes, without.copy()
            for place, gain_of in gains.items():
                own = min(size, limits[place])
                gain = gain_of[min(at, own - 1)]
                if gain > without[place]:
                    asked.append(place)
                    nodes += own - others[place][0]
                    gained[place] = gain
            if asked:
                choices.append((asked, num_levels))
                tokens.append(tokens_per_step(gained))
                drafting = num_levels * self._level_seconds(len(asked))
                seconds.append(self.cost.seconds(len(ids) + nodes) + drafting)
        if not self.is_adaptive:
            return choices[-1]
        return choices[best_rate(tokens, seconds, NETWORK_MARGIN)]

    def _level_seconds(self, num_rows: int) -> float:
        if self._num_timed >= MIN_TIMED:
            return self.level_cost.seconds(num_rows)
        return self.share * self.cost.seconds(num_rows)


# --- captured steps -------------------------------------------------------------------------------

RATE = 0.04  # learning rate of the estimates
LOG_SURE_MATCH = log_match(SURE_MATCH)
# Groups of sources are compared by the logarithms of their expected rates, averaged over recent
# steps; LEAD_RATE is the weight of the newest. Switching costs time, so another group must lead by
# SWITCH_MARGIN. A head cannot catch up, so doing without it must lead by DROP_MARGIN before it is
# dropped. New requests then do without it for DROP_STEPS steps.
# (LEAD_RATE=1: 0.988; DROP_MARGIN=99: 0.989)
LEAD_RATE, SWITCH_MARGIN, DROP_MARGIN, DROP_STEPS = 0.1, 0.02, 0.15, 400
# The time that lookups have lost, and that networks have lost, is counted in plain steps. For each
# lost step they must promise PER_STEP_LOST more. A step without them forgets REPAID of the loss.
# Time that they saved is a negative loss, of MOST_GAINED steps at most.
# (PER_STEP_LOST=0: 1.000, but 0.95 of plain decoding where nothing can be guessed, and not 0.98)
PER_STEP_LOST, REPAID, MOST_GAINED = 0.2, 0.005, 16.0


class ShapeChoice:
    """Chooses the shapes of captured steps: the nodes to check, and the source that drafts next.

    All rows of a captured step check the same number of nodes, and the same source drafts for the
    next step.
    """

    def __init__(
        self, drafter: DeviceDrafter, shapes: StepShapes, rows: NetworkRows, costs: StepCosts
    ) -> None:
        self.drafter, self.shapes, self.rows, self.costs = drafter, shapes, rows, costs
        num_rows, networks = len(rows.is_current), shapes.network_sources
        beside = [drafter.num_beside(source, size) for size, source in shapes.all]
        levels: dict[int, int] = {s: drafter.levels(s, shapes.largest(s)) for s in networks}
        chances, by_match = WITH_PHRASES if drafter.has_table else OWN_TEXT
        most = shapes.max_looked_up or max(beside) or 1
        self.lookup_estimate = AcceptanceEstimate(
            num_rows, {DraftSource.LOOKUP: chances}, rate=RATE, num_levels=most, by_match=by_match
        )
        self.network_estimate = AcceptanceEstimate(
            num_rows, {s: drafter.priors[s] for s in networks}, rate=RATE, num_levels=levels
        )
        self.lost = {False: 0.0, True: 0.0}  # plain steps lost: by lookups, by networks
        # A head's chains and lookups are one group: changing between them costs nothing.
        tree_sources = {one for one in networks if drafter.depth(one)}
        sources = {shape.source for shape in shapes.all}
        apart = {s for s in sources if s < 0 or rows.can_catch_up or s in tree_sources}
        self.groups = {one: one if one in apart else DraftSource.LOOKUP for one in sources}
        # Means of the logarithms of recent expected rates, by power of two of rows and group.
        self._recent: dict[tuple[int, int], float] = {}

    def best(self, row_R: np.ndarray, num_rows: int, extras: int = 0) -> StepShape:
        """The shape with the most expected tokens per second, of the group that has been best.

        num_rows: how many rows the captured step has room for.
        """
        best, rates = dict[int, StepShape](), dict[int, float]()  # by group of sources
        keys, seconds_between = self.shapes.keys(num_rows, extras), self.costs.seconds_between
        for shape, tokens in self._tokens(row_R, num_rows).items():
            rate = tokens / seconds_between(keys[shape], len(row_R))
            group = self.groups[shape.source]
            if rate > rates.get(group, 0.0):
                best[group], rates[group] = shape, rate
        return best[self.choose_group(row_R, rates)]

    def _tokens(self, row_R: np.ndarray, num_rows: int) -> dict[StepShape, float]:
        """Expected tokens of a row, by shape."""
        ids, rows = row_R.tolist(), self.rows
        tokens = dict.fromkeys(self.shapes.at(num_rows), 1.0 + self.drafter.margin)
        can_draft = rows.has_network and rows.can_draft(row_R)
        named = {rows.by_network[row] for row in ids} if rows.has_network else {None}
        no_network = not can_draft or named == {False}
        no_lookup = can_draft and named == {True}
        for source, (sizes, shapes) in self.shapes.by_source(num_rows).items():
            is_ruled_out = no_network if source > 0 else no_lookup
            if is_ruled_out:
                for shape in shapes:
                    del tokens[shape]
                continue
            gains = zip(*self.gains(ids, sizes, source), strict=True)
            for shape, some in zip(shapes, gains, strict=True):
                tokens[shape] = tokens_per_step(some)
        if self.costs.is_measured and max(self.lost.values()) > 0.0:
            for shape in tokens:
                if shape.num_nodes or self._uses_network(shape):
                    lost = max(self.lost[self._uses_network(shape)], 0.0)
                    tokens[shape] /= 1.0 + PER_STEP_LOST * lost
        # A drafter that is not adaptive has no plain steps, so all shapes may be ruled out.
        return tokens or {self.shapes.at(num_rows)[0]: 1.0}

    def _uses_network(self, shape: StepShape) -> bool:
        """Whether the network does anything in such steps; a head does so until it is dropped."""
        return shape.source >= (0 if self.rows.can_drop else 1)

    def count_lost(self, key: StepKey, num_rows: int, num_tokens: int) -> None:
        """Count the time that a step of `num_rows` rows lost or saved, with the tokens it brought.

        What did nothing in the step, lookups or networks, is forgiven a part of its loss.
        """
        plain = StepKey(key.num_rows, self.shapes.all[0], key.extras)
        uses_network = self._uses_network(key.shape)
        between = self.costs.seconds_between
        ratio = between(key, num_rows) / between(plain, num_rows)
        lost = ratio - num_tokens / num_rows
        for of_network, before in self.lost.items():
            if of_network == uses_network and (of_network or key.shape.num_nodes):
                self.lost[of_network] = max(before + lost, -MOST_GAINED)
            elif before > 0.0:
                self.lost[of_network] = max(before - REPAID, 0.0)

    def gains(self, ids: list[int], sizes: tuple[int, ...], source: int) -> list[list[float]]:
        """The gain of each row, for each number of nodes in `sizes`."""
        if source <= 0:
            return self.lookup_estimate.gains(ids, sizes)
        is_merged, match = source >= DraftSource.MERGED, self.lookup_estimate.match
        levels = tuple([self.drafter.levels(source, size) for size in sizes])
        gains = self.network_estimate.gains(ids, levels, source)
        for place in np.flatnonzero(~self.rows.fits_network[ids]).tolist():
            gains[place] = [0.0] * len(sizes)
        num_looked_up = sizes
        if is_merged:
            num_looked_up = tuple([self.drafter.num_beside(source, size) for size in sizes])
        for place, row in enumerate(ids if self.shapes.has_lookup else ()):
            # The lookup's guesses count first, and the network's if the first of them is wrong.
            if is_merged or match[row] >= LOG_SURE_MATCH:
                ((first, *found),) = self.lookup_estimate.gains([row], (1, *num_looked_up))
                pairs = zip(found, gains[place], strict=True)
                gains[place] = [one + (1.0 - first) * own for one, own in pairs]
        return gains

    def choose_group(self, row_R: np.ndarray, rates: Mapping[int, float]) -> int:
        """Choose the group of sources with the best mean rate of recent steps, and note the choice.

        Other groups than that of the waiting drafts must lead by a margin.
        rates: the best expected tokens per second of each group, for the next step.
        """
        rows, dropped = self.rows, DraftSource.HEAD_DROPPED
        if len(rates) == 1:
            return next(iter(rates))
        if rows.can_drop and rows.dropped_steps:
            rows.dropped_steps -= 1
            return dropped
        if rows.can_drop and not rows.can_draft(row_R):  # dropped for some of them, or all
            return DraftSource.LOOKUP if rows.is_current[row_R].any() else dropped
        waiting, best, most = self.groups.get(int(rows.waiting_source[row_R[0]])), 0, -inf
        size, weight = (len(row_R) - 1).bit_length(), 1.0 - (1.0 - LEAD_RATE) ** len(row_R)
        for group, rate in rates.items():
            now = log(rate)
            mean = self._recent.get((size, group), now)
            score = self._recent[size, group] = mean + weight * (now - mean)
            score += SWITCH_MARGIN * (group == waiting) - DROP_MARGIN * (group == dropped)
            if score > most:
                best, most = group, score
        if best == dropped:
            rows.dropped_steps = DROP_STEPS
            self._recent.clear()
        return best
