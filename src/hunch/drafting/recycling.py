"""Token recycling: a tree of the likeliest successors of the last tokens.

Successors of a token are the target's best ones, as last seen. A table of common words, or one that
was counted from the target's answers, says what follows pairs of tokens, and single ones until they
were seen. All requests share what is learned; nothing is trained.

Shape letters: M tokens checked, W successors of a context, T packed tokens, V vocabulary, L levels.
Paper: arXiv 2408.08696.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hunch.config import read_options
from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.base import DeviceDrafter, DrafterContext, Options
from hunch.drafting.lookup import Chances, LookupDrafter
from hunch.drafting.options import at_least_one
from hunch.drafting.policy import best_count
from hunch.drafting.step_shapes import DraftSource
from hunch.drafting.trees import Node, ReusedDraft
from hunch.drafting.window import NewTokens, host
from hunch.errors import ConfigError
from hunch.kernels.lookup import MIN_CHANCE
from hunch.kernels.native_successors import NativeTrees
from hunch.kernels.phrases import PhraseTable
from hunch.kernels.step import RowState, StepRows
from hunch.kernels.successor_entries import WIDTH, Entries, mixed
from hunch.kernels.successor_trees import Chain, SuccessorTrees, TreeLimits
from hunch.kernels.successors import Successors, level_widths
from hunch.models.target import Hidden

LEAST_ALONE = 0.004  # chance of a path on the host, where no other method drafts
# Chances of a device's trees of 9, as measured on two models: of a token's best successors that one
# is right, and of a further level (0.49 and 0.35 on SmolLM2-135M, 0.49 and 0.48 on Qwen2.5-0.5B).
PRIOR = 0.45, 0.45


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingConfig:
    """Options of `recycling`."""

    num_nodes: int = 24  # most nodes of a tree
    depth: int = 6  # its longest path
    candidates: int = WIDTH  # the target's successors kept per token, at most 8
    adaptive: bool = True  # fewer nodes if they do not pay

    def __post_init__(self) -> None:
        at_least_one(self, "num_nodes", "depth", "candidates", method="recycling")


class RecyclingDrafter(LookupDrafter):
    """Trees from the successors of pairs of tokens and of single ones, likeliest paths first."""

    def __init__(
        self,
        options: Options,
        path: str | None,
        context: DrafterContext,
        entries: Entries | None = None,
        *,
        learns: bool = True,
    ) -> None:
        """`learns`: from the target's logits too; else it drafts beside a lookup."""
        if path is not None:
            raise ConfigError("speculate='recycling' takes no path: it learns while it runs")
        self.config = read_options(RecyclingConfig, options, "recycling")
        super().__init__(
            max_nodes=self.config.num_nodes,
            chances=Chances({}),
            context=context,
            is_adaptive=self.config.adaptive,
        )
        self.entries = entries  # that were there at the start
        size, num_best = context.vocab_size, self.config.candidates
        self.successors = Successors.create(size, "cpu", entries, num_best=num_best)
        self._device: Successors | None = None  # the table of captured steps
        min_chance = LEAST_ALONE if learns else MIN_CHANCE
        limits = TreeLimits(self.config.num_nodes, self.config.depth, min_chance)
        make = NativeTrees if context.target.backend.has_host_kernels else SuccessorTrees
        self.trees = make(self.successors, limits, context.max_rows)
        self._new = NewTokens()
        self._drafts: dict[tuple[int, int], ReusedDraft] = {}  # by row and size
        self.needs = replace(
            self.needs,
            top=self.successors.num_best if learns else 0,
            weight_bytes=self.successors.nbytes,
        )

    def observe(self, step: TargetStep) -> None:
        self.follow(step.rows, self._new.read(step.rows).ids)
        if self.needs.top and step.checked_M is not None and step.top_MC is not None:
            checked_M, top_MC = host(step.checked_M), host(step.top_MC)
            self.successors.keep_best(torch.from_numpy(checked_M), torch.from_numpy(top_MC))

    def follow(self, rows: Rows, ids: list[int]) -> None:
        for row, first, end in self._new.take(rows, ids):
            self.trees.follow(row, self._new.tokens_XL[row, first:end])

    def look(self, row: int) -> list[Node]:
        return self.look_beside(row, [])

    def look_beside(self, row: int, chain: list[Node]) -> list[Node]:
        """A tree with a lookup's guesses among its nodes."""
        tokens_N = np.array([node.token for node in chain], np.int64)
        chance_N = np.array([node.chance for node in chain], np.float64)
        trees = self.trees
        count = trees.guess(row, self.config.num_nodes, (tokens_N, chance_N))
        found = trees.tokens_N, trees.parents_N, trees.chance_N
        return list(map(Node, *(array[:count].tolist() for array in found)))

    def propose_beside(self, chain: Chain, row: int, limit: int, margin: float) -> Draft:
        """The draft of a step's only row, with a lookup's chain among its nodes: as many as pay.

        It is valid until the next draft of the row.
        """
        trees, device = self.trees, self.context.device
        found = trees.guess(row, limit, chain)
        count = best_count(trees.chance_N[:found].tolist(), self.context.cost, margin)
        reused = self._drafts.get((row, count))
        if reused is None:
            reused = self._drafts[row, count] = ReusedDraft(count)
        reused.tokens_N[:], reused.parents_N[:] = trees.tokens_N[:count], trees.parents_N[:count]
        return reused.draft if device.type == "cpu" else reused.draft.to(device)

    def forget(self, rows: list[int]) -> None:
        for row in rows:
            self._new.forget(row)
            self.trees.forget(row)

    def on_device(self) -> DeviceDrafter | None:
        """Trees with as many nodes on each level; None: the target checks chains alone."""
        context = self.context
        if not context.is_fused or context.only_chains:
            return None
        of_host = self.successors
        self._device = Successors.create(
            context.vocab_size, context.device, of_host.entries, num_best=of_host.num_best
        )
        return device_recycling(
            self._device, self.config.num_nodes, self.config.depth, is_adaptive=self.is_adaptive
        )

    def take_phrases(self, table: PhraseTable) -> None:
        """Use what was counted since the start, too."""
        if table.successors is None:
            return
        known = self.entries
        entries = table.successors if known is None else mixed(table.successors, known)
        for one in self._tables:
            one.entries = entries
            one.clear()

    def clear(self) -> None:
        """Forget what was learned from all requests."""
        for table in self._tables:
            table.clear()

    @property
    def _tables(self) -> list[Successors]:
        return [table for table in (self.successors, self._device) if table is not None]


