"""Lookups and a network on a device, in one step: one drafts for a row, or both are checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hunch.drafting.base import DeviceDrafter
from hunch.drafting.draft_model import DeviceDraftModel
from hunch.drafting.lookup import DeviceLookup
from hunch.drafting.options import BRANCH
from hunch.drafting.recycling import DeviceRecycling, device_recycling
from hunch.drafting.step_shapes import SURE_MATCH, DraftSource, StepShape, levels_after
from hunch.drafting.with_lookups import DeviceWithLookups, TreeSize
from hunch.kernels.phrases import ContinuedChain
from hunch.kernels.step import RowState, StepRows
from hunch.models.target import Hidden

CHAIN_NODES = (1, 3, 7, 11)  # nodes checked of a network's chains, as far as it drafts so many
SHORT_CHAIN = 3  # nodes that a network drafts at least before a phrase table continues its chain

Trees = Mapping[DraftSource, tuple[TreeSize, ...]]

# Trees fill tiles of 16 packed tokens, with the last known one; merged ones have a lookup's guesses
# beside them. Where all levels take one pass, or little, trees are best-first.
BEST_FIRST: Trees = {
    DraftSource.TREE: (TreeSize(3, 5),),
    DraftSource.MERGED: (TreeSize(4, 7, 16),),
}
# Each level of a draft model or of a head like EAGLE takes a pass, in which several nodes take as
# long as one: more are drafted than are checked.
BY_LEVEL: Trees = {
    DraftSource.TREE: (TreeSize(4, 4, most=7), TreeSize(5, 5, most=15)),
    DraftSource.MERGED: (TreeSize(8, 7, 10, most=31),),
    DraftSource.LARGE: (TreeSize(8, 8, 14, most=63),),
}
BRANCH_BY_LEVEL = 4  # children considered of each node of such trees, but for the first level
# Trees of successors, with a lookup's guesses: with the last known token, they fill tiles.
OF_SUCCESSORS = TreeSize(2, 2, 3), TreeSize(3, 3, 6), TreeSize(6, 4, 7)
# Steps of more rows check no successors. On a Qwen2.5 of 2B's cost with a phrase table, one request
# was 1.12 times as fast as with lookups alone, 2 at once 1.00 and 4 at once 0.97 times (H200).
MAX_SUCCESSOR_ROWS = 2
MAX_NODES = max(
    size.room for trees in (BEST_FIRST, BY_LEVEL) for sizes in trees.values() for size in sizes
)


def fitting(
    lookup: DeviceLookup, network: DeviceDrafter, room: int
) -> dict[DraftSource, list[TreeSize]]:
    """The network's trees, cut to what both draft; those without room in a draft are left out."""
    trees = BEST_FIRST if network.is_best_first else BY_LEVEL
    found: dict[DraftSource, list[TreeSize]] = {}
    for source, sizes in trees.items():
        for level_size, num_levels, beside, most in sizes:
            num_levels, beside = min(num_levels, network.num_levels), min(beside, lookup.num_nodes)
            size = TreeSize(level_size, num_levels, beside)
            if most is not None and most < size.num_nodes:
                size = size._replace(most=most)
            if size.num_levels > 1 and size.room <= room:
                found.setdefault(source, []).append(size)
    return found


def tree_of_size(network: DeviceDrafter, size: TreeSize, longest_path: int) -> DeviceDrafter:
    """The network, drafting trees of this size."""
    if network.is_best_first:
        most = size.num_nodes - size.num_beside
        more: dict[str, Any] = {"tree_nodes": most, "width": most, "branch": BRANCH}
    else:
        branch = min(size.level_size, BRANCH_BY_LEVEL)
        more = {"level_size": size.level_size, "width": size.level_size, "branch": branch}
        more["tree_nodes"] = size.most or 0
    return replace(network, num_levels=size.num_levels, longest_path=longest_path, **more)


class DeviceEither(DeviceWithLookups):
    """One of both drafts for a row, or both: whichever promises more."""

    def __init__(
        self, lookup: DeviceLookup, network: DeviceDrafter, room: int, *, only_chains: bool
    ) -> None:
        sizes = {} if only_chains else fitting(lookup, network, room)
        super().__init__("auto", lookup, network, sizes)
        self.longest_path = max(self.longest_path, self.chain_sizes[-1])
        self.trees = {
            size: tree_of_size(self.network, size, self.longest_path)
            for some in self.tree_sizes.values()
            for size in some.values()
        }

    def network_for(self, step: StepRows, source: int) -> DeviceDrafter:
        """What the network drafts in a step of this source: a tree, or a chain."""
        if source not in self.tree_sizes:
            return self.network
        return self.trees[self.tree_of(source, step.num_nodes)]

    @property
    def chain_sizes(self) -> list[int]:
        return sorted({min(size, self.num_levels) for size in CHAIN_NODES})

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        chains = [StepShape(size, DraftSource.CHAIN) for size in self.chain_sizes]
        return (*self.lookup.shapes, *chains, *self.tree_shapes)

    def drafted_by(self, source: int, matched: int) -> str:
        return self.lookup.name if source <= 0 or matched >= SURE_MATCH else self.network.name


