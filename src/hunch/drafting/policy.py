"""The choice of what to draft: the most expected tokens per second, zero nodes among the answers.

Tokens come from an estimate (`acceptance`), seconds from what steps took (`costs`). All steps
choose by the functions at the top. Below them is how steps that the host runs share nodes among
rows, and the source of captured steps, which is who drafts in them: lookups or a network, chains
or trees. `captured_policy` puts estimates and seconds of captured steps together.

`captured_policy` also says what comments such as (LEAD_RATE=1: a draft model 0.97) mean. Shape
letters: R rows of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate
from math import inf, log
from typing import Any, NamedTuple, Protocol

import numpy as np

from hunch.draft import Rows
from hunch.drafting.base import DeviceDrafter
from hunch.drafting.costs import CostCurve
from hunch.drafting.step_shapes import DraftSource, StepShape, StepShapes

# --- the choice -----------------------------------------------------------------------------------


def gain_of_rows(gains: Sequence[float], weight: float, most: float = inf) -> float:
    """The gain that a step counts for whose rows gain these tokens.

    All rows of a step wait for what each of them checks, and requests that came together are done
    when the last of them is: so the row that gains least decides. While requests keep coming, a row
    that ends early makes room for the next request, and the mean counts for more.

    weight: how much the mean counts beyond the least; most: tokens of that which count.
    """
    least = min(gains)
    return least + weight * min(sum(gains) / len(gains) - least, most)


def best_rate(tokens: Sequence[float], seconds: Sequence[float], margin: float = 0.0) -> int:
    """The place of the best rate; the first is plain decoding, which others must beat by margin."""
    best, most = 0, tokens[0] / seconds[0] * (1.0 + margin)
    for place in range(1, len(tokens)):
        rate = tokens[place] / seconds[place]
        if rate > most:
            best, most = place, rate
    return best


# --- steps run by the host ------------------------------------------------------------------------

# How much the mean gain counts where each row has its own number of nodes. Replayed on answers of
# three models: eight requests that came together are 5% slower with the mean alone and at most 1%
# with 0.35; with 0.2 four of them gain half as much. While requests keep coming, the mean alone
# counts: eight have 1.29 times plain decoding's speed so, and 1.20 with 0.5.
OF_OWN_NODES = 0.35


def best_count(
    chances: Sequence[float], cost: CostCurve, num_rows: int = 1, margin: float = 0.0
) -> int:
    """How many of the nodes to check, best first; each of `num_rows` rows gets a token anyway."""
    tokens = list(accumulate(chances, initial=float(num_rows)))
    return best_rate(tokens, [cost.seconds(num_rows + n) for n in range(len(tokens))], margin)


def share_nodes(
    chances: Sequence[Sequence[float]],
    limits: Sequence[int],
    cost: CostCurve,
    margin: float = 0.0,
    *,
    is_flowing: bool = False,
) -> list[int]:
    """How many of each row's nodes to check, for the most tokens per second of all rows.

    The chances of a row's nodes fall, so the best nodes of all rows are the first ones of each.
    """
    num_rows = len(chances)
    if num_rows == 1:
        return [best_count(chances[0][: limits[0]], cost, 1, margin)]
    ranked = sorted(
        (-chance, row)
        for row, (own, limit) in enumerate(zip(chances, limits, strict=True))
        for chance in own[:limit]
    )
    counts = [0] * num_rows
    best = best_count([-chance for chance, _ in ranked], cost, num_rows, margin)
    # If the mean of the rows gains something, the row that gains least may still decide otherwise.
    if best and cost.is_measured and not is_flowing:
        gains, tokens = [0.0] * num_rows, [1.0]
        for chance, row in ranked:
            gains[row] -= chance
            tokens.append(1.0 + gain_of_rows(gains, OF_OWN_NODES))
        seconds = [cost.seconds(num_rows + n) for n in range(len(tokens))]
        best = best_rate(tokens, seconds, margin)
    for _, row in ranked[:best]:
        counts[row] += 1
    return counts


# --- the source of captured steps -----------------------------------------------------------------

# Sources are compared by the logarithm of the ratio of their rates, averaged over recent steps with
# LEAD_RATE as the weight of the newest (LEAD_RATE=1: a draft model 0.97). Another kind is taken if
# it leads by CHANGE. A draft model is left if the others lead by LEAVE, as it has to catch up
# later; a head is dropped if they lead by DROP, as that cannot be undone for the rows that are
# running (DROP=99, never: a head 0.93).
LEAD_RATE, CHANGE, LEAVE, DROP = 0.1, 0.02, 0.05, 0.12
MAX_CATCH_UP = 32  # tokens that it may read for each one that its row can still get
# Steps without a head that was dropped: the first time, doubled each time up to the second.
FIRST_DROPPED, MAX_DROPPED = 100, 1600

# A source that lost time must promise PER_STEP_LOST more for each step lost (PER_STEP_LOST=0: a
# head 0.98, at worst 0.92). REPAID: the loss that is forgotten in a step without the source;
# MOST_GAINED: the largest gain that is remembered.
PER_STEP_LOST, REPAID, MOST_GAINED = 0.2, 0.005, 16.0


class RowLengths(Protocol):
    """What the policy needs of the host's rows."""

    known: np.ndarray
    end: np.ndarray  # known length at which max_tokens is reached
    computed: np.ndarray  # by KV group; the drafter's is the last
    requests: list[Any]

    def view(self, rows: list[int]) -> Rows: ...


