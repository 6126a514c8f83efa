"""A network and a lookup on a device, in one step: what `auto` and `A+B` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from hunch.drafting.base import DeviceDrafter, DraftModel
from hunch.drafting.lookup import DeviceLookup
from hunch.drafting.step_shapes import SURE_MATCH, DraftSource
from hunch.kernels.step import NEVER, RowState, StepRows


class TreeSize(NamedTuple):
    """The size of a network's trees."""

    width: int  # nodes of a level; of best-first trees on average
    num_levels: int
    num_beside: int = 0  # guesses of a lookup that are checked beside it
    most: int | None = None  # nodes checked in all, of the network's the likeliest; None: all

    @property
    def num_nodes(self) -> int:
        return self.num_grown + self.num_beside if self.most is None else self.most

    @property
    def num_grown(self) -> int:
        """Nodes that the network drafts."""
        return self.width * self.num_levels


class DeviceWithLookups(DeviceDrafter):
    """A lookup beside a network of any kind.

    In merged steps the lookup's guesses are added to the network's tree, however short the match.
    In other steps of the network, rows with a match of `SURE_MATCH` tokens or more take the
    lookup's guesses instead of its draft.
    """

    def __init__(
        self,
        name: str,
        lookup: DeviceLookup,
        network: DeviceDrafter,
        trees: Mapping[DraftSource, Iterable[TreeSize]],
        *,
        is_adaptive: bool = True,
    ) -> None:
        self.lookup = lookup
        self.tree_sizes: dict[int, dict[int, TreeSize]] = {  # by source and nodes
            source: {size.num_nodes: size for size in sizes} for source, sizes in trees.items()
        }
        sizes = [size for some in self.tree_sizes.values() for size in some.values()]
        drafted = [max(size.num_nodes, size.num_grown) for size in sizes]
        super().__init__(
            name=name,
            num_levels=network.num_levels,
            num_nodes=max((lookup.num_nodes, network.num_nodes, *drafted)),
            is_adaptive=is_adaptive,
            margin=lookup.margin,
            trained_len=network.trained_len,
            max_len=network.max_len,
        )
        self.longest_path = max(min(lookup.num_nodes, self.num_nodes), self.num_levels)
        # Both write their guesses to the same columns.
        self.network = replace(network, num_nodes=self.num_nodes)

    @property
    def num_read(self) -> int:
        return self.lookup.most(self.num_nodes)

    @property
    def draft_model(self) -> DraftModel | None:
        return self.network.draft_model

    @property
    def priors(self) -> Mapping[DraftSource, tuple[float, float]]:
        return self.network.priors

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.network.feature_layers

    def see(self, ids_T: Tensor, slot_T: Tensor, logits_TV: Tensor) -> None:
        self.network.see(ids_T, slot_T, logits_TV)

    def writes_kv(self, source: int) -> bool:
        return self.network.writes_kv(source)

    @property
    def host_observes(self) -> bool:
        return self.network.host_observes

    @property
    def needed_group(self) -> int | None:
        return self.network.needed_group

    @property
    def has_table(self) -> bool:
        return self.lookup.has_table

    def tree_of(self, source: int, num_nodes: int) -> TreeSize:
        """The largest tree that fits into `num_nodes` nodes, or the smallest of all."""
        sizes = self.tree_sizes[source]
        return sizes[max((size for size in sizes if size <= num_nodes), default=min(sizes))]

    def levels(self, source: int, num_nodes: int) -> int:
        if source in self.tree_sizes:
            return self.tree_of(source, num_nodes).num_levels
        return super().levels(source, num_nodes)

    def num_beside(self, source: int, num_nodes: int) -> int:
        if source in self.tree_sizes:
            return self.tree_of(source, num_nodes).num_beside
        return super().num_beside(source, num_nodes)

    def depth(self, source: int) -> int:
        """A chain may be checked as a tree, whose depth is its number of nodes."""
        return self.longest_path if source in self.tree_sizes else 0

    def num_again(self, step: StepRows) -> int:
        """Known tokens that a draft model processes again: all that this step could commit.

        It has no KV of tokens that were accepted from a lookup, and a tree's nodes had other slots.
        Predictions may be longer than all other drafts.
        """
        num_tokens = step.path_RK.shape[1]
        return min(num_tokens, self.longest_path + 1) if step.methods is None else num_tokens

    def add_guesses(
        self, state: RowState, step: StepRows, source: int, drafted: tuple[int, int] = (0, 0)
    ) -> None:
        """Put the lookup's guesses in place of the network's draft, after it or beside it.

        Common words are left out: the network, or the tree of successors, knows them better.
        """
        from hunch.kernels.gpu_graft import graft
        from hunch.kernels.gpu_lookup import lookup

        at, is_merged = self.lookup, source >= DraftSource.MERGED
        match, sure = (at.min_match, at.max_match), NEVER if is_merged else SURE_MATCH
        phrases = at.phrases if at.has_table else None
        lookup(
            state,
            step,
            self.num_nodes,
            *match,
            sure,
            phrases,
            drafted,
            most=at.most(self.num_nodes),
        )
        if is_merged:
            size = self.tree_of(source, step.path_RK.shape[1] - 1)
            graft(state, step, self.num_nodes, size.num_beside, size.num_nodes)

    def runs_in(self, source: int) -> bool:
        return source != DraftSource.NOBODY or self.network.runs_in(source)
