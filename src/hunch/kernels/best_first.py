"""Best-first trees: of all paths through the levels of a draft, the likeliest (arXiv 2604.12989).

A node's chance is the product of the chances on its path, so no child is likelier than its parent:
the likeliest nodes are a tree, and the likeliest few of them are one too. While a tree grows level
by level, it holds the likeliest nodes so far, likeliest first. Among equals, the one nearer to the
root comes first, then the one whose parent comes first, then the better child.

`gpu_best_first` holds the kernels; what they do is said here in plain Python.

Shape letters: as in `step` (R rows of the step, X rows of the engine, G nodes of a draft); T packed
nodes that get children, C columns of a network's logits, B children of a node, P longest path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.process import process_ref
from hunch.kernels.step import DRAFTED, MATCHED, Draws, RowState, StepRows, live_rows

MIN_REST = 1e-9  # least chance that all children but the best share


def nodes_grown(num_nodes: int, num_levels: int, branch: int, most: int | None) -> tuple[int, ...]:
    """How many nodes of each level get children: all that could have one in such a tree.

    Nodes at a depth that all have a child stand below one node per level above them. `most` is an
    upper bound for networks to which each such node costs a pass.
    """
    widest = num_nodes if most is None else most
    return tuple(
        max(min(branch ** (depth + 1), (num_nodes - depth) // 2, widest), 1)
        for depth in range(num_levels - 1)
    )


@dataclass(slots=True)
class Growth:
    """The trees of a step's rows while they grow; their nodes are in the rows' drafts."""

    size: int  # most nodes of a tree
    branch: int  # children looked at per node
    grown: tuple[int, ...]  # nodes of each level that get children; the last level's get none
    chance_RG: Tensor  # log of each node's chance; -inf: there is none
    node_T: Tensor  # the nodes that get children next, by their place in the tree; -1: none
    path_TP: Tensor  # tokens that lead to these; -1 after the last

    @staticmethod
    def begin(
        ids_R: Tensor, size: int, num_levels: int, branch: int, most: int | None = None
    ) -> Growth:
        num_rows = len(ids_R)
        return Growth(
            size,
            branch,
            nodes_grown(size, num_levels, branch, most),
            torch.empty(num_rows, size, dtype=torch.float32, device=ids_R.device),
            ids_R.new_full((num_rows,), -1),
            ids_R.new_full((num_rows, max(num_levels - 1, 1)), -1),
        )


def keep_likeliest_ref(
    state: RowState, step: StepRows, chances_RN: Tensor, *, level_size: int, most: int,
    least: float | None,
) -> None:  # fmt: skip
    """Of trees that grew level by level (`draft.grow_level_ref`), keep the likeliest nodes.

    First come those on the path of first children, which the target is likeliest to take, then the
    likeliest ones. So the first few of those kept are a tree too.
    chances_RN: log of each node's chance; least: the lowest that stays.
    """
    num_grown, first_guess = chances_RN.shape[1], step.guesses_at
    for r, row in live_rows(state, step):
        room, left = int(step.max_draft_R[r]), int(state.end_X[row]) - int(state.known_X[row])
        tokens: list[int] = state.draft_XG[row, :num_grown].tolist()
        parents: list[int] = state.parents_XG[row, :num_grown].tolist()
        chances: list[float] = chances_RN[r].tolist()
        # Nodes without a slot got no children, nor did those of the row's last token.
        nodes = [
            n
            for n in range(num_grown)
            if n // level_size < left - 1
            and parents[n] < room
            and (least is None or chances[n] >= least)
        ]
        order = sorted(nodes, key=lambda n: -inf if n % level_size == 0 else -chances[n])
        order = order[: min(room, most)]
        place = {n: new for new, n in enumerate(order)} | {-1: -1}
        step.result_RC[r, first_guess : first_guess + num_grown] = -1
        for new, n in enumerate(order):
            state.draft_XG[row, new], state.parents_XG[row, new] = tokens[n], place[parents[n]]
            step.result_RC[r, first_guess + new] = tokens[n]
        state.num_nodes_X[row], step.result_RC[r, DRAFTED] = len(order), len(order)


@dataclass(frozen=True, slots=True)
class RankedLevel:
    """A level of a tree whose shape is the same in every step."""

    depth: int
    first: int  # number of its first node
    rank_N: Tensor  # each node's token is the one of this rank
    parent_N: Tensor
    num_ranks: int  # ranks in use


def trusted(gain_MB: Tensor, odds_M: Tensor) -> Tensor:
    """Logs of children's chances, where a confidence head gives the log-odds of the best ones.

    The others share the rest, in proportion; the best must stay the best.
    """
    first_M1 = functional.logsigmoid(odds_M)[:, None]
    rest_M1 = (1.0 - gain_MB[:, :1].exp()).clamp(min=MIN_REST)
    shared_MB = gain_MB + (functional.logsigmoid(-odds_M)[:, None] - rest_M1.log())
    return torch.cat((first_M1, torch.minimum(shared_MB[:, 1:], first_M1)), dim=1)


def extend_ref(
    state: RowState, step: StepRows, growth: Growth, logits_TC: Tensor, sampling: Any, *,
    depth: int, ids_C: Tensor | None, odds_T: Tensor | None, least: float | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Add the children that are among the likeliest nodes; others make room for them.

    logits_TC: scores after the nodes that get children, or one line per row if all of the row's
    nodes have the same; odds_T, for greedy rows, log-odds of the best guess after each node.
    least: log of a chance that nodes must be above.
    Returns the tokens of the nodes that get children next, and the place of each one's parent among
    those before; after the last level None.
    """
    num_rows = len(step.ids_R)
    num_parents = len(growth.node_T) // num_rows
    token_TB, gain_TB = _children(
        state, step, growth, logits_TC, sampling, depth=depth, ids_C=ids_C, odds_T=odds_T
    )
    is_last = depth == len(growth.grown)
    num_grown = 0 if is_last else growth.grown[depth]
    node_T = growth.node_T.new_full((num_rows * num_grown,), -1)
    next_T, path_TP = torch.zeros_like(node_T), growth.path_TP.new_full((len(node_T), 1), -1)
    path_TP = path_TP.repeat(1, growth.path_TP.shape[1])
    up_T = torch.arange(num_rows).repeat_interleave(num_grown).to(node_T) * num_parents
    for r, row in live_rows(state, step):
        nodes = _nodes(state, growth, r, row) if depth else []
        first, num_before = r * num_parents, len(nodes)
        left = int(state.end_X[row]) - int(state.known_X[row])
        for m in range(first, first + num_parents if depth < left - 1 else first):
            parent = int(growth.node_T[m])
            if depth and parent < 0:
                continue
            for b in range(growth.branch):
                before = growth.chance_RG[r, parent] if depth else 0.0
                chance = float(before + gain_TB[m, b])
                if chance > (-inf if least is None else least):
                    nodes.append((chance, int(token_TB[m, b]), parent, m))
        order = sorted(range(len(nodes)), key=lambda n: -nodes[n][0])[: growth.size]
        _keep(state, growth, r, row, [nodes[n] for n in order], order)
        grown = [place for place, n in enumerate(order) if n >= num_before][:num_grown]
        for at, place in enumerate(grown, start=r * num_grown):
            _, token, _, m = nodes[order[place]]
            node_T[at], next_T[at], up_T[at] = place, token, m
            path_TP[at] = growth.path_TP[m]
            path_TP[at, depth] = token
        if is_last:
            _finish(state, step, r, len(order), growth.size)
    growth.node_T, growth.path_TP = node_T, path_TP
    return None if is_last else (next_T, up_T)


