"""Drafts whose shape does not depend on what was drawn: chains, and chains with siblings.

Shape letters: R rows of this step, M packed rows, B siblings of a level, N nodes of a draft, V
vocabulary, P depth so far. Level d holds nodes d * B .. d * B + B - 1; the first of them is grown
on, so node d * B is the parent of level d + 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft
from hunch.drafting.judge import Array, Draw, Feed, Judge, Level, Shape


def grow_chain(
    logits_MV: Tensor, feed: Feed, judge: Judge, limit_R: Array, shape: Shape
) -> tuple[Draft, Array]:
    if len(limit_R) == 1 and shape.min_confidence <= 0:
        limit = min(int(limit_R[0]), shape.depth, shape.num_nodes)
        return _grow_one(logits_MV, feed, judge, limit)
    limit_R = np.minimum(limit_R, min(shape.depth, shape.num_nodes))
    num_rows, longest = len(limit_R), int(limit_R.max(initial=0))
    tokens_RN = np.zeros((num_rows, longest), dtype=np.int64)
    num_nodes_R, value_R = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows)
    number_RN = np.broadcast_to(np.arange(longest), (num_rows, longest))
    shortest = int(limit_R.min(initial=0))  # up to there, no row ends by its limit
    place_M = everyone_M = np.arange(num_rows)
    if not shortest:
        place_M = np.flatnonzero(limit_R > 0)
        logits_MV = logits_MV[torch.from_numpy(place_M)]
    for depth in range(longest):
        token_M, gain_M = _choose(logits_MV, judge, place_M, depth, shape.min_confidence)
        parent_M = everyone_M[: len(place_M)]
        if gain_M is not None:
            value_R[place_M] += gain_M
            parent_M = np.flatnonzero(value_R[place_M] >= np.log(shape.min_confidence))
            place_M, token_M = place_M[parent_M], token_M[parent_M]
        tokens_RN[place_M, depth] = token_M
        num_nodes_R[place_M] = depth + 1
        if depth + 1 >= shortest:
            goes_on_M = limit_R[place_M] > depth + 1
            parent_M, place_M = parent_M[goes_on_M], place_M[goes_on_M]
            token_M = token_M[goes_on_M]
        if not len(place_M):
            break
        path_MP = number_RN[: len(place_M), : depth + 1]
        logits_MV = feed(Level(place_M, token_M, parent_M, path_MP))
    longest = int(num_nodes_R.max(initial=0))
    draft = Draft(
        torch.from_numpy(tokens_RN[:, :longest]),
        torch.arange(-1, longest - 1).expand(num_rows, longest),
        torch.from_numpy(num_nodes_R),
    )
    # The last node of a row was drafted and never processed.
    number_RN = number_RN[:, :longest]
    return draft, np.where(number_RN < num_nodes_R[:, None] - 1, number_RN, -1)


def _grow_one(logits_1V: Tensor, feed: Feed, judge: Judge, limit: int) -> tuple[Draft, Array]:
    """The chain of a single row: on a CPU, what numpy takes per call would be felt here."""
    place_1 = np.zeros(1, dtype=np.int64)
    number_1N = np.arange(limit)[None]
    tokens: list[int] = []
    for depth in range(limit):
        token_1 = judge.draw(logits_1V, place_1, depth)
        tokens.append(int(token_1[0]))
        if depth + 1 < limit:
            logits_1V = feed(Level(place_1, token_1, place_1, number_1N[:, : depth + 1]))
    draft = Draft(
        torch.tensor([tokens], dtype=torch.int64),
        torch.from_numpy(number_1N - 1),
        torch.tensor([limit]),
    )
    number_1N = number_1N.copy()
    number_1N[:, -1:] = -1  # drafted, never processed
    return draft, number_1N


def _choose(
    logits_MV: Tensor, judge: Judge, place_M: Array, depth: int, min_confidence: float
) -> tuple[Array, Array | None]:
    """The likeliest token per row and, when someone asks, the log of its confidence."""
    if min_confidence <= 0:
        return judge.draw(logits_MV, place_M, depth), None
    token_M1, gain_M1 = judge.best(logits_MV, place_M, depth, 1)
    return token_M1[:, 0], gain_M1[:, 0]


def grow_fixed(
    logits_MV: Tensor, feed: Feed, judge: Judge, limit_R: Array, shape: Shape
) -> tuple[Draft, Array]:
    """Every level has `shape.branch` nodes, drawn in order; the draft says what from."""
    branch, num_rows = min(shape.branch, logits_MV.shape[1]), len(limit_R)
    limit_R = np.minimum(limit_R, min(shape.num_nodes, shape.depth * branch))
    num_levels = -(-int(limit_R.max(initial=0)) // branch)
    tokens_RN = np.zeros((num_rows, num_levels * branch), dtype=np.int64)
    num_nodes_R, value_R = np.zeros(num_rows, dtype=np.int64), np.zeros(num_rows)
    levels: list[tuple[Array, Draw]] = []
    place_M = np.flatnonzero(limit_R > 0)
    logits_MV = logits_MV[torch.from_numpy(place_M).to(logits_MV.device)]
    for depth in range(num_levels):
        drawn = judge.children(logits_MV, place_M, depth, branch)
        # Whether a level is kept is decided before its tokens are looked at.
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
    # Processed are the first nodes of every level but the row's last.
    last_R = (num_nodes_R[:, None] - 1) // branch
    is_fed_RN = (node_N % branch == 0) & (node_N // branch < last_R)
    return draft, np.where(is_fed_RN, node_N // branch, -1)


def _note_draws(draft: Draft, levels: list[tuple[Array, Draw]], branch: int) -> None:
    """What every node was drawn from, and whether it was."""
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
