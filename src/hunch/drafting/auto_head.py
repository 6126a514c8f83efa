"""Lookup and a head over the target's states on a device, in one step: a long match goes first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hunch.draft import Rows
from hunch.drafting.base import DeviceDrafter
from hunch.drafting.block import DeviceBlock
from hunch.drafting.costs import SURE, DraftSource, StepShape
from hunch.drafting.following import DeviceFollower
from hunch.drafting.lookup import DeviceLookup
from hunch.models.decoder import Hidden

if TYPE_CHECKING:
    from hunch.kernels.step import RowState, StepRows

CHAIN_NODES = (1, 3, 7, 11)  # checked in steps of a network's chains, where it drafts as many
TREE_WIDTH = 3  # of a block drafter's trees


class DeviceAutoHead(DeviceDrafter):
    """The head keeps up with the states of every step, whoever drafted for it, or it is left.

    In steps of the lookup it only keeps up. In its own it guesses for every row, and rows whose end
    stood in their text before, for `SURE` tokens or more, take what followed. Where it does not
    pay, lookups go on without it: rows of such a step are drafted for by lookups to their end.
    """

    def __init__(self, matches: DeviceLookup, head: DeviceFollower) -> None:
        num_nodes = max(matches.num_nodes, head.num_nodes)
        super().__init__(
            name="auto", num_levels=head.num_levels, num_nodes=num_nodes, margin=matches.margin
        )
        self.matches = matches
        self.head = replace(head, num_nodes=num_nodes)  # guesses of both stand in one place
        self.tree: DeviceBlock | None = None
        num_levels = min(num_nodes // TREE_WIDTH, head.num_levels)
        if isinstance(self.head, DeviceBlock) and num_levels > 1:
            self.tree = replace(self.head, width=TREE_WIDTH, num_levels=num_levels)

    @property
    def is_guided(self) -> bool:
        return self.matches.is_guided

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.head.feature_layers

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        sizes = {min(size, self.num_levels) for size in CHAIN_NODES}
        chains = [StepShape(size, DraftSource.CHAIN) for size in sorted(sizes)]
        if self.tree is not None:
            size = self.tree.width * self.tree.num_levels
            chains.append(StepShape(size, DraftSource.TREE))
        alone = [StepShape(n, DraftSource.LOOKUP_ALONE) for n, _ in self.matches.shapes]
        return (*self.matches.shapes, *chains, *(alone if self.matches.is_adaptive else ()))

    def levels(self, source: int) -> int:
        is_tree = self.tree is not None and source == DraftSource.TREE
        return self.tree.num_levels if is_tree and self.tree else self.num_levels

    def depth(self, source: int) -> int:
        """A lookup's chain may be checked as a tree, as deep as it has nodes."""
        return self.num_nodes if source == DraftSource.TREE else 0

    def draft(
        self, state: RowState, step: StepRows, hidden: Hidden, kind: int, source: int = 0
    ) -> None:
        from hunch.kernels.gpu_lookup import lookup

        at = self.matches
        if source == DraftSource.LOOKUP_ALONE:
            at.look(state, step, self.num_nodes)
            return
        is_tree = self.tree is not None and source == DraftSource.TREE
        head = self.tree if is_tree and self.tree is not None else self.head
        head.draft(state, step, hidden, kind, source)
        if source:
            match = at.min_match, at.max_match
            lookup(state, step, self.num_nodes, *match, SURE, phrases=at.phrases)
        else:
            at.look(state, step, self.num_nodes)

    def works(self, source: int) -> bool:
        return source != DraftSource.NOBODY

    def writes_kv(self, source: int) -> bool:
        return source >= 0

    def can_follow(self, rows: Rows) -> bool:
        return self.head.can_follow(rows)

    def needs_host(self, rows: Rows) -> bool:
        return self.head.needs_host(rows)

    def is_ready(self, rows: Rows) -> np.ndarray | None:
        return self.head.is_ready(rows)

    def drafted_by(self, source: int, matched: int) -> str:
        is_looked_up = source <= 0 or matched >= SURE
        return self.matches.name if is_looked_up else self.head.name