def _children(
    state: RowState, step: StepRows, growth: Growth, logits_TC: Tensor, sampling: Any, *,
    depth: int, ids_C: Tensor | None, odds_T: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tokens of each node's best children and the logs of their chances."""
    num_parents = len(growth.node_T) // len(step.ids_R)
    row_T = step.ids_R.clamp(min=0).repeat_interleave(num_parents)
    if len(logits_TC) < len(row_T):
        logits_TC = logits_TC.repeat_interleave(num_parents, dim=0)
    pos_T = state.known_X[row_T] + depth
    if step.has_rules:
        tables = sampling.processors.tables
        logits_TC = process_ref(logits_TC, row_T, pos_T, growth.path_TP, tables, ids_C=ids_C)
    score_TC = (
        sampling.scores(logits_TC, row_T, pos_T, ids_C) if step.draws != Draws.GREEDY else logits_TC
    )
    column_TB = score_TC.sort(dim=1, descending=True, stable=True).indices[:, : growth.branch]
    gain_TB = score_TC.float().log_softmax(-1).gather(1, column_TB)
    if odds_T is not None:
        is_greedy_T1 = sampling.temperature_X[row_T, None] <= 0
        gain_TB = torch.where(is_greedy_T1, trusted(gain_TB, odds_T.float()), gain_TB)
    return column_TB if ids_C is None else ids_C[column_TB], gain_TB


def _nodes(state: RowState, growth: Growth, r: int, row: int) -> list[tuple[float, int, int, int]]:
    """The row's nodes so far: chance, token and parent of each."""
    chances: list[float] = growth.chance_RG[r].tolist()
    columns = zip(
        chances, state.draft_XG[row].tolist(), state.parents_XG[row].tolist(), strict=False
    )
    return [(chance, token, parent, -1) for chance, token, parent in columns if chance > -inf]


def _keep(
    state: RowState, growth: Growth, r: int, row: int,
    nodes: Sequence[tuple[float, int, int, int]], order: Sequence[int],
) -> None:  # fmt: skip
    """Write the nodes; their parents are given by the places that `order` tells."""
    place = {n: new for new, n in enumerate(order)} | {-1: -1}
    growth.chance_RG[r] = -inf
    for new, (chance, token, parent, _) in enumerate(nodes):
        growth.chance_RG[r, new] = chance
        state.draft_XG[row, new], state.parents_XG[row, new] = token, place[parent]


def _finish(state: RowState, step: StepRows, r: int, count: int, size: int) -> None:
    """The row's tree is whole: write how many nodes may be checked, and the guesses."""
    row, first = int(step.ids_R[r]), step.guesses_at
    step.result_RC[r, first : first + size] = -1
    step.result_RC[r, first : first + count] = state.draft_XG[row, :count]
    count = min(count, int(step.max_draft_R[r]))
    state.num_nodes_X[row] = count
    step.result_RC[r, MATCHED], step.result_RC[r, DRAFTED] = 1, count


def ranked_ref(
    state: RowState, step: StepRows, logits_RC: Tensor, sampling: Any, level: RankedLevel,
    ids_C: Tensor | None,
) -> None:  # fmt: skip
    """A level of a tree of one shape. Levels past a row's last token are left out."""
    row_R = step.ids_R.clamp(min=0)
    pos_R = state.known_X[row_R] + level.depth
    score_RC = (
        sampling.scores(logits_RC, row_R, pos_R, ids_C) if step.draws != Draws.GREEDY else logits_RC
    )
    column_RB = score_RC.sort(dim=1, descending=True, stable=True).indices[:, : level.num_ranks]
    token_RN = (column_RB if ids_C is None else ids_C[column_RB])[:, level.rank_N]
    last, first_guess = level.first + len(level.rank_N), step.guesses_at
    for r, row in live_rows(state, step):
        nodes = slice(level.first, last)
        state.draft_XG[row, nodes], state.parents_XG[row, nodes] = token_RN[r], level.parent_N
        step.result_RC[r, first_guess + level.first : first_guess + last] = token_RN[r]
        count = int(state.num_nodes_X[row]) if level.depth else 0
        if level.depth < int(state.end_X[row]) - int(state.known_X[row]) - 1:
            count = min(int(step.max_draft_R[r]), last)
        state.num_nodes_X[row] = count
        step.result_RC[r, MATCHED], step.result_RC[r, DRAFTED] = 1, count
