"""`A+B` on a device: a network's draft and a lookup's guesses as one tree, in every draft.

Trees of `recycling` count as a network's.
"""

from __future__ import annotations

from dataclasses import replace

from hunch.drafting.base import DeviceDrafter
from hunch.drafting.draft_model import DeviceDraftModel
from hunch.drafting.lookup import DeviceLookup
from hunch.drafting.step_shapes import DraftSource, StepShape
from hunch.drafting.with_lookups import DeviceWithLookups, TreeSize
from hunch.kernels.step import RowState, StepRows
from hunch.models.decoder import Hidden


class DeviceMerge(DeviceWithLookups):
    """All that both parts draft is checked.

    If it is adaptive, a step may check less of both, or nothing, whichever promises most. The
    network drafts in every step but those that check nothing.
    """

    def __init__(
        self,
        matches: DeviceLookup,
        model: DeviceDrafter,
        max_nodes: int,
        *,
        is_adaptive: bool,
    ) -> None:
        whole = within(TreeSize(model.level_size, model.num_levels, matches.num_nodes), max_nodes)
        sizes = cuts_of(whole) if is_adaptive else [whole]
        trees = {DraftSource.MERGED: sizes}
        super().__init__("merge", matches, model, trees, is_adaptive=is_adaptive)
        self.num_nodes = whole.num_nodes  # parts may draft more alone, for which there is no room
        self.models = {
            size: replace(
                model,
                num_levels=size.num_levels,
                num_nodes=self.num_nodes,
                tree_nodes=min(model.tree_nodes, size.width * size.num_levels),
            )
            for size in sizes
        }
        self.model = self.models[whole]

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        sizes = sorted(self.tree_sizes[DraftSource.MERGED])
        merged = tuple(StepShape(size, DraftSource.MERGED) for size in sizes)
        return (StepShape(0), *merged) if self.is_adaptive else merged

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        if source <= 0:
            if self.model.writes_kv(source):  # a head follows every step
                self.model.draft(state, step, hidden, source)
            self.matches.look(state, step, self.num_nodes)
            return
        num_tokens = step.path_RK.shape[1]  # that this step could have committed
        model = self.models[self.tree_of(source, num_tokens - 1)]
        if isinstance(model, DeviceDraftModel):
            # It has no KV of tokens that were accepted from the lookup.
            model.grow(state, step, model.num_levels, num_tokens)
        else:
            model.draft(state, step, hidden, source)
        self.add_matches(state, step, source)


def within(size: TreeSize, max_nodes: int) -> TreeSize:
    """The tree cut to `max_nodes` nodes: half of them for the network, as far as it drafts."""
    if size.num_nodes <= max_nodes:
        return size
    num_levels = max(1, min(size.num_levels, max_nodes // 2 // size.width))
    num_beside = min(size.num_beside, max_nodes - num_levels * size.width)
    num_levels = min(size.num_levels, (max_nodes - num_beside) // size.width)
    return TreeSize(size.width, num_levels, num_beside)


def cuts_of(size: TreeSize) -> list[TreeSize]:
    """The tree, the same with a quarter of the lookup's guesses, and half of the levels of that."""
    few = -(-size.num_beside // 4)
    levels = size.num_levels, -(-size.num_levels // 2)
    sizes = {size, *(TreeSize(size.width, num_levels, few) for num_levels in levels)}
    return sorted(sizes, key=lambda one: one.num_nodes)
