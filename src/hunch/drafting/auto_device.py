"""Lookup and a draft model (or Medusa's kind of heads) on a device, in one step: a long match goes
first."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hunch.draft import Rows
from hunch.drafting.auto_head import CHAIN_NODES
from hunch.drafting.base import DeviceDrafter, Network
from hunch.drafting.costs import SURE, DraftSource, StepShape, levels_after
from hunch.drafting.draft_model import DeviceDraft
from hunch.drafting.lookup import DeviceLookup
from hunch.models.decoder import Hidden

if TYPE_CHECKING:
    from hunch.kernels.step import RowState, StepRows

TREE_WIDTH, TREE_LEVELS = 3, 5  # of a draft model's trees


class DeviceAuto(DeviceDrafter):
    """Lookup and a network on a device, in one step: a long match outbids the network.

    The cheaper source of its steps is the lookup alone. In the others the network guesses for every
    row, a chain or (a draft model) a small tree, and rows whose end stood in their text before, for
    `SURE` tokens or more, take what followed. Tokens that were accepted from a lookup have no KV of
    a draft model's, so it processes anew as many tokens as the step could have committed.

    Where there is a phrase table, half of a chain and a node more are the model's, and the table
    goes on from there: its guesses cost nothing but the rows that check them. On answers of the
    default model, 4 levels had 3.41 tokens per pass alone and 3.61 with two nodes of the table.
    """

    def __init__(self, matches: DeviceLookup, model: DeviceDrafter) -> None:
        super().__init__(
            name="auto",
            num_levels=model.num_levels,
            num_nodes=max(matches.num_nodes, model.num_nodes),
            margin=matches.margin,
        )
        # Guesses of both stand in one place.
        self.matches, self.model = matches, replace(model, num_nodes=self.num_nodes)
        self.tree: DeviceDraft | None = None
        if isinstance(model, DeviceDraft) and not model.only_chains:
            num_levels, width = min(model.num_levels, TREE_LEVELS), TREE_WIDTH
            self.tree = replace(
                model, num_levels=num_levels, num_nodes=0, level_size=width, width=width,
                branch=width,
            )  # fmt: skip

    @property
    def network(self) -> Network | None:
        return self.model.network

    @property
    def is_guided(self) -> bool:
        return self.matches.is_guided

    @property
    def goes_on(self) -> bool:
        """Whether a phrase table goes on where the model's chains end."""
        return self.matches.phrases is not None and isinstance(self.model, DeviceDraft)

    def _of_model(self, num_nodes: int) -> int:
        """Levels of a chain that the model drafts."""
        return min(num_nodes // 2 + 1 if self.goes_on else num_nodes, self.num_levels)

    @property
    def _chain_sizes(self) -> list[int]:
        if not self.goes_on:
            return sorted({min(size, self.num_levels) for size in CHAIN_NODES})
        most = min(2 * self.num_levels, self.num_nodes)
        return sorted({min(size, most) for size in CHAIN_NODES})

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        chains = [StepShape(size, DraftSource.CHAIN) for size in self._chain_sizes]
        if self.tree is None or self.tree.num_nodes > self.num_nodes:
            return (*self.matches.shapes, *chains)
        whole = StepShape(self.tree.num_nodes, DraftSource.TREE)
        return (*self.matches.shapes, *chains, whole)

    def levels(self, source: int) -> int:
        if self.tree is not None and source == DraftSource.TREE:
            return self.tree.num_levels
        return max(self._chain_sizes)

    def depth(self, source: int) -> int:
        """A lookup's chain may be checked as a tree, as deep as it has nodes."""
        is_tree = self.tree is not None and source == DraftSource.TREE
        return self.tree.num_nodes if is_tree and self.tree else 0

    def draft(
        self, state: RowState, step: StepRows, hidden: Hidden, kind: int, source: int = 0
    ) -> None:
        from hunch.kernels.gpu_lookup import lookup

        at, model = self.matches, self.model
        if not source:
            at.look(state, step, self.num_nodes)
            return
        num_tokens = step.path_RK.shape[1]  # that this step could have committed
        drafted = (0, 0)
        if source == DraftSource.TREE:
            assert self.tree is not None
            self.tree.grow(state, step, kind, self.tree.num_levels, num_tokens)
        elif isinstance(model, DeviceDraft):
            size = levels_after(num_tokens, self.levels(source))
            drafted = self._of_model(size), size
            model.grow(state, step, kind, drafted[0], num_tokens)
        else:
            model.draft(state, step, hidden, kind, source)
        match = at.min_match, at.max_match
        lookup(state, step, self.num_nodes, *match, SURE, phrases=at.phrases, drafted=drafted)

    def works(self, source: int) -> bool:
        return source != DraftSource.NOBODY

    def writes_kv(self, source: int) -> bool:
        return self.model.writes_kv(source)

    def can_follow(self, rows: Rows) -> bool:
        return self.model.can_follow(rows)

    def drafted_by(self, source: int, matched: int) -> str:
        is_looked_up = source <= 0 or matched >= SURE
        return self.matches.name if is_looked_up else self.model.name
