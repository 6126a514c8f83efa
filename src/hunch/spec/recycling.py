"""Token recycling: what the target last thought could follow each token, walked as a tree.

Shape letters: R rows of this step, M tokens checked, C candidates kept per token, N nodes, S slots.
Paper: arXiv 2408.08696. No training; the table stays under 2 MB and is shared by all requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hunch.config import read_options
from hunch.draft import Draft, Needs, Rows, TargetStep
from hunch.errors import ConfigError
from hunch.spec.base import DrafterContext
from hunch.spec.static import StaticTree, rank_tree
from hunch.spec.window import host

MAX_BYTES = 2_000_000
# How often the candidate of a rank is the target's choice, at the first level and per level after:
# start values for the shape of the tree, of the size the paper reports.
RANK_SHARES = (0.45, 0.14, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)
DEPTH_DECAY = 0.85


@dataclass(frozen=True, kw_only=True, slots=True)
class RecyclingOptions:
    """recycling[:KEY=VALUE]..."""

    num_nodes: int = 16
    depth: int = 6
    candidates: int = 8  # kept per token


class RecyclingDrafter:
    """A direct-mapped table: slot token % S holds the token and its best successors."""

    def __init__(
        self, options: Mapping[str, str], path: str | None, context: DrafterContext
    ) -> None:
        if path is not None:
            raise ConfigError("speculate='recycling' takes no path: it learns while it runs")
        given = read_options(RecyclingOptions, options, "recycling")
        for name in ("num_nodes", "depth", "candidates"):
            if getattr(given, name) < 1:
                raise ConfigError(f"recycling: {name}={getattr(given, name)} must be 1 or more")
        self.context = context
        width = min(given.candidates, len(RANK_SHARES), context.vocab_size)
        shares = [[s * DEPTH_DECAY**d for s in RANK_SHARES[:width]] for d in range(given.depth)]
        self.tree: StaticTree = rank_tree(shares, given.num_nodes)
        num_slots = min(context.vocab_size, MAX_BYTES // (4 * (width + 1)))
        self.token_S = np.full(num_slots, -1, dtype=np.int32)
        self.next_SC = np.zeros((num_slots, width), dtype=np.int32)
        self.needs = Needs(
            max_nodes=given.num_nodes,
            top=width,
            weight_bytes=self.token_S.nbytes + self.next_SC.nbytes,
        )

    def observe(self, step: TargetStep) -> None:
        if step.checked_M is None or step.top_MC is None:
            return
        token_M = host(step.checked_M)
        slot_M = token_M % len(self.token_S)
        self.token_S[slot_M] = token_M
        self.next_SC[slot_M] = host(step.top_MC)

    def propose(self, rows: Rows) -> Draft:
        """Breadth first along the fixed tree; a branch ends where a token was never checked."""
        ids_R = host(rows.ids_R)
        known_R, limit_R = host(rows.known_X)[ids_R], host(rows.max_draft_X)[ids_R]
        last_R = host(rows.tokens_XL)[ids_R, known_R - 1]
        tree, num_rows = self.tree, len(ids_R)
        num_nodes = len(tree.rank_N)
        token_RN = np.zeros((num_rows, num_nodes), dtype=np.int64)
        is_node_RN = np.zeros((num_rows, num_nodes), dtype=bool)
        for depth in range(tree.depth):
            here = np.flatnonzero(tree.depth_N == depth)
            parent = tree.parent_N[here]
            before = np.where(parent >= 0, token_RN[:, np.maximum(parent, 0)], last_R[:, None])
            slot = before % len(self.token_S)
            is_known = self.token_S[slot] == before
            if depth:
                is_known &= is_node_RN[:, parent]
            token_RN[:, here] = self.next_SC[slot, tree.rank_N[here]]
            is_node_RN[:, here] = is_known
        return _pack(tree, token_RN, is_node_RN, limit_R)

    def forget(self, rows: list[int]) -> None:
        """Nothing is kept per row."""


def _pack(
    tree: StaticTree, token_RN: np.ndarray, is_node_RN: np.ndarray, limit_R: np.ndarray
) -> Draft:
    """Drop what was not found, and close the gaps. Parents stay before their children."""
    count_R = np.minimum(is_node_RN.sum(1), limit_R)
    longest = int(count_R.max(initial=0))
    order_RN = np.argsort(~is_node_RN, axis=1, kind="stable")[:, :longest]
    place_RN = np.cumsum(is_node_RN, axis=1) - 1
    parent_RN = np.where(tree.parent_N >= 0, place_RN[:, np.maximum(tree.parent_N, 0)], -1)
    return Draft(
        torch.from_numpy(np.take_along_axis(token_RN, order_RN, 1)),
        torch.from_numpy(np.take_along_axis(parent_RN, order_RN, 1)),
        torch.from_numpy(count_R),
    )