class DeviceAuto(DeviceEither):
    """Lookups beside a draft model or Medusa's kind of heads.

    Some steps draft by lookup alone, which is cheaper. Tokens that were accepted from a lookup have
    no KV of the draft model, so before it drafts it processes as many tokens again as the step
    could have committed.

    With a phrase table, the network drafts half of a long chain and one node more, and the table
    continues it: its guesses cost nothing but checking. Short chains are the network's alone, as it
    is right more often than the table. Steps of many rows use those: there, checking a node costs
    more than drafting a level.
    """

    @property
    def continues_chains(self) -> bool:
        """Whether a phrase table continues the network's chains."""
        return self.lookup.phrases is not None and isinstance(self.network, DeviceDraftModel)

    def _num_by_network(self, num_nodes: int) -> int:
        """How many nodes of a chain the network drafts."""
        num_levels = max(num_nodes // 2 + 1, SHORT_CHAIN) if self.continues_chains else num_nodes
        return min(num_levels, num_nodes, self.num_levels)

    def levels(self, source: int, num_nodes: int) -> int:
        if source == DraftSource.CHAIN:
            return self._num_by_network(levels_after(num_nodes, self.chain_sizes[-1]))
        return super().levels(source, num_nodes)

    @property
    def chain_sizes(self) -> list[int]:
        if not self.continues_chains:
            return super().chain_sizes
        most = min(2 * self.num_levels, self.num_nodes)
        return sorted({min(size, most) for size in CHAIN_NODES})

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        if not source:
            self.lookup.look(state, step, self.num_nodes)
            return
        network = self.network_for(step, source)
        chain: ContinuedChain | None = None
        if isinstance(network, DeviceDraftModel):
            num_levels = network.num_levels
            if source == DraftSource.CHAIN:
                size = levels_after(step.num_nodes, self.chain_sizes[-1])
                chain = ContinuedChain(self._num_by_network(size), size)
                num_levels = chain.num_drafted
            network.grow(state, step, num_levels, self.num_again(step))
        else:
            network.draft(state, step, hidden, source)
        self.add_guesses(state, step, source, chain)


class DeviceAutoHead(DeviceEither):
    """Lookups beside a head, which follows the target's states in every step until it is dropped.

    In steps of the lookup it only follows. After it was dropped, lookups draft for the running rows
    to their end.
    """

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        dropped = [StepShape(n, DraftSource.HEAD_DROPPED) for n, _ in self.lookup.shapes]
        return (*super().shapes, *(dropped if self.lookup.is_adaptive else ()))

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        if source != DraftSource.HEAD_DROPPED:
            self.network_for(step, source).draft(state, step, hidden, source)
        if source > 0:
            self.add_guesses(state, step, source)
        else:
            self.lookup.look(state, step, self.num_nodes)

    def writes_kv(self, source: int) -> bool:
        return source >= 0


class DeviceAutoRecycling(DeviceWithLookups):
    """A lookup alone, or its guesses beside a tree of the target's best successors.

    The successors of tokens are kept only in steps with such trees: to find the best of all tokens
    takes longer than a lookup.
    """

    def __init__(self, lookup: DeviceLookup, recycling: DeviceRecycling, room: int) -> None:
        sizes = [size for size in OF_SUCCESSORS if size.num_nodes <= room]
        super().__init__("auto", lookup, recycling, {DraftSource.MERGED: sizes})
        self.trees = {
            size: device_recycling(
                recycling.successors,
                size.num_grown,
                size.num_levels,
                is_adaptive=True,
            )
            for size in sizes
        }

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        return (*self.lookup.shapes, *self.tree_shapes)

    @property
    def max_network_rows(self) -> int:
        return MAX_SUCCESSOR_ROWS

    def sees_in(self, source: int) -> bool:
        return source > 0

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        if source <= 0:
            self.lookup.look(state, step, self.num_nodes)
            return
        size = self.tree_of(source, step.num_nodes)
        self.trees[size].draft(state, step, hidden, source)
        self.add_guesses(state, step, source)

    def drafted_by(self, source: int, matched: int) -> str:
        return self.lookup.name if source <= 0 or matched >= SURE_MATCH else self.network.name
