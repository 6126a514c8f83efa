"""The target's best successors of each token, on a device, and trees of them: the specification.

A *slot* here is an entry of the table of successors, not of the KV cache.

Shape letters: as in `step`; S slots of the table, C successors of a token, T packed tokens, V
vocabulary, N nodes of a tree of ranks, P ranks on the path to a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hunch.kernels.step import DRAFTED, MATCHED, RowState, StepRows, live_rows


@dataclass(slots=True)
class Successors:
    """Slot token % S holds a token and its successors. One slot more is written and never read."""

    token_S: Tensor  # int32; -1: none
    next_SC: Tensor  # int32, best first

    @staticmethod
    def create(num_slots: int, width: int, device: torch.device | str) -> Successors:
        return Successors(
            torch.full((num_slots + 1,), -1, dtype=torch.int32, device=device),
            torch.zeros(num_slots + 1, width, dtype=torch.int32, device=device),
        )

    @property
    def num_slots(self) -> int:
        return len(self.token_S) - 1

    def keep(self, ids_T: Tensor, is_token_T: Tensor, logits_TV: Tensor) -> None:
        """Keep the best successors of these tokens.

        Of equal logits, the lower token comes first. If tokens share a slot, the last one keeps it.
        """
        size = self.num_slots
        place_T = torch.arange(len(ids_T), device=ids_T.device)
        slot_T = torch.where(is_token_T, ids_T % size, size)
        last_S = place_T.new_full((size + 1,), -1).scatter_reduce_(0, slot_T, place_T, "amax")
        slot_T = torch.where(last_S[slot_T] == place_T, slot_T, size)
        best_TV = logits_TV.sort(dim=-1, descending=True, stable=True).indices
        self.token_S.index_copy_(0, slot_T, ids_T.int())
        self.next_SC.index_copy_(0, slot_T, best_TV[:, : self.next_SC.shape[1]].int())

    def find(self, token: int) -> list[int]:
        """The successors of a token; none: it was not seen, or another one took its slot."""
        slot = token % self.num_slots
        found: list[int] = self.next_SC[slot].tolist()
        return found if int(self.token_S[slot]) == token else []

    def clear(self) -> None:
        self.token_S.fill_(-1)


@dataclass(slots=True)
class RankTree:
    """A tree whose nodes are ranks among successors, likeliest first, parents before children."""

    rank_NP: Tensor  # on the path to each node, itself included; -1 after the last
    parent_N: Tensor

    @staticmethod
    def of(ranks: Sequence[int], parents: Sequence[int], device: torch.device | str) -> RankTree:
        paths: list[list[int]] = []
        for rank, parent in zip(ranks, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else ()), rank])
        depth = max(map(len, paths))
        lines = [path + [-1] * (depth - len(path)) for path in paths]
        return RankTree(
            torch.tensor(lines, dtype=torch.int64, device=device),
            torch.tensor(parents, dtype=torch.int64, device=device),
        )

    def first(self, num_nodes: int) -> RankTree:
        """The tree of the first nodes."""
        return RankTree(self.rank_NP[:num_nodes], self.parent_N[:num_nodes])


def recycled_ref(state: RowState, step: StepRows, successors: Successors, tree: RankTree) -> None:
    """Draft a tree of successors: no nodes after tokens that have none in the table, and none past
    the row's end (`end_X`)."""
    depth_N = (tree.rank_NP >= 0).sum(1).tolist()
    for r, row in live_rows(state, step):
        known = int(state.known_X[row])
        left = int(state.end_X[row]) - known - 1  # levels that can still be committed
        tokens = {-1: int(state.tokens_XL[row, known - 1])}
        numbers = {-1: -1}
        for node, parent in enumerate(tree.parent_N.tolist()):
            found = successors.find(tokens[parent]) if parent in tokens else []
            if found and depth_N[node] <= left:
                tokens[node] = found[int(tree.rank_NP[node, depth_N[node] - 1])]
                numbers[node] = len(numbers) - 1
                state.draft_XG[row, numbers[node]] = tokens[node]
                state.parents_XG[row, numbers[node]] = numbers[parent]
        count = min(len(numbers) - 1, int(step.max_draft_R[r]))
        state.num_nodes_X[row], step.result_RC[r, DRAFTED], step.result_RC[r, MATCHED] = (
            count, count, 1,
        )  # fmt: skip
