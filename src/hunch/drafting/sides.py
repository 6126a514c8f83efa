"""Steps that a network knows of, or steps without it: which of the two pays, of late.

A network can only draft for rows whose tokens it has all seen. A step without a draft model leaves
a hole in what it knows, and the host reads the row to it before it drafts again. A head that reads
the target's states keeps up with every step until it is left; then it drafts for these rows no
more.

Shape letters: R rows of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any, Protocol

import numpy as np

from hunch.draft import Rows
from hunch.drafting.base import DeviceDrafter
from hunch.drafting.costs import DraftSource, StepShape, StepShapes
from hunch.drafting.trials import Trials

# Steps that a change to a network costs (the host leads one, a draft is lost), how much more one
# side must promise of late to be taken up or left, and how fast `of late` moves.
CHANGE, LEAVE, LEAD_RATE = 2.0, 0.01, 0.1
LEAVE_TREES = 0.03  # as LEAVE, of trees: the one that waits is dropped
# As LEAVE, of a head that lost time before, and of any: rows that it left it does not come back to.
LEAVE_HEAD, LEAVE_ANY_HEAD = 0.04, 0.12
READS = 32  # tokens worth reading to a network for one that a row may still get
# Steps for which a head is left that did not pay: the first time, and at most, doubled each time.
FIRST_LEFT, MOST_LEFT = 100, 1600


class RowLengths(Protocol):
    """What the policy asks of the host's rows."""

    known: np.ndarray
    end: np.ndarray  # known length at which max_tokens is reached
    computed: np.ndarray  # by KV group; the drafter's is the last
    requests: list[Any]

    def view(self, rows: list[int]) -> Rows: ...


class Reader(Protocol):
    """Lets a network see all that rows know."""

    def read(self, ids: list[int]) -> None: ...


Choices = tuple[list[StepShape], list[float], list[float]]  # shapes, their tokens and seconds


class Leads:
    """Log of what some steps promise over what others do, of late, by the rows they have room for.

    What is best now changes from step to step, and changing over costs time.
    """

    def __init__(self) -> None:
        self._leads: dict[int, float] = {}

    def of(
        self,
        num_rows: int,
        is_some: Sequence[bool],
        tokens: Sequence[float],
        seconds: Sequence[float],
    ) -> float:
        best = [1e-9, 1e-9]
        for which, gain, took in zip(is_some, tokens, seconds, strict=True):
            best[which] = max(best[which], gain / took)
        now, rate = log(best[1] / best[0]), 1.0 - (1.0 - LEAD_RATE) ** num_rows
        size = (num_rows - 1).bit_length()
        lead = self._leads.get(size, now)
        self._leads[size] = lead = lead + rate * (now - lead)
        return lead

    def clear(self) -> None:
        self._leads.clear()


class Trees:
    """Trees or chains. A tree that waits can only be checked as a tree: any other step drops it."""

    def __init__(self, drafter: DeviceDrafter | None, shapes: StepShapes, num_rows: int) -> None:
        sources = {shape.source for shape in shapes.all}
        self.sources = {
            one for one in sources if drafter is not None and one > 0 and drafter.depth(one) > 0
        }
        self.waits = np.zeros(num_rows, dtype=np.bool_)  # what the last launched step drafts
        self._leads = Leads()

    def start(self, ids: list[int], *, is_first: bool) -> None:
        """Requests came into these rows, nobody being there."""
        self.waits[ids] = False
        if is_first:
            self._leads.clear()

    def choose(self, row_R: np.ndarray, choices: Choices) -> Choices:
        """Trees, or what is none: what promises more, of late."""
        is_tree = [shape.source in self.sources for shape in choices[0]]
        if all(is_tree) or not any(is_tree):
            return choices
        lead = self._leads.of(len(row_R), is_tree, *choices[1:])
        wanted = lead > (-LEAVE_TREES if self.waits[row_R].any() else LEAVE)
        return only(choices, [which == wanted for which in is_tree])

    def launch(self, shape: StepShape, row_R: np.ndarray) -> StepShape:
        """A step is launched so, or drops what waits."""
        is_tree = shape.source in self.sources
        if not is_tree and self.waits[row_R].any():
            shape = StepShape(0, shape.source)
        self.waits[row_R] = is_tree
        return shape


def only(choices: Choices, is_kept: Sequence[bool]) -> Choices:
    """Those of the choices."""
    kept = [place for place, which in enumerate(is_kept) if which]
    shapes, tokens, seconds = choices
    return [shapes[p] for p in kept], [tokens[p] for p in kept], [seconds[p] for p in kept]


