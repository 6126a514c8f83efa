"""Lookup and a head over the target's states on a device, in one step: a long match goes first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from hunch.draft import Rows
from hunch.drafting.auto_device import DeviceBoth
from hunch.drafting.block import DeviceBlock
from hunch.drafting.costs import DraftSource, StepShape
from hunch.drafting.following import DeviceFollower
from hunch.drafting.lookup import DeviceLookup
from hunch.models.decoder import Hidden

if TYPE_CHECKING:
    from hunch.kernels.step import RowState, StepRows


class DeviceAutoHead(DeviceBoth):
    """The head keeps up with the states of every step, whoever drafted for it, or it is left.

    In steps of the lookup it only keeps up. Where it does not pay, lookups go on without it: rows
    of such a step are drafted for by lookups to their end.
    """

    def __init__(
        self, matches: DeviceLookup, head: DeviceFollower, room: int, *, only_chains: bool
    ) -> None:
        has_trees = isinstance(head, DeviceBlock) and not only_chains
        super().__init__(matches, head, room, has_trees=has_trees)
        # Guesses of both stand in one place.
        self.head = replace(head, num_nodes=self.num_nodes)
        self.trees: dict[int, DeviceBlock] = {}
        for source, (width, num_levels) in self.tree_sizes.items():
            assert isinstance(self.head, DeviceBlock)
            self.trees[source] = replace(self.head, width=width, num_levels=num_levels)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.head.feature_layers

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        alone = [StepShape(n, DraftSource.LOOKUP_ALONE) for n, _ in self.matches.shapes]
        return (*super().shapes, *(alone if self.matches.is_adaptive else ()))

    def draft(
        self, state: RowState, step: StepRows, hidden: Hidden, kind: int, source: int = 0
    ) -> None:
        if source != DraftSource.LOOKUP_ALONE:
            head = self.trees.get(source, self.head)
            head.draft(state, step, hidden, kind, source)
        if source > 0:
            self.add_matches(state, step, source)
        else:
            self.matches.look(state, step, self.num_nodes)

    def writes_kv(self, source: int) -> bool:
        return source >= 0

    def can_follow(self, rows: Rows) -> bool:
        return self.head.can_follow(rows)

    def needs_host(self, rows: Rows) -> bool:
        return self.head.needs_host(rows)

    def is_ready(self, rows: Rows) -> np.ndarray | None:
        return self.head.is_ready(rows)

    def drafted_by(self, source: int, matched: int) -> str:
        return self.name_of(source, matched, self.head.name)
