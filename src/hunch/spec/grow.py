"""Drafts grown level by level with a network: chains, and dynamic trees by confidence.

Shape letters: R rows of this step, K nodes of a level that are grown on, C children looked at, V
vocabulary, M packed nodes, P depth so far, N nodes of a draft, Q candidates so far.

A node's confidence is its share of softmax(score), where score is what the target would compare:
the logit for greedy rows, logit / T + the target's noise for the others. Its value is the product
of the confidences on its path. The first child of the first child ... is always kept: it is the
path the target is likeliest to take, whatever the values say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft, Rows
from hunch.sampling.state import SamplingState
from hunch.spec.window import host

Array = np.ndarray
KEEP = 1e6  # added to the key of the path that is always kept


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How far and how wide to draft."""

    depth: int  # longest path
    num_nodes: int  # nodes kept
    width: int = 1  # nodes grown on per level
    branch: int = 1  # children looked at per node
    min_confidence: float = 0.0  # a path of a lower value is not followed

    @property
    def is_chain(self) -> bool:
        return self.width == 1 and self.branch == 1


@dataclass(slots=True)
class Level:
    """Drafted nodes of one depth that a network is to process, packed row after row."""

    place_M: Array  # the row's place in the step
    token_M: Array
    parent_M: Array  # packed index in the level before
    path_MP: Array  # numbers of the nodes from depth 0 to itself; numbers count processed nodes


class Judge:
    """The target's way to choose, for the rows of one step: their parameters and noise.

    `ids_C` names the target's token of each column where the network's vocabulary is a part of it.
    """

    def __init__(
        self, sampling: SamplingState, rows: Rows, device: torch.device, ids_C: Tensor | None
    ) -> None:
        self.sampling, self.ids_C, self.device = sampling, ids_C, device
        self.ids_R = host(rows.ids_R)
        self.known_R = host(rows.known_X)[self.ids_R]

    def draw(self, logits_MC: Tensor, place_M: Array, depth: int) -> Array:
        """The token the target would choose if these were its logits."""
        token_M = self.sampling.draw(logits_MC, *self._where(place_M, depth), self.ids_C)
        return host(token_M)

    def best(
        self, logits_MC: Tensor, place_M: Array, depth: int, num_best: int
    ) -> tuple[Array, Array]:
        """The likeliest tokens, best first, and the logs of their confidences."""
        scores_MC = self.sampling.scores(logits_MC, *self._where(place_M, depth), self.ids_C)
        top = scores_MC.topk(num_best, dim=-1)
        gain_MB = top.values - scores_MC.logsumexp(-1, keepdim=True)
        token_MB = top.indices if self.ids_C is None else self.ids_C[top.indices]
        # Rounding may say more than certain; a child must never be worth more than its parent.
        return host(token_MB), np.minimum(host(gain_MB.double()), 0.0)

    def _where(self, place_M: Array, depth: int) -> tuple[Tensor, Tensor]:
        row_M = torch.from_numpy(self.ids_R[place_M])
        pos_M = torch.from_numpy(self.known_R[place_M] + depth)
        return row_M.to(self.device), pos_M.to(self.device)


Feed = Callable[[Level], Tensor]  # process the nodes, return logits for what follows each


def grow(
    logits_RV: Tensor, feed: Feed, judge: Judge, limit_R: Array, shape: Shape
) -> tuple[Draft, Array]:
    """A draft per row, at most limit_R nodes each, and the number each node was processed under.

    A node that was never processed has the number -1. `feed` is called at most depth - 1 times.
    """
    if shape.is_chain:
        return _grow_chain(logits_RV, feed, judge, limit_R, shape)
    return _Tree(judge, limit_R, shape).grow(logits_RV, feed)


def _grow_chain(
    logits_MV: Tensor, feed: Feed, judge: Judge, limit_R: Array, shape: Shape
) -> tuple[Draft, Array]:
    limit_R = np.minimum(limit_R, min(shape.depth, shape.num_nodes))
    num_rows = len(limit_R)
    tokens_RN = np.zeros((num_rows, int(limit_R.max(initial=0))), dtype=np.int64)
    num_nodes_R = np.zeros(num_rows, dtype=np.int64)
    value_R = np.zeros(num_rows)
    place_M = np.flatnonzero(limit_R > 0)
    if len(place_M) < num_rows:
        logits_MV = logits_MV[torch.from_numpy(place_M)]
    for depth in range(tokens_RN.shape[1]):
        token_M, gain_M = _choose(logits_MV, judge, place_M, depth, shape.min_confidence)
        is_kept_M = None
        if gain_M is not None:
            value_R[place_M] += gain_M
            is_kept_M = value_R[place_M] >= np.log(shape.min_confidence)
            place_M, token_M = place_M[is_kept_M], token_M[is_kept_M]
        tokens_RN[place_M, depth] = token_M
        num_nodes_R[place_M] = depth + 1
        goes_on_M = limit_R[place_M] > depth + 1
        if not goes_on_M.any():
            break
        parent_M = np.arange(len(goes_on_M)) if is_kept_M is None else np.flatnonzero(is_kept_M)
        parent_M, place_M = parent_M[goes_on_M], place_M[goes_on_M]
        path_MP = np.broadcast_to(np.arange(depth + 1), (len(place_M), depth + 1))
        logits_MV = feed(Level(place_M, token_M[goes_on_M], parent_M, path_MP))
    longest = int(num_nodes_R.max(initial=0))
    draft = Draft(
        torch.from_numpy(np.ascontiguousarray(tokens_RN[:, :longest])),
        torch.arange(-1, longest - 1).expand(num_rows, longest),
        torch.from_numpy(num_nodes_R),
    )
    number_RN = np.broadcast_to(np.arange(longest), (num_rows, longest))
    # The last node of a row was drafted and never processed.
    return draft, np.where(number_RN < num_nodes_R[:, None] - 1, number_RN, -1)


def _choose(
    logits_MV: Tensor, judge: Judge, place_M: Array, depth: int, min_confidence: float
) -> tuple[Array, Array | None]:
    """The likeliest token per row and, when someone asks, the log of its confidence."""
    if min_confidence <= 0:
        return judge.draw(logits_MV, place_M, depth), None
    token_M1, gain_M1 = judge.best(logits_MV, place_M, depth, 1)
    return token_M1[:, 0], gain_M1[:, 0]


class _Tree:
    """One dynamic tree per row in the making: all candidates so far, level after level."""

    def __init__(self, judge: Judge, limit_R: Array, shape: Shape) -> None:
        self.judge, self.shape = judge, shape
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
            before_RK = chosen_RK // shape.branch  # which node of the level before is its parent
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
        token_MC, gain_MC = self.judge.best(logits_MV, place_M, depth, self.shape.branch)
        shape = (*packed_RK.shape, self.shape.branch)
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