class Drafted(NamedTuple):
    """Who made a row's waiting draft."""

    source: int = 0
    matched: int = 0  # tokens of the match behind it
    num_nodes: int = 0  # nodes that the step checked in which it was drafted


class Losses:
    """The plain steps that lookups and a network lost, by the rows of a step."""

    def __init__(self) -> None:
        self._lost: dict[tuple[int, bool], float] = {}

    def add(self, num_rows: int, is_network: bool | None, lost: float = 0.0) -> None:
        """A step of a network or a lookup (None: a plain one) lost so many; below 0: it gained."""
        for key in ((num_rows, False), (num_rows, True)):
            before = self._lost.get(key, 0.0)
            if key[1] == is_network:
                self._lost[key] = max(before + lost, -MOST_GAINED)
            elif before > 0.0:
                self._lost[key] = max(before - REPAID, 0.0)

    def price(self, num_rows: int, is_network: bool) -> float:
        """How many times as much the source must promise."""
        return 1.0 + PER_STEP_LOST * max(self._lost.get((num_rows, is_network), 0.0), 0.0)


class SourceChoice:
    """Chooses the source of each step, and knows which rows the network has seen all of.

    A network can only draft for rows of which it has seen every token. A draft model does not see
    the tokens of steps without it; before it drafts again, the host runs it over what it missed. A
    head that reads the target's states follows every step until it is dropped. It cannot catch up,
    so it does not draft again for the rows that were running then. A waiting tree can only be
    checked as one. So changing the source costs time.
    """

    def __init__(self, drafter: DeviceDrafter | None, shapes: StepShapes, rows: RowLengths) -> None:
        num_rows, sources = len(rows.known), shapes.network_sources
        self.drafter, self.rows, self.losses = drafter, rows, Losses()
        # A draft model: it misses the tokens of steps without it, and can catch up.
        self.can_catch_up = drafter is not None and bool(sources) and drafter.network is not None
        # A head: it follows every step until it is dropped.
        self.can_drop = DraftSource.LOOKUP_ALONE in {shape.source for shape in shapes.all}
        self.is_current = np.zeros(num_rows, dtype=np.bool_)  # the network has seen all of the row
        # Of each row's waiting draft, as of the last step launched.
        self.waiting = np.full(num_rows, DraftSource.NOBODY)
        self.dropped_steps = 0  # that are still to come without a dropped head
        self._next_dropped_steps = FIRST_DROPPED
        self._trees = {one for one in sources if drafter and drafter.depth(one) > 0}
        # Leads by rows (as a logarithm) and by the first of the sources that they are of.
        self._leads: dict[tuple[int, int], float] = {}

    def start(self, ids: list[int], *, is_first: bool) -> None:
        """Requests came into these rows; is_first: no others are running."""
        self.is_current[ids] = self.can_drop and not self.dropped_steps
        self.waiting[ids] = DraftSource.NOBODY
        if is_first:
            self._leads.clear()

    def is_network(self, source: int) -> bool:
        """Whether the network drafts in steps of this source or follows them."""
        return source >= (0 if self.can_drop else 1)

    def is_ready(self, shape: StepShape, row_R: np.ndarray) -> bool:
        """Whether a step of these rows can have this shape without catching up first."""
        return not (self.can_catch_up and shape.source > 0) or bool(self.is_current[row_R].all())

    def is_dropped(self, ids: list[int]) -> np.ndarray:
        """For which rows a head was dropped."""
        return ~self.is_current[ids] & self.can_drop

    def note_launch(self, shape: StepShape, row_R: np.ndarray) -> StepShape:
        """Note that such a step comes next; returns its shape, without nodes if it drops trees."""
        source = shape.source
        if source not in self._trees and self._has_waiting(row_R, self._trees):
            shape = StepShape(0, source)
        self.waiting[row_R] = source
        if source < 0 or (self.can_catch_up and not source):
            self.is_current[row_R] = False  # the network misses its tokens
        return shape

    def _has_waiting(self, row_R: np.ndarray, sources: Collection[int]) -> bool:
        return bool(sources) and bool(np.isin(self.waiting[row_R], list(sources)).any())

    def choose(self, row_R: np.ndarray, rates: Mapping[int, float]) -> int:
        """The source with the best rate, of those that it pays to change to or to stay with.

        rates: the best expected tokens per second of each source.
        """
        sources = set(rates)
        with_network = {source for source in sources if self.is_network(source)}
        if self.can_drop:
            is_current_R = self.is_current[row_R]
            if self.dropped_steps:
                self.dropped_steps -= 1
                return DraftSource.LOOKUP_ALONE
            if not is_current_R.all():  # it goes on following some of the rows
                return DraftSource.LOOKUP if is_current_R.any() else DraftSource.LOOKUP_ALONE
            if self._lead(row_R, rates, with_network) < -DROP:
                self.dropped_steps = self._next_dropped_steps
                self._next_dropped_steps = min(2 * self._next_dropped_steps, MAX_DROPPED)
                self._leads.clear()
                return DraftSource.LOOKUP_ALONE
            sources = with_network
        elif self.can_catch_up and with_network and with_network != sources:
            is_current = self.is_current[row_R].all()
            is_used = self._lead(row_R, rates, with_network) > (-LEAVE if is_current else CHANGE)
            is_used = is_used and (is_current or self._can_catch_up_on(row_R))
            sources = with_network if is_used else sources - with_network
        for some_sources in (self._trees, {DraftSource.MERGED}):
            some = sources & some_sources
            if some and some != sources:
                is_waiting = self._has_waiting(row_R, some)
                rates = {source: rates[source] for source in sources}
                is_used = self._lead(row_R, rates, some) > (-CHANGE if is_waiting else CHANGE)
                sources = some if is_used else sources - some
        return max(sources, key=lambda source: rates[source])

    def _lead(self, row_R: np.ndarray, rates: Mapping[int, float], some: Collection[int]) -> float:
        """How far the best of some sources leads the best of the others, of late."""
        best = [max(rate for source, rate in rates.items() if (source in some) == which)
                for which in (True, False)]  # fmt: skip
        now, key = log(best[0] / best[1]), ((len(row_R) - 1).bit_length(), min(some))
        lead = self._leads.get(key, now)
        lead += (1.0 - (1.0 - LEAD_RATE) ** len(row_R)) * (now - lead)
        self._leads[key] = lead
        return lead

    def _can_catch_up_on(self, row_R: np.ndarray) -> bool:
        """Whether what these rows can still get is worth a draft model's catching up on them."""
        assert self.drafter is not None
        rows = self.rows
        missing = (rows.known[row_R] - rows.computed[-1, row_R]).sum()
        to_come = (rows.end[row_R] - rows.known[row_R]).sum()
        is_short = self.drafter.can_follow(rows.view(row_R.tolist()))
        return is_short and bool(missing <= MAX_CATCH_UP * to_come)
