"""Drafts grown level by level with a network: chains, chains with siblings, dynamic trees.

Shape letters: R rows of this step, K nodes of a level that are grown on, C children looked at, V
vocabulary, M packed nodes, P depth so far, N nodes of a draft, Q candidates so far, B siblings.

In a chain with siblings, level d holds nodes d * B .. d * B + B - 1. Only the first of them gets
children, so node d * B is the parent of level d + 1. What is kept does not depend on the drawn
tokens.

In a dynamic tree a node's confidence is its share of softmax(score), where the score is what the
target would compare: the logit for greedy rows, logit / T + the target's noise for the others. A
node's value is the product of the confidences on its path. The path of first children is always
kept: the target is likeliest to take it, whatever the values say.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft
from hunch.drafting.token_chooser import Array, Children, Feed, TokenChooser
from hunch.drafting.tree_shape import Level, TreeShape

KEEP = 1e6  # added to the key of the path that is always kept


def grow(
    logits_RV: Tensor, feed: Feed, chooser: TokenChooser, limit_R: Array, shape: TreeShape
) -> tuple[Draft, Array]:
    """A draft per row, at most limit_R nodes each, and the number of each node's KV slot.

    A node that was not processed has the number -1. `feed` is called at most depth - 1 times.
    """
    logits_RV, feed = chooser.with_rules(logits_RV, feed)
    if shape.is_dynamic:
        return _Tree(chooser, limit_R, shape).grow(logits_RV, feed)
    is_drawn = shape.is_chain and not (chooser.wants_q or shape.min_confidence)
    if is_drawn and len(limit_R) == 1:
        limit = min(int(limit_R[0]), shape.depth, shape.num_nodes)
        return _grow_single(logits_RV, feed, chooser, limit)
    return _grow_fixed(logits_RV, feed, chooser, limit_R, shape, is_drawn=is_drawn)


def _grow_single(
    logits_1V: Tensor, feed: Feed, chooser: TokenChooser, limit: int
) -> tuple[Draft, Array]:
    """The chain of a single row, without numpy: its calls would take too long on a CPU."""
    place_1 = np.zeros(1, dtype=np.int64)
    number_1N = np.arange(limit)[None]
    tokens: list[int] = []
    for depth in range(limit):
        token_1 = chooser.draw(logits_1V, place_1, depth)
        tokens.append(int(token_1[0]))
        if depth + 1 < limit:
            logits_1V = feed(Level(place_1, token_1, place_1, number_1N[:, : depth + 1]))
    draft = Draft(
        torch.tensor([tokens], dtype=torch.int64),
        torch.from_numpy(number_1N - 1),
        torch.tensor([limit]),
    )
    number_1N = number_1N.copy()
    number_1N[:, -1:] = -1  # drafted but not processed
    return draft, number_1N


def _grow_fixed(
    logits_MV: Tensor,
    feed: Feed,
    chooser: TokenChooser,
    limit_R: Array,
    shape: TreeShape,
    *,
    is_drawn: bool,  # a chain of which nothing but the tokens is needed
) -> tuple[Draft, Array]:
    """Every level has `shape.branch` nodes, drawn in order; the draft holds their q."""
    branch, num_rows = min(shape.branch, logits_MV.shape[1]), len(limit_R)
    limit_R = np.minimum(limit_R, min(shape.num_nodes, shape.depth * branch))
    num_levels = -(-int(limit_R.max(initial=0)) // branch)
    tokens_RN = np.zeros((num_rows, num_levels * branch), dtype=np.int64)
    num_nodes_R, value_R = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows)
    levels: list[tuple[Array, Children]] = []
    place_M = np.flatnonzero(limit_R > 0)
    if len(place_M) < num_rows:
        logits_MV = logits_MV[torch.from_numpy(place_M).to(logits_MV.device)]
    for depth in range(num_levels):
        if is_drawn:
            token_M = chooser.draw(logits_MV, place_M, depth)
            drawn = Children(token_M[:, None], np.zeros(len(place_M)))
        else:
            drawn = chooser.children(logits_MV, place_M, depth, branch)
        # Whether a level is kept must not depend on its tokens.
        value_R[place_M] += drawn.gain_M
        is_kept_M = np.full(len(place_M), True)
        if shape.min_confidence > 0:
            is_kept_M = value_R[place_M] >= np.log(shape.min_confidence)
        kept_M = place_M[is_kept_M]
        levels.append((place_M, drawn))
        tokens_RN[kept_M, depth * branch : (depth + 1) * branch] = drawn.token_MB[is_kept_M]
        num_nodes_R[kept_M] = np.minimum((depth + 1) * branch, limit_R[kept_M])
        goes_on_M = is_kept_M & (limit_R[place_M] > (depth + 1) * branch)
        if not goes_on_M.any():
            break
        place_M = place_M[goes_on_M]
        path_MP = np.broadcast_to(np.arange(depth + 1), (len(place_M), depth + 1))
        token_M = drawn.token_MB[goes_on_M, 0]
        logits_MV = feed(Level(place_M, token_M, np.flatnonzero(goes_on_M), path_MP))
    longest = int(num_nodes_R.max(initial=0))
    node_N = np.arange(longest)
    parent_N = np.where(node_N < branch, -1, (node_N // branch - 1) * branch)
    draft = Draft(
        torch.from_numpy(np.ascontiguousarray(tokens_RN[:, :longest])),
        torch.from_numpy(np.broadcast_to(parent_N, (num_rows, longest)).copy()),
        torch.from_numpy(num_nodes_R),
    )
    if levels and levels[0][1].q_MV is not None and longest:
        _note_draws(draft, levels, branch)
    # The first node of every level but the row's last was processed.
    last_R = (num_nodes_R[:, None] - 1) // branch
    is_fed_RN = (node_N % branch == 0) & (node_N // branch < last_R)
    return draft, np.where(is_fed_RN, node_N // branch, -1)


def _note_draws(draft: Draft, levels: list[tuple[Array, Children]], branch: int) -> None:
    """Add to the draft what each node was drawn from, and whether it was drawn."""
    first = levels[0][1].q_MV
    assert first is not None
    num_rows, num_nodes = draft.tokens_RN.shape
    q_RNV = first.new_zeros(num_rows, num_nodes, first.shape[1])
    is_sampled_RN = np.zeros((num_rows, num_nodes), dtype=np.bool_)
    for depth, (place_M, drawn) in enumerate(levels):
        for node in range(depth * branch, min((depth + 1) * branch, num_nodes)):
            assert drawn.q_MV is not None
            q_RNV[torch.from_numpy(place_M), node] = drawn.q_MV
            is_sampled_RN[place_M, node] = drawn.is_sampled_M
    draft.q_RNV, draft.is_sampled_RN = q_RNV, torch.from_numpy(is_sampled_RN)


class _Tree:
    """Grows one dynamic tree per row; holds all candidates so far, level by level."""

    def __init__(self, chooser: TokenChooser, limit_R: Array, shape: TreeShape) -> None:
        self.chooser, self.shape, self.branch = chooser, shape, shape.branch
        self.limit_R = np.minimum(limit_R, shape.num_nodes)
        self.depth_R = np.minimum(limit_R, shape.depth)
        # Each processed node needs a slot, and a row has as many as it may draft nodes.
        self.width_R = np.clip(self.limit_R // np.maximum(self.depth_R - 1, 1), 1, shape.width)
        self.token: list[Array] = []  # per level, [R, candidates]
        self.parent: list[Array] = []  # index among all candidates of the row; -1: the root
        self.key: list[Array] = []  # log value, plus KEEP on the path that is always kept
        self.number: list[Array] = []  # -1: not processed
        self.num_candidates = 0

    def grow(self, logits_MV: Tensor, feed: Feed) -> tuple[Draft, Array]:
        shape, num_rows = self.shape, len(self.limit_R)
        self.branch = min(shape.branch, logits_MV.shape[1])
        place_RK = np.arange(num_rows)[:, None]
        # Nodes of the level before, [R, K]: their indices among the candidates and in the pack.
        index_RK = np.full((num_rows, 1), -1)
        value_RK = np.zeros((num_rows, 1))
        packed_RK = place_RK.copy()
        path_RKP = np.empty((num_rows, 1, 0), dtype=np.int64)
        for depth in range(int(self.depth_R.max(initial=0))):
            token_RKC, value_RKC = self._children(logits_MV, packed_RK, value_RK, depth)
            self._add(token_RKC, value_RKC, index_RK, depth)
            if depth + 1 >= self.depth_R.max():
                break
            # The best nodes of this level get children; the one on the path always kept is first.
            key_RQ = self.key[-1]
            chosen_RK = np.argsort(-key_RQ, axis=1, kind="stable")[:, : shape.width]
            value_RK = np.take_along_axis(value_RKC.reshape(num_rows, -1), chosen_RK, 1)
            place_K = np.arange(chosen_RK.shape[1])
            number_RK = depth * self.width_R[:, None] + place_K
            is_fed_RK = np.isfinite(value_RK) & (place_K < self.width_R[:, None])
            is_fed_RK &= (self.depth_R > depth + 1)[:, None]
            if not is_fed_RK.any():
                break
            before_RK = chosen_RK // self.branch  # which node of the level before is its parent
            np.put_along_axis(self.number[-1], chosen_RK, np.where(is_fed_RK, number_RK, -1), 1)
            parent_path = np.take_along_axis(path_RKP, before_RK[:, :, None], 1)
            path_RKP = np.concatenate([parent_path, number_RK[:, :, None]], axis=2)
            level = Level(
                place_M=np.broadcast_to(place_RK, chosen_RK.shape)[is_fed_RK],
                token_M=np.take_along_axis(self.token[-1], chosen_RK, 1)[is_fed_RK],
                parent_M=np.take_along_axis(packed_RK, before_RK, 1)[is_fed_RK],
                path_MP=path_RKP[is_fed_RK],
            )
            index_RK = self.num_candidates - key_RQ.shape[1] + chosen_RK
            packed_RK = np.where(is_fed_RK, np.cumsum(is_fed_RK).reshape(is_fed_RK.shape) - 1, -1)
            logits_MV = feed(level)
        return self._select()

    def _children(
        self, logits_MV: Tensor, packed_RK: Array, value_RK: Array, depth: int
    ) -> tuple[Array, Array]:
        """The best children of each node: tokens and log values; -inf for missing nodes."""
        is_here_RK = packed_RK >= 0
        place_M = np.nonzero(is_here_RK)[0]
        token_MC, gain_MC = self.chooser.best(logits_MV, place_M, depth, self.branch)
        shape = (*packed_RK.shape, self.branch)
        token_RKC = np.zeros(shape, dtype=np.int64)
        value_RKC = np.full(shape, -np.inf)
        token_RKC[is_here_RK] = token_MC
        value_RKC[is_here_RK] = value_RK[is_here_RK][:, None] + gain_MC
        if self.shape.min_confidence > 0:
            value_RKC[value_RKC < np.log(self.shape.min_confidence)] = -np.inf
        return token_RKC, value_RKC

    def _add(self, token_RKC: Array, value_RKC: Array, index_RK: Array, depth: int) -> None:
        num_rows = len(token_RKC)
        key_RQ = value_RKC.reshape(num_rows, -1).copy()
        key_RQ[self.depth_R <= depth] = -np.inf
        key_RQ[:, 0] += KEEP - depth  # -inf stays -inf
        self.token.append(token_RKC.reshape(num_rows, -1))
        self.parent.append(np.repeat(index_RK, token_RKC.shape[2], axis=1))
        self.key.append(key_RQ)
        self.number.append(np.full(key_RQ.shape, -1))
        self.num_candidates += key_RQ.shape[1]

    def _select(self) -> tuple[Draft, Array]:
        """Keep the best nodes: a tree, as no child's value is above its parent's."""
        num_rows = len(self.limit_R)
        if not self.token:
            return Draft.empty(num_rows), np.empty((num_rows, 0), dtype=np.int64)
        token_RQ, parent_RQ = np.concatenate(self.token, 1), np.concatenate(self.parent, 1)
        key_RQ, number_RQ = np.concatenate(self.key, 1), np.concatenate(self.number, 1)
        num_nodes_R = np.minimum(np.isfinite(key_RQ).sum(1), self.limit_R)
        longest = int(num_nodes_R.max(initial=0))
        order_RN = np.argsort(-key_RQ, axis=1, kind="stable")[:, :longest]
        place_RQ = np.full(key_RQ.shape, -1)
        np.put_along_axis(place_RQ, order_RN, np.arange(longest)[None], 1)
        parent_RN = np.take_along_axis(parent_RQ, order_RN, 1)
        parents_RN = np.where(
            parent_RN >= 0, np.take_along_axis(place_RQ, np.maximum(parent_RN, 0), 1), -1
        )
        is_node_RN = np.arange(longest) < num_nodes_R[:, None]
        draft = Draft(
            torch.from_numpy(np.where(is_node_RN, np.take_along_axis(token_RQ, order_RN, 1), 0)),
            torch.from_numpy(np.where(is_node_RN, parents_RN, -1)),
            torch.from_numpy(num_nodes_R),
        )
        numbers_RN = np.where(is_node_RN, np.take_along_axis(number_RQ, order_RN, 1), -1)
        return draft, numbers_RN