class Sides:
    """The network's side and the other, and what the network knows of each row."""

    def __init__(self, drafter: DeviceDrafter | None, shapes: StepShapes, rows: RowLengths) -> None:
        self.drafter, self.rows = drafter, rows
        self.trials = Trials()  # of the network's side against the other
        self.network_sources = shapes.network_sources
        # Steps without the network leave holes, and somebody can read it what it missed.
        self.can_miss = bool(self.network_sources) and drafter is not None
        self.can_miss &= drafter is not None and drafter.network is not None
        # It keeps up with every step, and may be left.
        self.can_leave = DraftSource.LOOKUP_ALONE in {shape.source for shape in shapes.all}
        # The network knows all of the row, or was not left.
        self.has_read = np.zeros(len(rows.known), dtype=np.bool_)
        self._leads = Leads()  # of the network's side
        self._num_steps_left, self._next_left = 0, FIRST_LEFT

    def is_network(self, shape: StepShape) -> bool:
        """Whether the network drafts in such a step, or follows it."""
        return shape.source >= (0 if self.can_leave else 1)

    def start(self, ids: list[int], *, is_first: bool) -> None:
        """Requests came into these rows, nobody being there."""
        self.has_read[ids] = self.can_leave and not self._num_steps_left
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
        """The shapes that a network knows of, or those it does not: what promises more, of late."""
        lead = self._leads.of(len(row_R), list(map(self.is_network, shapes)), tokens, seconds)
        if self.can_leave:
            sources = self._followed(row_R, lead, (len(row_R) - 1).bit_length())
        elif self._is_read_to(row_R, lead, max(tokens), is_flowing=is_flowing):
            sources = self.network_sources
        else:
            sources = [DraftSource.LOOKUP]
        choices = list(shapes), list(tokens), list(seconds)
        return only(choices, [shape.source in sources for shape in shapes])

    def _followed(self, row_R: np.ndarray, lead: float, size: int) -> list[DraftSource]:
        """What may draft where a head follows every step until it is left.

        It can draft where it follows all rows; in the others it follows those that it can.
        It is left where it promises less and has lost time before.
        """
        if self._num_steps_left:
            self._num_steps_left -= 1
            self._leads.clear()
            return [DraftSource.LOOKUP_ALONE]
        knows = self.has_read[row_R]
        if knows.all():
            if lead > -(LEAVE_HEAD if self.trials.margin(1 << size) else LEAVE_ANY_HEAD):
                return [DraftSource.LOOKUP, *self.network_sources]
            self._num_steps_left = self._next_left
            self._next_left = min(2 * self._next_left, MOST_LEFT)
        return [DraftSource.LOOKUP if knows.any() and not knows.all() else DraftSource.LOOKUP_ALONE]

    def _is_read_to(
        self, row_R: np.ndarray, lead: float, num_tokens: float, *, is_flowing: bool
    ) -> bool:
        """Whether rows are read to a network that misses what steps without it say.

        To change costs a step that the host leads, and what waits is dropped. So it must promise
        to bring that in while the rows' requests last.
        """
        if self.has_read[row_R].all():
            return lead > -LEAVE
        least = LEAVE
        if not is_flowing:  # else the requests to come have the use of it too
            left = (self.rows.end[row_R] - self.rows.known[row_R]).mean() / num_tokens
            least = max(CHANGE / max(left, 1.0), LEAVE)
        return lead > least and self._is_worth_reading(row_R)

    def _is_worth_reading(self, row_R: np.ndarray) -> bool:
        assert self.drafter is not None
        rows = self.rows
        missing = (rows.known[row_R] - rows.computed[-1, row_R]).sum()
        to_come = (rows.end[row_R] - rows.known[row_R]).sum()
        is_short = self.drafter.can_follow(rows.view(row_R.tolist()))
        return is_short and bool(missing <= READS * to_come)

    def is_ready(self, shape: StepShape, row_R: np.ndarray) -> bool:
        """Whether a step of these rows can have this shape without the host."""
        return not (self.can_miss and shape.source > 0) or bool(self.has_read[row_R].all())

    def is_left(self, ids: list[int]) -> np.ndarray:
        """For which rows a head that lags behind drafts no more."""
        return ~self.has_read[ids] & self.can_leave

    def launch(self, shape: StepShape, row_R: np.ndarray) -> None:
        """The step is launched so."""
        if shape.source < 0 or (self.can_miss and not shape.source):
            self.has_read[row_R] = False
