"""Token recycling: a tree of the target's best successors of each token, as last seen.

Shape letters: M tokens checked, C successors kept per token, S slots of the table, T packed tokens,
V vocabulary.
Paper: arXiv 2408.08696. No training; the table stays under 2 MB and is shared by all requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from hunch.config import read_options
from hunch.draft import TargetStep
from hunch.drafting.base import DeviceDrafter, DrafterContext, Options
from hunch.drafting.lookup import Chances, LookupDrafter, LookupRow
from hunch.drafting.options import at_least_one
from hunch.drafting.step_shapes import DraftSource
from hunch.drafting.trees import Node, best_first, by_rank
from hunch.drafting.window import host
from hunch.errors import ConfigError
from hunch.kernels.step import RowState, StepRows
from hunch.kernels.successors import RankTree, Successors
from hunch.models.target import Hidden

MAX_BYTES = 2_000_000
# How often the successor of each rank is the target's choice, and the ratio per level: starting
# values, about those that the paper reports.
RANK_SHARES = (0.45, 0.14, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)
DEPTH_DECAY = 0.85
# Chances of a device's trees of 9, as measured on two models: of a token's best successors that one
# is right, and of a further level (0.49 and 0.35 on SmolLM2-135M, 0.49 and 0.48 on Qwen2.5-0.5B).
PRIOR = 0.45, 0.45


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingConfig:
    """Options of `recycling`."""

    num_nodes: int = 24  # most nodes of a tree
    depth: int = 6  # its longest path
    candidates: int = 8  # successors kept per token
    adaptive: bool = True  # fewer nodes if they do not pay

    def __post_init__(self) -> None:
        at_least_one(self, "num_nodes", "depth", "candidates", method="recycling")


@dataclass(slots=True)
class Tokens:
    """A request's text, of which only the last token counts."""

    tokens: list[int] = field(default_factory=list)

    def extend(self, tokens: list[int]) -> None:
        self.tokens += tokens


class RecyclingDrafter(LookupDrafter):
    """A direct-mapped table: slot token % S holds the token and its best successors."""

    def __init__(self, options: Options, path: str | None, context: DrafterContext) -> None:
        if path is not None:
            raise ConfigError("speculate='recycling' takes no path: it learns while it runs")
        self.config = read_options(RecyclingConfig, options, "recycling")
        width = min(self.config.candidates, len(RANK_SHARES), context.vocab_size)
        super().__init__(
            max_nodes=self.config.num_nodes,
            chances=Chances(
                {
                    depth * width + rank: RANK_SHARES[rank] * DEPTH_DECAY**depth
                    for depth in range(self.config.depth)
                    for rank in range(width)
                }
            ),
            context=context,
            is_adaptive=self.config.adaptive,
        )
        num_slots = min(context.vocab_size, MAX_BYTES // (4 * (width + 1)))
        self.token_S = np.full(num_slots, -1, dtype=np.int32)
        self.next_SC = np.zeros((num_slots, width), dtype=np.int32)
        self._device: Successors | None = None  # the table of captured steps
        num_bytes = self.token_S.nbytes + self.next_SC.nbytes
        self.needs = replace(self.needs, top=width, weight_bytes=num_bytes)

    def observe(self, step: TargetStep) -> None:
        super().observe(step)
        if step.checked_M is not None and step.top_MC is not None:
            token_M = host(step.checked_M)
            slot_M = token_M % len(self.token_S)
            self.token_S[slot_M] = token_M
            self.next_SC[slot_M] = host(step.top_MC)

    def new_text(self) -> Tokens:
        return Tokens()

    def guess(self, row: LookupRow) -> list[Node]:
        width = self.next_SC.shape[1]

        def expand(state: tuple[int, int]) -> Iterable[tuple[int, float, int, tuple[int, int]]]:
            token, depth = state
            slot = token % len(self.token_S)
            if depth == self.config.depth or self.token_S[slot] != token:
                return []
            return [
                (
                    follower,
                    self.chances.of(depth * width + rank, row.term),
                    depth * width + rank,
                    (follower, depth + 1),
                )
                for rank, follower in enumerate(self.next_SC[slot].tolist())
            ]

        return best_first((row.text.tokens[-1], 0), expand, self.config.num_nodes)

    def on_device(self) -> DeviceDrafter | None:
        """Trees of one shape, from a table on the device; None: the target checks chains alone."""
        context = self.context
        if not context.is_fused or context.only_chains:
            return None
        num_slots, width = self.next_SC.shape
        self._device = Successors.create(num_slots, width, context.device)
        asked = self.config.depth, self.config.num_nodes
        nodes = by_rank(RANK_SHARES[:width], DEPTH_DECAY, *asked)
        ranks, parents = [node.token for node in nodes], [node.parent for node in nodes]
        longest = _longest(parents)
        return DeviceRecycling(
            name="recycling",
            num_levels=longest[-1],
            level_size=-(-len(nodes) // longest[-1]),
            tree_nodes=len(nodes),
            is_adaptive=self.config.adaptive,
            successors=self._device,
            tree=RankTree.of(ranks, parents, context.device),
            longest=longest,
        )

    def clear(self) -> None:
        """Forget what was learned from all requests."""
        self.token_S[:] = -1
        if self._device is not None:
            self._device.clear()


def _longest(parents: list[int]) -> list[int]:
    """The longest path among the first nodes of a tree, for every number of them from none on."""
    depths: list[int] = []
    longest = [0]
    for parent in parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
        longest.append(max(longest[-1], depths[-1]))
    return longest


@dataclass(kw_only=True)
class DeviceRecycling(DeviceDrafter):
    """Trees of one shape, likeliest ranks first, drafted within the step.

    The table keeps the best successors of every token that a step processed. Chances of ranks are
    not learned here: the policy learns how many levels are accepted.
    """

    successors: Successors
    tree: RankTree
    longest: list[int]  # path among the first nodes of the tree, by their number

    @property
    def priors(self) -> Mapping[DraftSource, tuple[float, float]]:
        return dict.fromkeys(DraftSource, PRIOR)

    def see(self, ids_T: Tensor, slot_T: Tensor, logits_TV: Tensor) -> None:
        from hunch.kernels.gpu_recycle import keep

        keep(self.successors, ids_T, slot_T, logits_TV)

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        from hunch.kernels.gpu_recycle import recycled

        if self.drafts_in(source):
            recycled(state, step, self.successors, self.tree.first(self.tree_nodes))

    def levels(self, source: int, num_nodes: int) -> int:
        return self.longest[min(num_nodes or self.tree_nodes, self.tree_nodes)]

    def runs_in(self, source: int) -> bool:
        return True

    def drafts_in(self, source: int) -> bool:
        return source > 0
