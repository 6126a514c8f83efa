"""`auto` with a draft model on a device: both draft in one step, a long match outbids the model.

The cheaper source of its steps is the lookup alone. In the other the draft model guesses for every
row, and rows whose end stood in their text before, for `SURE` tokens or more, take what followed.
Tokens that were accepted from a lookup have no KV of the model's, so each step processes anew as
many tokens as it could have committed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hunch.draft import Rows
from hunch.drafting.device_draft import DeviceDraft
from hunch.drafting.on_device import DeviceLookup
from hunch.drafting.pace import CHAIN, TREE, StepShape, levels_after
from hunch.kernels.gpu_lookup import lookup
from hunch.kernels.gpu_step import RowState, StepRows

SURE = 4  # tokens a match must have to be asked before the draft model
CHAIN_NODES = (1, 3, 7)  # checked in steps of the one
TREE_WIDTH = 3  # of the other


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceAuto:
    """Chains by lookup; where that has no long match, chains or small trees by a draft model."""

    matches: DeviceLookup
    network: DeviceDraft
    tree: DeviceDraft  # the same model
    name: str = "auto"
    watch: None = None
    feature_layers: tuple[int, ...] = ()

    @property
    def margin(self) -> float:
        return self.matches.margin

    @property
    def is_guided(self) -> bool:
        return self.matches.is_guided

    @property
    def num_nodes(self) -> int:
        return max(self.matches.num_nodes, self.network.num_nodes)

    @property
    def num_levels(self) -> int:
        return self.network.num_levels

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        chains = [StepShape(n, CHAIN) for n in CHAIN_NODES if n <= self.num_nodes]
        trees = [StepShape(n, TREE) for n in (self.tree.num_nodes,) if n <= self.num_nodes]
        return (*self.matches.shapes, *chains, *trees)

    def depth(self, source: int) -> int:
        """A lookup's chain may be checked as a tree, as deep as it has nodes."""
        return self.tree.num_nodes if source == TREE else 0

    def draft(
        self, state: RowState, step: StepRows, hidden: Any, kind: int, source: int = 0
    ) -> None:
        at = self.matches
        if not source:
            at.look(state, step, self.num_nodes)
            return
        num_tokens = step.path_RK.shape[1]  # that this step could have committed
        if source == TREE:
            self.tree.grow(state, step, kind, self.tree.num_levels, num_tokens)
        else:
            num_levels = levels_after(num_tokens, self.num_levels)
            self.network.grow(state, step, kind, num_levels, num_tokens)
        lookup(state, step, self.num_nodes, at.min_match, at.max_match, SURE)

    def works(self, source: int) -> bool:
        return True

    def writes_kv(self, source: int) -> bool:
        return source > 0

    def can_follow(self, rows: Rows) -> bool:
        return self.network.can_follow(rows)

    def needs_host(self, rows: Rows) -> bool:
        return False

    def is_ready(self, rows: Rows) -> None:
        return None

    def drafted_by(self, source: int, matched: int) -> str:
        is_looked_up = not source or matched >= SURE
        return self.matches.name if is_looked_up else self.network.name


def beside(matches: DeviceLookup, network: DeviceDraft) -> DeviceAuto:
    """A draft model that drafts chains on the device, beside a lookup there."""
    return DeviceAuto(matches=matches, network=network, tree=replace(network, width=TREE_WIDTH))
