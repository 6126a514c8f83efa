"""`auto` with a draft model on a device: both draft in one step, a long match outbids the model.

The cheaper source of its steps is the lookup alone. In the other the draft model guesses for every
row, and rows whose end stood in their text before, for `SURE` tokens or more, take what followed.
Tokens that were accepted from a lookup have no KV of the model's, so each step processes anew as
many tokens as it could have committed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hunch.draft import Rows
from hunch.drafting.base import DeviceDrafter
from hunch.drafting.costs import DraftSource, StepShape, levels_after
from hunch.drafting.draft_model import DeviceDraft
from hunch.drafting.lookup import DeviceLookup
from hunch.models.decoder import Hidden

if TYPE_CHECKING:
    from hunch.kernels.step import RowState, StepRows

SURE = 4  # tokens a match must have to be asked before the draft model
CHAIN_NODES = (1, 3, 7)  # checked in steps of the one
TREE_WIDTH = 3  # of the other


class DeviceAuto(DeviceDrafter):
    """Chains by lookup; where that has no long match, chains or small trees by a draft model."""

    def __init__(self, matches: DeviceLookup, model: DeviceDraft) -> None:
        super().__init__(
            name="auto",
            num_levels=model.num_levels,
            num_nodes=max(matches.num_nodes, model.num_nodes),
            margin=matches.margin,
        )
        self.matches, self.model = matches, model
        self.tree = replace(model, width=TREE_WIDTH)

    @property
    def network(self) -> DeviceDraft:
        return self.model

    @property
    def is_guided(self) -> bool:
        return self.matches.is_guided

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        chains = [StepShape(n, DraftSource.CHAIN) for n in CHAIN_NODES if n <= self.num_nodes]
        trees = [
            StepShape(n, DraftSource.TREE) for n in (self.tree.num_nodes,) if n <= self.num_nodes
        ]
        return (*self.matches.shapes, *chains, *trees)

    def depth(self, source: int) -> int:
        """A lookup's chain may be checked as a tree, as deep as it has nodes."""
        return self.tree.num_nodes if source == DraftSource.TREE else 0

    def draft(
        self, state: RowState, step: StepRows, hidden: Hidden, kind: int, source: int = 0
    ) -> None:
        from hunch.kernels.gpu_lookup import lookup

        at = self.matches
        if not source:
            at.look(state, step, self.num_nodes)
            return
        num_tokens = step.path_RK.shape[1]  # that this step could have committed
        if source == DraftSource.TREE:
            self.tree.grow(state, step, kind, self.tree.num_levels, num_tokens)
        else:
            num_levels = levels_after(num_tokens, self.num_levels)
            self.model.grow(state, step, kind, num_levels, num_tokens)
        lookup(state, step, self.num_nodes, at.min_match, at.max_match, SURE)

    def works(self, source: int) -> bool:
        return True

    def writes_kv(self, source: int) -> bool:
        return source > 0

    def can_follow(self, rows: Rows) -> bool:
        return self.model.can_follow(rows)

    def drafted_by(self, source: int, matched: int) -> str:
        is_looked_up = not source or matched >= SURE
        return self.matches.name if is_looked_up else self.model.name
