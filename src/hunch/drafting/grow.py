"""Drafts grown level by level with a network: chains, and dynamic trees by confidence.

Shape letters: R rows of this step, K nodes of a level that are grown on, C children looked at, V
vocabulary, M packed nodes, P depth so far, N nodes of a draft, Q candidates so far.

A node's confidence is its share of softmax(score), where score is what the target would compare:
the logit for greedy rows, logit / T + the target's noise for the others. Its value is the product
of the confidences on its path. The first child of the first child ... is always kept: it is the
path the target is likeliest to take, whatever the values say.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft
from hunch.drafting.chain import grow_chain, grow_fixed
from hunch.drafting.judge import Array, Feed, Judge, Level, Shape

KEEP = 1e6  # added to the key of the path that is always kept


def grow(
    logits_RV: Tensor, feed: Feed, judge: Judge, limit_R: Array, shape: Shape
) -> tuple[Draft, Array]:
    """A draft per row, at most limit_R nodes each, and the number each node was processed under.

    A node that was never processed has the number -1. `feed` is called at most depth - 1 times.
    """
    if shape.is_fixed or (shape.is_chain and judge.wants_q):
        return grow_fixed(logits_RV, feed, judge, limit_R, shape)
    if shape.is_chain:
        return grow_chain(logits_RV, feed, judge, limit_R, shape)
    return _Tree(judge, limit_R, shape).grow(logits_RV, feed)


class _Tree:
    """One dynamic tree per row in the making: all candidates so far, level after level."""

    def __init__(self, judge: Judge, limit_R: Array, shape: Shape) -> None:
        self.judge, self.shape, self.branch = judge, shape, shape.branch
        self.limit_R = np.minimum(limit_R, shape.num_nodes)
        self.depth_R = np.minimum(limit_R, shape.depth)
        # What is grown on needs a slot each, and a row has as many as it may draft nodes.
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
        # Nodes of the level before, [R, K]: where each stands among the candidates and in the pack.
        index_RK = np.full((num_rows, 1), -1)
        value_RK = np.zeros((num_rows, 1))
        packed_RK = place_RK.copy()
        path_RKP = np.empty((num_rows, 1, 0), dtype=np.int64)
        for depth in range(int(self.depth_R.max(initial=0))):
            token_RKC, value_RKC = self._children(logits_MV, packed_RK, value_RK, depth)
            self._add(token_RKC, value_RKC, index_RK, depth)
            if depth + 1 >= self.depth_R.max():
                break
            # The best nodes of this level are grown on; the path always kept comes first.
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
        """The best children of each node: tokens and log values, -inf where there is no node."""
        is_here_RK = packed_RK >= 0
        place_M = np.nonzero(is_here_RK)[0]
        token_MC, gain_MC = self.judge.best(logits_MV, place_M, depth, self.branch)
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
        """Keep the best. A child's value is never above its parent's, so what is kept is a tree."""
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
