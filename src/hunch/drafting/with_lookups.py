"""A network and a lookup on a device, in one step: what `auto` and `A+B` share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from hunch.drafting.base import DeviceDrafter, DraftModel
from hunch.drafting.lookup import DeviceLookup
from hunch.drafting.step_shapes import SURE_MATCH, DraftSource, StepShape
from hunch.kernels.phrases import ContinuedChain
from hunch.kernels.step import NEVER, RowState, StepRows


class TreeSize(NamedTuple):
    """The size of a network's trees."""

    level_size: int  # nodes of a level; of best-first trees on average
    num_levels: int
    num_beside: int = 0  # guesses of a lookup that are checked beside it
    most: int | None = None  # nodes checked in all, of the network's the likeliest; None: all

    @property
    def num_nodes(self) -> int:
        """Nodes checked in all."""
        return self.num_grown + self.num_beside if self.most is None else self.most

    @property
    def num_grown(self) -> int:
        """Nodes that the network drafts."""
        return self.level_size * self.num_levels

    @property
    def room(self) -> int:
        """Nodes that a draft needs room for: those drafted, or those checked."""
        return max(self.num_nodes, self.num_grown)


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
        self.lookup, self.network = lookup, network
        self.tree_sizes: dict[int, dict[int, TreeSize]] = {  # by source and nodes
            source: {size.num_nodes: size for size in sizes} for source, sizes in trees.items()
        }
        rooms = [size.room for some in self.tree_sizes.values() for size in some.values()]
        super().__init__(
            name=name,
            num_levels=network.num_levels,
            num_nodes=max((lookup.num_nodes, network.num_nodes, *rooms)),
            is_adaptive=is_adaptive,
            margin=lookup.margin,
            trained_len=network.trained_len,
            max_len=network.max_len,
        )
        self.longest_path = max(min(lookup.num_nodes, self.num_nodes), self.num_levels)

    @property
    def num_read(self) -> int:
        return self.lookup.num_guesses(self.num_nodes)

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

    @property
    def tree_shapes(self) -> tuple[StepShape, ...]:
        """The shapes of steps that check its trees."""
        sizes = self.tree_sizes.items()
        return tuple(StepShape(size, source) for source, some in sizes for size in some)

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
        num_tokens = step.num_nodes + 1
        return min(num_tokens, self.longest_path + 1) if step.methods is None else num_tokens

    def add_guesses(
        self, state: RowState, step: StepRows, source: int, chain: ContinuedChain | None = None
    ) -> None:
        """Put the lookup's guesses in place of the network's draft, after it or beside it.

        chain: the network's draft, if a table continues it.
        Common words are left out: the network, or the tree of successors, knows them better.
        """
        from hunch.kernels.gpu_graft import graft
        from hunch.kernels.gpu_lookup import lookup

        own, is_merged = self.lookup, source >= DraftSource.MERGED
        lookup(
            state, step, self.num_nodes, own.min_match, own.max_match,
            sure=NEVER if is_merged else SURE_MATCH, phrases=own.phrases if own.has_table else None,
            chain=chain, num_guesses=own.num_guesses(self.num_nodes),
        )  # fmt: skip
        if is_merged:
            size = self.tree_of(source, step.num_nodes)
            graft(state, step, size.num_beside, size.num_nodes)

    def runs_in(self, source: int) -> bool:
        return source != DraftSource.NOBODY or self.network.runs_in(source)
