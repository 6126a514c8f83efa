"""Whether captured steps use the drafter's network: with it or without it, whichever pays more.

A network can only draft for rows of which it has seen every token. A draft model does not see the
tokens of steps without it; before it drafts again, the host runs it over what it missed. A head
that reads the target's states follows every step until it is dropped. It cannot catch up, so it
does not draft again for the rows that were running then.

Shape letters: R rows of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any, Protocol

import numpy as np

from hunch.draft import Rows
from hunch.drafting.base import DeviceDrafter
from hunch.drafting.step_shapes import DraftSource, StepShape, StepShapes
from hunch.drafting.trials import Trials

CHANGE_STEPS = 2.0  # that starting to use a network costs: the host runs one, and a draft is lost
# Leads (see `Leads`) that change what is used. MIN_LEAD: to or from a draft model, and to trees.
# MIN_LEAD_TREES: from trees, as the tree that waits is lost. The next two drop a head, one that
# lost time before and any other: dropping cannot be undone for the rows that are running.
MIN_LEAD, MIN_LEAD_TREES, MIN_LEAD_SLOW_HEAD, MIN_LEAD_HEAD = 0.01, 0.03, 0.04, 0.12
MIN_LEAD_MERGED = 0.02  # to or from merged trees: of one that waits the lookup's guesses are lost
LEAD_RATE = 0.1  # weight of the newest step in a lead
MAX_CATCH_UP = 32  # tokens that a network may read for each one that its row can still get
# Steps without a head that was dropped: the first time, doubled each time up to the second.
FIRST_DROPPED, MAX_DROPPED = 100, 1600


class RowLengths(Protocol):
    """What the policy needs of the host's rows."""

    known: np.ndarray
    end: np.ndarray  # known length at which max_tokens is reached
    computed: np.ndarray  # by KV group; the drafter's is the last
    requests: list[Any]

    def view(self, rows: list[int]) -> Rows: ...


Choices = tuple[list[StepShape], list[float], list[float]]  # shapes, their tokens and seconds


class Leads:
    """How far the best of some shapes leads the best of the others, by the rows of a step.

    A lead is the logarithm of the ratio of their expected rates, averaged over recent steps: the
    best shape changes from step to step, and changing the kind of step costs time.
    """

    def __init__(self) -> None:
        self._leads: dict[int, float] = {}

    def of(
        self,
        num_rows: int,
        is_leader: Sequence[bool],  # which shapes the lead is of
        tokens: Sequence[float],
        seconds: Sequence[float],
    ) -> float:
        best = [1e-9, 1e-9]
        for which, gain, took in zip(is_leader, tokens, seconds, strict=True):
            best[which] = max(best[which], gain / took)
        now, rate = log(best[1] / best[0]), 1.0 - (1.0 - LEAD_RATE) ** num_rows
        size = (num_rows - 1).bit_length()
        lead = self._leads.get(size, now)
        self._leads[size] = lead = lead + rate * (now - lead)
        return lead

    def clear(self) -> None:
        self._leads.clear()


class Trees:
    """Whether to draft trees, and which. A waiting tree can only be checked as one: other steps
    drop it. The last nodes of a merged tree are the lookup's: steps that draft a tree alone check
    fewer nodes, and drop those."""

    def __init__(self, drafter: DeviceDrafter | None, shapes: StepShapes, num_rows: int) -> None:
        sources = {shape.source for shape in shapes.all}
        self.sources = {
            one for one in sources if drafter is not None and one > 0 and drafter.depth(one) > 0
        }
        self.is_waiting = np.zeros(num_rows, dtype=np.bool_)  # a tree, for this row
        self.is_merged = np.zeros(num_rows, dtype=np.bool_)  # with a lookup's guesses beside it
        self._leads, self._merged_leads = Leads(), Leads()

    def start(self, ids: list[int], *, is_first: bool) -> None:
        """Requests came into these rows; is_first: no others are running."""
        self.is_waiting[ids] = self.is_merged[ids] = False
        if is_first:
            self._leads.clear()
            self._merged_leads.clear()

    def choose(self, row_R: np.ndarray, choices: Choices) -> Choices:
        """The shapes that draft trees, or those that do not, and merged trees, or others: those
        with the lead."""
        is_tree = [shape.source in self.sources for shape in choices[0]]
        least = -MIN_LEAD_TREES if self.is_waiting[row_R].any() else MIN_LEAD
        choices = _leading(self._leads, len(row_R), choices, is_tree, least)
        if choices[0][0].source not in self.sources:
            return choices
        is_merged = [shape.source == DraftSource.MERGED for shape in choices[0]]
        least = -MIN_LEAD_MERGED if self.is_merged[row_R].any() else MIN_LEAD_MERGED
        return _leading(self._merged_leads, len(row_R), choices, is_merged, least)

    def launch(self, shape: StepShape, row_R: np.ndarray) -> StepShape:
        """The shape that a step is launched with; one that drafts no tree drops waiting ones."""
        is_tree = shape.source in self.sources
        if not is_tree and self.is_waiting[row_R].any():
            shape = StepShape(0, shape.source)
        self.is_waiting[row_R] = is_tree
        self.is_merged[row_R] = shape.source == DraftSource.MERGED
        return shape


def _leading(
    leads: Leads, num_rows: int, choices: Choices, is_some: Sequence[bool], least: float
) -> Choices:
    """Some of the choices if their lead is more than `least`, or the others."""
    if all(is_some) or not any(is_some):
        return choices
    wanted = leads.of(num_rows, is_some, *choices[1:]) > least
    return only(choices, [which == wanted for which in is_some])