def device_recycling(
    successors: Successors, num_nodes: int, num_levels: int, *, is_adaptive: bool
) -> DeviceRecycling:
    """Trees of this size or, as a level has few nodes, a smaller one."""
    widths = level_widths(num_nodes, num_levels)
    return DeviceRecycling(
        name="recycling",
        num_levels=len(widths),
        level_size=-(-sum(widths) // len(widths)),
        tree_nodes=sum(widths),
        is_adaptive=is_adaptive,
        successors=successors,
        width_L=torch.tensor(widths, device=successors.pair_S.device),
    )


@dataclass(kw_only=True)
class DeviceRecycling(DeviceDrafter):
    """Trees with a number of nodes for each level, drafted within the step, likeliest first.

    The table keeps the best successors of every token that a step processed. Chances are not
    learned here: the policy learns how many levels are accepted.
    """

    successors: Successors
    width_L: Tensor  # nodes of each level

    @property
    def priors(self) -> Mapping[DraftSource, tuple[float, float]]:
        return dict.fromkeys(DraftSource, PRIOR)

    def see(self, ids_T: Tensor, slot_T: Tensor, logits_TV: Tensor) -> None:
        from hunch.kernels.gpu_successors import keep

        keep(self.successors, ids_T, slot_T, logits_TV)

    def draft(self, state: RowState, step: StepRows, hidden: Hidden, source: int = 0) -> None:
        from hunch.kernels.gpu_successors import successor_tree

        if self.drafts_in(source):
            successor_tree(state, step, self.successors, self.width_L, self.tree_nodes)

    def levels(self, source: int, num_nodes: int) -> int:
        """So few of the likeliest nodes are about as deep as a tree of that size."""
        size = min(num_nodes or self.tree_nodes, self.tree_nodes)
        return len(level_widths(size, self.num_levels))

    def runs_in(self, source: int) -> bool:
        return True

    def drafts_in(self, source: int) -> bool:
        return source > 0
