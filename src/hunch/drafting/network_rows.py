"""Which rows a network can draft for in captured steps.

A network can only draft for rows of which it has seen every token. A draft model does not see the
tokens of steps without it; before it drafts again, a pass of it over the missed tokens is launched
between two captured steps. A head reads the target's states, so it cannot catch up: it follows
every step until it is dropped, and then does not draft again for the running rows.

Shape letters: R rows of the step.
"""

from __future__ import annotations

import logging

import numpy as np

from hunch.drafting.base import DeviceDrafter
from hunch.drafting.step_shapes import DraftSource, RowLengths, StepShape, StepShapes

log = logging.getLogger("hunch")

MAX_CATCH_UP = 32  # missed tokens that a draft model may read per token that rows can still get


class NetworkRows:
    """What a drafter's network has seen of each row, and what waits to be checked."""

    def __init__(self, drafter: DeviceDrafter, shapes: StepShapes, rows: RowLengths) -> None:
        num_rows = len(rows.known)
        self.drafter, self.rows = drafter, rows
        self.has_network = bool(shapes.network_sources)
        # The network is a draft model.
        self.can_catch_up = self.has_network and drafter.draft_model is not None
        # The network is a head beside lookups.
        self.can_drop = any(shape.source == DraftSource.HEAD_DROPPED for shape in shapes.all)
        # The network has seen all of the row's tokens; and the row cannot get too long for it.
        self.is_current = np.zeros(num_rows, dtype=np.bool_)
        self.fits_network = np.ones(num_rows, dtype=np.bool_)
        # Whether a row's request names a network (True) or a lookup (False); None: neither.
        self.by_network: list[bool | None] = [None] * num_rows
        # The source of each row's waiting draft, as of the last step launched.
        self.waiting_source = np.full(num_rows, DraftSource.NOBODY)
        self.dropped_steps = 0  # steps still to come without the dropped head
        self._tree_sources = [one for one in shapes.network_sources if drafter.depth(one)]
        self._has_warned_of_max_len = self._has_warned_of_trained_len = False

    def start(self, ids: list[int]) -> None:
        """Requests came into these rows."""
        self.is_current[ids] = self.can_drop and not self.dropped_steps
        self.waiting_source[ids] = DraftSource.NOBODY
        if self.drafter.max_len is None:
            return
        self.fits_network[ids] = self.rows.end[ids] <= self.drafter.max_len
        if not self._has_warned_of_max_len and not self.fits_network[ids].all():
            log.warning(
                "%s drafts for texts of up to %d tokens: rows that may get longer go on "
                "without its network", self.drafter.name, self.drafter.max_len,
            )  # fmt: skip
            self._has_warned_of_max_len = True

    def are_current(self, row_R: np.ndarray) -> bool:
        """Whether there is a network that has seen all of these rows."""
        return self.has_network and bool(self.is_current[row_R].all())

    def is_ready(self, shape: StepShape, row_R: np.ndarray) -> bool:
        """Whether a step of these rows can have this shape without catching up first."""
        return not (self.can_catch_up and shape.source > 0) or self.are_current(row_R)

    def is_dropped(self, ids: list[int]) -> np.ndarray:
        """For each row, whether the head was dropped."""
        return ~self.is_current[ids] & self.can_drop

    def shape_to_launch(self, shape: StepShape, row_R: np.ndarray) -> StepShape:
        """Note that a step of this shape is launched next; returns the shape that it can have.

        A waiting tree can only be checked by a step for trees; another one checks no nodes.
        """
        self._warn_of_trained_len(row_R)
        source, is_tree = shape.source, shape.source in self._tree_sources
        trees = self._tree_sources
        if trees and not is_tree and np.isin(self.waiting_source[row_R], trees).any():
            shape = StepShape(0, source)
        self.waiting_source[row_R] = source
        if source < 0 or (self.can_catch_up and not source):
            self.is_current[row_R] = False  # the network misses its tokens
        return shape

    def _warn_of_trained_len(self, row_R: np.ndarray) -> None:
        """Say once that a row is longer than the network's context."""
        trained_len = self.drafter.trained_len
        if trained_len is None or self._has_warned_of_trained_len:
            return
        if self.rows.known[row_R].max() > trained_len:
            log.warning(
                "a text is longer than the context of %s, %d tokens: it goes on drafting, and may "
                "guess worse from there on", self.drafter.name, trained_len,
            )  # fmt: skip
            self._has_warned_of_trained_len = True

    def can_draft(self, row_R: np.ndarray) -> bool:
        """Whether the network can draft for all of these rows, once it has caught up.

        A draft model cannot if it missed too many tokens for those that the rows can still get.
        """
        if self.are_current(row_R) or not (self.can_catch_up or self.can_drop):
            return True
        rows = self.rows
        missing = (rows.known[row_R] - rows.computed[-1, row_R]).sum()
        to_come = (rows.end[row_R] - rows.known[row_R]).sum()
        return self.can_catch_up and bool(missing <= MAX_CATCH_UP * to_come)
