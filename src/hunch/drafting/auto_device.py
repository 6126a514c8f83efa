"""Lookups and a network on a device, in one step: a long match goes first, or both are checked."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hunch.draft import Rows
from hunch.drafting.base import DeviceDrafter, Network
from hunch.drafting.block import DeviceBlock
from hunch.drafting.costs import SURE, DraftSource, StepShape, levels_after
from hunch.drafting.draft_model import DeviceDraftModel
from hunch.drafting.following import DeviceFollower
from hunch.drafting.lookup import DeviceLookup
from hunch.kernels.step import NEVER
from hunch.models.decoder import Hidden

if TYPE_CHECKING:
    from hunch.kernels.step import Draws, RowState, StepRows

CHAIN_NODES = (1, 3, 7, 11)  # checked in steps of a network's chains, where it drafts as many
SHORT_CHAIN = 3  # nodes that a model drafts before a phrase table goes on


class TreeSize(NamedTuple):
    """The size of a network's trees; all of their levels have `width` nodes."""

    width: int
    num_levels: int

    @property
    def num_nodes(self) -> int:
        return self.width * self.num_levels


# Alone, so that 16 packed tokens are checked at once, and with a lookup's guesses beside it.
TREE, MERGED_TREE = TreeSize(3, 5), TreeSize(4, 7)


class DeviceWithLookups(DeviceDrafter):
    """What lookups beside a network of any kind have in common.

    In steps of the network it guesses for every row, a chain or a small tree, and rows whose end
    stood in their text before, for `SURE` tokens or more, take what followed. In merged steps a
    larger tree stays and what followed is checked beside it, however short the match.
    """

    def __init__(
        self, matches: DeviceLookup, model: DeviceDrafter, room: int, *, has_trees: bool
    ) -> None:
        self.matches = matches
        self.tree_sizes: dict[int, TreeSize] = {}  # by source
        self.sizes: dict[int, int] = {}  # nodes of trees and what is beside them, by source
        for source, size, beside in (
            (DraftSource.TREE, TREE, 0),
            (DraftSource.MERGED, MERGED_TREE, matches.num_nodes),
        ):
            tree = size._replace(num_levels=min(size.num_levels, model.num_levels))
            num_nodes = tree.num_nodes + beside
            if has_trees and tree.num_levels > 1 and num_nodes <= room:
                self.tree_sizes[source], self.sizes[source] = tree, num_nodes
        super().__init__(
            name="auto",
            num_levels=model.num_levels,
            num_nodes=max(matches.num_nodes, model.num_nodes, *self.sizes.values()),
            margin=matches.margin,
        )

    @property
    def is_guided(self) -> bool:
        return self.matches.is_guided

    @property
    def chain_sizes(self) -> list[int]:
        return sorted({min(size, self.num_levels) for size in CHAIN_NODES})

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        chains = [StepShape(size, DraftSource.CHAIN) for size in self.chain_sizes]
        trees = [StepShape(size, source) for source, size in self.sizes.items()]
        return (*self.matches.shapes, *chains, *trees)

    def levels(self, source: int) -> int:
        return self.tree_sizes[source].num_levels if source in self.sizes else self.chain_sizes[-1]

    def depth(self, source: int) -> int:
        """A chain may be checked as a tree, as deep as it has nodes."""
        return self.sizes.get(source, 0)

    def add_matches(
        self, state: RowState, step: StepRows, source: int, drafted: tuple[int, int] = (0, 0)
    ) -> None:
        """What lookups say, in place of what the network drafted, after it or beside it."""
        from hunch.kernels.gpu_graft import graft
        from hunch.kernels.gpu_lookup import lookup

        at, is_merged = self.matches, source == DraftSource.MERGED
        match, sure = (at.min_match, at.max_match), NEVER if is_merged else SURE
        lookup(state, step, self.num_nodes, *match, sure, phrases=at.phrases, drafted=drafted)
        if is_merged:
            graft(state, step, self.num_nodes, at.num_nodes)

    def works(self, source: int) -> bool:
        return source != DraftSource.NOBODY

    def name_of(self, source: int, matched: int, network: str) -> str:
        return self.matches.name if source <= 0 or matched >= SURE else network


class DeviceAuto(DeviceWithLookups):
    """Lookups beside a draft model or Medusa's kind of heads.

    The cheaper source of its steps is the lookup alone. Tokens that were accepted from a lookup
    have no KV of a draft model's, so it processes anew as many tokens as the step could have
    committed.

    Where there is a phrase table, half of a long chain and a node more are the model's, and the
    table goes on from there: its guesses cost nothing but the rows that check them. On answers of
    the default model, 4 levels had 3.41 tokens per pass alone and 3.61 with two nodes of the table.
    Short chains are all the model's, which is right more often: steps of many rows check those, and
    there a node that is checked costs more than a level that is drafted.
    """

    def __init__(
        self, matches: DeviceLookup, model: DeviceDrafter, room: int, *, only_chains: bool
    ) -> None:
        has_trees = isinstance(model, DeviceDraftModel) and not only_chains
        super().__init__(matches, model, room, has_trees=has_trees)
        # Guesses of both stand in one place.
        self.model = replace(model, num_nodes=self.num_nodes)
        self.trees: dict[int, DeviceDraftModel] = {}
        for source, (width, num_levels) in self.tree_sizes.items():
            assert isinstance(self.model, DeviceDraftModel)
            self.trees[source] = replace(
                self.model, num_levels=num_levels, level_size=width, width=width, branch=width
            )

    @property
    def network(self) -> Network | None:
        return self.model.network

    @property
    def goes_on(self) -> bool:
        """Whether a phrase table goes on where the model's chains end."""
        return self.matches.phrases is not None and isinstance(self.model, DeviceDraftModel)

    def _of_model(self, num_nodes: int) -> int:
        """Levels of a chain that the model drafts."""
        of_model = max(num_nodes // 2 + 1, SHORT_CHAIN) if self.goes_on else num_nodes
        return min(of_model, num_nodes, self.num_levels)

    @property
    def chain_sizes(self) -> list[int]:
        if not self.goes_on:
            return super().chain_sizes
        most = min(2 * self.num_levels, self.num_nodes)
        return sorted({min(size, most) for size in CHAIN_NODES})

    def draft(
        self, state: RowState, step: StepRows, hidden: Hidden, draws: Draws, source: int = 0
    ) -> None:
        model = self.model
        if not source:
            self.matches.look(state, step, self.num_nodes)
            return
        num_tokens = step.path_RK.shape[1]  # that this step could have committed
        drafted = (0, 0)
        if source in self.trees:
            tree = self.trees[source]
            tree.grow(state, step, draws, tree.num_levels, num_tokens)
        elif isinstance(model, DeviceDraftModel):
            size = levels_after(num_tokens, self.levels(source))
            drafted = self._of_model(size), size
            model.grow(state, step, draws, drafted[0], num_tokens)
        else:
            model.draft(state, step, hidden, draws, source)
        self.add_matches(state, step, source, drafted)

    def writes_kv(self, source: int) -> bool:
        return self.model.writes_kv(source)

    def can_follow(self, rows: Rows) -> bool:
        return self.model.can_follow(rows)

    def drafted_by(self, source: int, matched: int) -> str:
        return self.name_of(source, matched, self.model.name)


class DeviceAutoHead(DeviceWithLookups):
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
        self, state: RowState, step: StepRows, hidden: Hidden, draws: Draws, source: int = 0
    ) -> None:
        if source != DraftSource.LOOKUP_ALONE:
            head = self.trees.get(source, self.head)
            head.draft(state, step, hidden, draws, source)
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
