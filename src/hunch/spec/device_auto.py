"""`auto` with a draft model on a device: both draft in one step, a long match outbids the model.

The cheaper way of its steps is the lookup alone. In the other the draft model guesses for every
row, and rows whose end stood in their text before, for `SURE` tokens or more, take what followed.
Tokens that were accepted from a lookup have no KV of the model's, so each step processes anew as
many tokens as it could have committed.
"""

from __future__ import annotations

from dataclasses import dataclass

from hunch.draft import Rows
from hunch.kernels.gpu_spec import Cells, StepRows, lookup
from hunch.spec.device_draft import DeviceDraft
from hunch.spec.on_device import DeviceLookup
from hunch.spec.pace import Gait

SURE = 3  # tokens a match must have to be asked before the draft model
NETWORK = 1  # the way with the draft model
NODES = (1, 3, 7, 15)  # checked in steps of that way


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceAuto:
    """Chains by lookup, or by a draft model where that has no long match."""

    matches: DeviceLookup
    network: DeviceDraft
    name: str = "auto"
    depth: int = 0
    needs_host: bool = False

    @property
    def margin(self) -> float:
        return self.matches.margin

    @property
    def num_nodes(self) -> int:
        return max(self.matches.num_nodes, self.network.num_nodes)

    @property
    def num_levels(self) -> int:
        return self.network.num_levels

    @property
    def gaits(self) -> tuple[Gait, ...]:
        some = [n for n in NODES if n <= self.num_nodes]
        return (*self.matches.gaits, *(Gait(n, NETWORK) for n in some))

    def draft(self, cells: Cells, step: StepRows, kind: int, way: int = 0) -> None:
        at = self.matches
        if way != NETWORK:
            lookup(cells, step, self.num_nodes, at.min_match, at.max_match)
            return
        num_tokens = step.path_RK.shape[1]  # that this step could have committed
        # The next step will most likely check as many nodes; one that checks none is a beginning.
        num_levels = min(self.num_levels, num_tokens - 1) or self.num_levels
        self.network.grow(cells, step, kind, num_levels, num_tokens)
        lookup(cells, step, self.num_nodes, at.min_match, at.max_match, SURE)

    def writes_kv(self, way: int) -> bool:
        return way == NETWORK

    def can_follow(self, rows: Rows) -> bool:
        return self.network.can_follow(rows)

    def follow(self, rows: Rows) -> None:
        self.network.follow(rows)

    def is_ready(self, rows: Rows) -> bool:
        return True

    def drafted_by(self, way: int, matched: int) -> str:
        is_looked_up = way != NETWORK or matched >= SURE
        return self.matches.name if is_looked_up else self.network.name