def only(choices: Choices, is_kept: Sequence[bool]) -> Choices:
    """The choices to keep."""
    kept = [place for place, which in enumerate(is_kept) if which]
    shapes, tokens, seconds = choices
    return [shapes[p] for p in kept], [tokens[p] for p in kept], [seconds[p] for p in kept]


class NetworkUse:
    """Whether the network is used, and which rows it has seen all tokens of."""

    def __init__(self, drafter: DeviceDrafter | None, shapes: StepShapes, rows: RowLengths) -> None:
        self.drafter, self.rows = drafter, rows
        self.trials = Trials()  # of steps with the network against steps without it
        self.network_sources = shapes.network_sources
        # A draft model: it misses the tokens of steps without it, and can catch up.
        self.can_catch_up = bool(self.network_sources) and drafter is not None
        self.can_catch_up &= drafter is not None and drafter.network is not None
        # A head: it follows every step until it is dropped.
        self.can_drop = DraftSource.LOOKUP_ALONE in {shape.source for shape in shapes.all}
        self.is_current = np.zeros(len(rows.known), dtype=np.bool_)  # has seen all of the row
        self._leads = Leads()  # of steps with the network
        self._num_dropped_steps = 0  # that are still to come without a dropped head
        self._next_dropped_steps = FIRST_DROPPED

    def is_network(self, shape: StepShape) -> bool:
        """Whether the network drafts in such a step or follows it."""
        return shape.source >= (0 if self.can_drop else 1)

    def start(self, ids: list[int], *, is_first: bool) -> None:
        """Requests came into these rows; is_first: no others are running."""
        self.is_current[ids] = self.can_drop and not self._num_dropped_steps
        if is_first:
            self._leads.clear()

    def choose(
        self,
        row_R: np.ndarray,
        shapes: Sequence[StepShape],
        tokens: Sequence[float],
        seconds: Sequence[float],
        *,
        is_flowing: bool,
    ) -> Choices:
        """The shapes with the network, or those without it: those with the lead."""
        lead = self._leads.of(len(row_R), list(map(self.is_network, shapes)), tokens, seconds)
        if self.can_drop:
            sources = self._head_sources(row_R, lead, (len(row_R) - 1).bit_length())
        elif self._uses_draft_model(row_R, lead, max(tokens), is_flowing=is_flowing):
            sources = self.network_sources
        else:
            sources = [DraftSource.LOOKUP]
        choices = list(shapes), list(tokens), list(seconds)
        return only(choices, [shape.source in sources for shape in shapes])

    def _head_sources(self, row_R: np.ndarray, lead: float, size: int) -> list[DraftSource]:
        """Who may draft, where the network is a head that follows every step until it is dropped.

        The head may draft if it has followed all rows of the step. If it has followed some of them,
        it goes on following those. It is dropped when steps without it lead.
        """
        if self._num_dropped_steps:
            self._num_dropped_steps -= 1
            self._leads.clear()
            return [DraftSource.LOOKUP_ALONE]
        is_current_R = self.is_current[row_R]
        if is_current_R.all():
            has_lost = self.trials.margin(1 << size) > 0.0
            if lead > -(MIN_LEAD_SLOW_HEAD if has_lost else MIN_LEAD_HEAD):
                return [DraftSource.LOOKUP, *self.network_sources]
            self._num_dropped_steps = self._next_dropped_steps
            self._next_dropped_steps = min(2 * self._next_dropped_steps, MAX_DROPPED)
        is_some = is_current_R.any() and not is_current_R.all()
        return [DraftSource.LOOKUP if is_some else DraftSource.LOOKUP_ALONE]

    def _uses_draft_model(
        self, row_R: np.ndarray, lead: float, num_tokens: float, *, is_flowing: bool
    ) -> bool:
        """Whether a draft model drafts for these rows.

        If it has to catch up first, that costs a step run by the host and the waiting drafts. Its
        lead must make up for that before the rows' requests end.
        """
        if self.is_current[row_R].all():
            return lead > -MIN_LEAD
        least = MIN_LEAD
        if not is_flowing:  # else later requests gain from the change too
            num_steps = (self.rows.end[row_R] - self.rows.known[row_R]).mean() / num_tokens
            least = max(CHANGE_STEPS / max(num_steps, 1.0), MIN_LEAD)
        return lead > least and self._is_worth_catching_up(row_R)

    def _is_worth_catching_up(self, row_R: np.ndarray) -> bool:
        assert self.drafter is not None
        rows = self.rows
        missing = (rows.known[row_R] - rows.computed[-1, row_R]).sum()
        to_come = (rows.end[row_R] - rows.known[row_R]).sum()
        is_short = self.drafter.can_follow(rows.view(row_R.tolist()))
        return is_short and bool(missing <= MAX_CATCH_UP * to_come)

    def is_ready(self, shape: StepShape, row_R: np.ndarray) -> bool:
        """Whether a step of these rows can have this shape without catching up first."""
        return not (self.can_catch_up and shape.source > 0) or bool(self.is_current[row_R].all())

    def is_dropped(self, ids: list[int]) -> np.ndarray:
        """For which rows a head was dropped."""
        return ~self.is_current[ids] & self.can_drop

    def launch(self, shape: StepShape, row_R: np.ndarray) -> None:
        """A step of this shape was launched: the network may miss its tokens."""
        if shape.source < 0 or (self.can_catch_up and not shape.source):
            self.is_current[row_R] = False
