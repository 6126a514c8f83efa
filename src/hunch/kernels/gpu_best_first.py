"""Best-first trees on a device: three launches per level, and nothing after the last.

The first reads the logits (`gpu_grow`), the second merges what it found in the chunks of a line,
the third puts the children among the likeliest nodes so far. `best_first` says in plain Python what
a level does.

Shape letters: R rows of the step, N nodes that get children, B children of each, T packed nodes (R
times N), G nodes of a tree, X rows of the engine, C columns of the model's logits, K chunks of
them, P longest path.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.best_first import MIN_REST, Growth, RankedLevel
from hunch.kernels.gpu_filters import id_of, rank_of, score_of
from hunch.kernels.gpu_grow import RowSampling, children_of, log_totals, merged
from hunch.kernels.gpu_launch import next_power_of_2, options, take_turns
from hunch.kernels.gpu_process import process
from hunch.kernels.gpu_step import C_DRAFTED, C_MATCHED, live_row
from hunch.kernels.step import Draws, RowState, StepRows

LEAST_REST = tl.constexpr(MIN_REST)


# --- children -------------------------------------------------------------------------------------


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _merge_kernel(
    rank_ptr, top_ptr, mass_ptr, ids_ptr, token_ptr, gain_ptr, num_chunks, BRANCH: tl.constexpr,
    HAS_IDS: tl.constexpr, HAS_CHANCES: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The best children of one line of logits, best first, and the logs of their chances."""
    m = tl.program_id(0).to(tl.int64)
    take_turns()
    rank_1B = merged(rank_ptr, m, num_chunks, 1, BRANCH, 1, BLOCK_B, BLOCK_K)
    rank = tl.reshape(rank_1B, (BLOCK_B,))
    b = tl.arange(0, BLOCK_B)
    is_in = b < BRANCH
    token = id_of(rank)
    if HAS_IDS:
        token = tl.load(ids_ptr + token, mask=is_in, other=0)
    tl.store(token_ptr + m * BRANCH + b, token, mask=is_in)
    if HAS_CHANCES:
        top, log_total = log_totals(top_ptr, mass_ptr, m, num_chunks, 1, 1, BLOCK_K)
        gain_1B = (score_of(rank_1B) - top[:, None]) - log_total[:, None]
        tl.store(gain_ptr + m * BRANCH + b, tl.reshape(gain_1B, (BLOCK_B,)), mask=is_in)


# --- trees ----------------------------------------------------------------------------------------


@triton.jit
def _chances(
    gain_ptr, odds_ptr, line, place, b, is_in, is_greedy,
    BRANCH: tl.constexpr, HAS_ODDS: tl.constexpr,
):  # fmt: skip
    """Logs of the chances of children; a confidence head says that of the best (`trusted`)."""
    gain = tl.load(gain_ptr + line * BRANCH + b, mask=is_in, other=float("-inf"))
    if HAS_ODDS:
        odds = tl.load(odds_ptr + place, mask=is_in, other=0.0).to(tl.float32)
        best = tl.load(gain_ptr + line * BRANCH, mask=is_in, other=0.0)
        first = _log_sigmoid(odds)
        rest = tl.maximum(1.0 - tl.exp(best), LEAST_REST)
        shared = tl.minimum(gain + (_log_sigmoid(-odds) - tl.log(rest)), first)
        gain = tl.where(is_greedy, tl.where(b == 0, first, shared), gain)
    return gain


@triton.jit
def _moved(node, old, place):
    """The new places of nodes; -1 stays."""
    is_it = node[:, None] == old[None, :]
    return tl.sum(tl.where(is_it, place[None, :] + 1, 0), axis=1) - 1


@triton.jit
def _next_nodes(
    token, place, order, up, is_new, r, path_ptr, next_node_ptr, next_ptr, up_ptr, next_path_ptr,
    num_parents, num_grown, depth, max_path, HAS_PATHS: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Write the level's first nodes, which get children next, and where there are too few, none."""
    is_grown = is_new & (order < num_grown)
    at = r * num_grown + order
    tl.store(next_node_ptr + at, place, mask=is_grown)
    tl.store(next_ptr + at, token, mask=is_grown)
    tl.store(up_ptr + at, up, mask=is_grown)
    if HAS_PATHS:
        for i in range(depth):
            above = tl.load(path_ptr + up * max_path + i, mask=is_grown, other=-1)
            tl.store(next_path_ptr + at * max_path + i, above, mask=is_grown)
        tl.store(next_path_ptr + at * max_path + depth, token, mask=is_grown)
    w = tl.arange(0, BLOCK_W).to(tl.int64)
    is_empty = (w < num_grown) & (w >= tl.sum(is_new.to(tl.int64), axis=0))
    tl.store(next_node_ptr + r * num_grown + w, w * 0 - 1, mask=is_empty)
    tl.store(next_ptr + r * num_grown + w, w * 0, mask=is_empty)
    tl.store(up_ptr + r * num_grown + w, w * 0 + r * num_parents, mask=is_empty)


@triton.jit
def _finish(
    token, place, is_new, token_G, place_G, is_before, g, total, room, num_nodes_ptr, result_ptr,
    size, guesses_at,
):  # fmt: skip
    """Write a row's guesses, and how many of them may be checked."""
    guesses_ptr, count = result_ptr + guesses_at, tl.minimum(total, room)
    tl.store(guesses_ptr + place_G, token_G, mask=is_before)
    tl.store(guesses_ptr + place, token, mask=is_new)
    tl.store(guesses_ptr + g, g * 0 - 1, mask=(g >= total) & (g < size))
    tl.store(num_nodes_ptr, count)
    tl.store(result_ptr + C_MATCHED, tl.full((), 1, tl.int64))
    tl.store(result_ptr + C_DRAFTED, count)


@triton.jit
def _places(chance_G, is_before, g, chance, is_new, one):
    """Places of the nodes so far and of new ones, and the order of these among themselves.

    Of equals those that were there before come first.
    """
    key = tl.where(is_new, rank_of(chance, one), -1)
    order = tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1).to(tl.int64)
    is_ahead = is_before[None, :] & (chance_G[None, :] >= chance[:, None])
    place = order + tl.sum(is_ahead.to(tl.int32), axis=1)
    place_G = g + tl.sum((chance[None, :] > chance_G[:, None]).to(tl.int32), axis=1)
    return place_G, place, order


@triton.jit(do_not_specialize=["num_parents", "num_grown", "depth", "guesses_at", "least"])
def _extend_kernel(
    token_ptr, gain_ptr, odds_ptr, chance_ptr, node_ptr, path_ptr, rows_ptr, max_draft_ptr,
    num_checked_ptr, known_ptr, end_ptr, done_ptr, temperature_ptr, num_nodes_ptr, draft_ptr,
    parents_ptr, result_ptr, next_node_ptr, next_ptr, up_ptr, next_path_ptr, num_parents, num_grown,
    size, depth, max_path, draft_stride, result_stride, guesses_at, least, BRANCH: tl.constexpr,
    IS_SHARED: tl.constexpr, HAS_ODDS: tl.constexpr, HAS_NEXT: tl.constexpr,
    HAS_PATHS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_W: tl.constexpr,
):  # fmt: skip
    """One row: the children among the likeliest nodes; each node finds its own place."""
    r, row, is_row = live_row(rows_ptr, num_checked_ptr, done_ptr)
    left = tl.load(end_ptr + row) - tl.load(known_ptr + row)
    chance_ptr += r * size
    draft_ptr += row * draft_stride
    parents_ptr += row * draft_stride
    # The nodes so far, likeliest first.
    g = tl.arange(0, BLOCK_G).to(tl.int64)
    is_before = is_row & (g < size) & (depth > 0)
    chance_G = tl.load(chance_ptr + g, mask=is_before, other=float("-inf"))
    is_before &= chance_G > float("-inf")
    token_G = tl.load(draft_ptr + g, mask=is_before, other=0)
    parent_G = tl.load(parents_ptr + g, mask=is_before, other=-1)
    # Their children, one per thread.
    one = tl.arange(0, BLOCK_N * BLOCK_B)
    n, b = (one // BLOCK_B).to(tl.int64), one % BLOCK_B
    is_new = is_row & (n < num_parents) & (b < BRANCH) & (depth < left - 1)
    up = r * num_parents + n
    parent = tl.load(node_ptr + up, mask=is_new, other=-1)
    is_new &= (parent >= 0) | (depth == 0)
    line = up
    if IS_SHARED:
        line = r + n * 0
    token = tl.load(token_ptr + line * BRANCH + b, mask=is_new, other=0)
    is_greedy = tl.load(temperature_ptr + row) <= 0
    chance = _chances(gain_ptr, odds_ptr, line, up, b, is_new, is_greedy, BRANCH, HAS_ODDS)
    chance += tl.load(chance_ptr + parent, mask=is_new & (parent >= 0), other=0.0)
    is_new &= chance > least
    chance = tl.where(is_new, chance, float("-inf"))
    place_G, place, order = _places(chance_G, is_before, g, chance, is_new, one)
    parent, parent_G = _moved(parent, g, place_G), _moved(parent_G, g, place_G)
    is_new &= place < size
    is_before &= place_G < size
    total = tl.sum(is_before.to(tl.int64), axis=0) + tl.sum(is_new.to(tl.int64), axis=0)
    tl.debug_barrier()  # all have read the nodes before
    tl.store(chance_ptr + place_G, chance_G, mask=is_before)
    tl.store(draft_ptr + place_G, token_G, mask=is_before)
    tl.store(parents_ptr + place_G, parent_G, mask=is_before)
    tl.store(chance_ptr + place, chance, mask=is_new)
    tl.store(draft_ptr + place, token, mask=is_new)
    tl.store(parents_ptr + place, parent, mask=is_new)
    nothing = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    tl.store(chance_ptr + g, nothing, mask=is_row & (g >= total) & (g < size))
    if HAS_NEXT:
        _next_nodes(
            token, place, order, up, is_new, r, path_ptr, next_node_ptr, next_ptr, up_ptr,
            next_path_ptr, num_parents, num_grown, depth, max_path, HAS_PATHS, BLOCK_W,
        )  # fmt: skip
    elif is_row:
        _finish(
            token, place, is_new, token_G, place_G, is_before, g, total, tl.load(max_draft_ptr + r),
            num_nodes_ptr + row, result_ptr + r * result_stride, size, guesses_at,
        )  # fmt: skip


@triton.jit(do_not_specialize=["depth", "first_node", "num_nodes", "guesses_at"])
def _ranked_kernel(
    token_ptr, rank_ptr, from_ptr, rows_ptr, max_draft_ptr, num_checked_ptr, known_ptr, end_ptr,
    done_ptr, num_nodes_ptr, draft_ptr, parents_ptr, result_ptr, depth, first_node, num_nodes,
    num_ranks, draft_stride, result_stride, guesses_at, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row: a level's nodes take the tokens of their ranks."""
    r, row, is_row = live_row(rows_ptr, num_checked_ptr, done_ptr)
    left = tl.load(end_ptr + row) - tl.load(known_ptr + row)
    n = tl.arange(0, BLOCK_N)
    is_in = is_row & (n < num_nodes)
    rank = tl.load(rank_ptr + n, mask=is_in, other=0)
    parent = tl.load(from_ptr + n, mask=is_in, other=-1)
    token = tl.load(token_ptr + r * num_ranks + rank, mask=is_in, other=0)
    at = row * draft_stride + first_node + n
    tl.store(draft_ptr + at, token, mask=is_in)
    tl.store(parents_ptr + at, parent, mask=is_in)
    result_ptr += r * result_stride
    tl.store(result_ptr + guesses_at + first_node + n, token, mask=is_in)
    before = tl.where(depth > 0, tl.load(num_nodes_ptr + row), 0)
    most = tl.minimum(tl.load(max_draft_ptr + r), first_node + num_nodes)
    count = tl.where(depth < left - 1, most, before)
    if is_row:
        tl.store(num_nodes_ptr + row, count)
        tl.store(result_ptr + C_MATCHED, tl.full((), 1, tl.int64))
        tl.store(result_ptr + C_DRAFTED, count)


# --- launch ---------------------------------------------------------------------------------------


def _best_children(
    state: RowState, step: StepRows, logits_TC: Tensor, sampling: RowSampling, *,
    depth: int, row_T: Tensor, ids_C: Tensor | None, branch: int, has_chances: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Tokens of the best children of each line of logits, and the logs of their chances."""
    rank_TKB, top_TK, mass_TK = children_of(
        state, step, logits_TC, sampling, depth=depth, row_T=row_T, ids_C=ids_C, branch=branch,
        has_chances=has_chances,
    )  # fmt: skip
    num_tokens, num_chunks = top_TK.shape
    token_TB = rank_TKB.new_empty(num_tokens, branch)
    gain_TB = top_TK.new_empty(num_tokens, branch)
    block_b, block_k = next_power_of_2(branch), next_power_of_2(num_chunks)
    _merge_kernel[(num_tokens,)](
        rank_TKB, top_TK, mass_TK, rank_TKB if ids_C is None else ids_C, token_TB, gain_TB,
        num_chunks, BRANCH=branch, HAS_IDS=ids_C is not None, HAS_CHANCES=has_chances,
        BLOCK_B=block_b, BLOCK_K=block_k, **options(1 if block_b * block_k <= 1024 else 4),
    )  # fmt: skip
    return token_TB, gain_TB


def extend(
    state: RowState, step: StepRows, growth: Growth, logits_TC: Tensor, sampling: RowSampling,
    *, depth: int, ids_C: Tensor | None, odds_T: Tensor | None, least: float | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """`extend_ref`."""
    num_rows, num_tokens = len(step.ids_R), len(growth.node_T)
    num_parents, max_path = num_tokens // num_rows, growth.path_TP.shape[1]
    if step.has_rules and len(logits_TC) < num_tokens:  # they depend on the path
        logits_TC = logits_TC.repeat_interleave(num_parents, dim=0)
    row_T = step.ids_R
    if step.has_rules or step.draws == Draws.FILTERED:
        row_T = row_T.clamp(min=0).repeat_interleave(len(logits_TC) // num_rows)
    if step.has_rules:
        pos_T = state.known_X[row_T] + depth
        tables = sampling.processors.tables
        logits_TC = process(logits_TC, row_T, pos_T, growth.path_TP, tables, ids_C=ids_C)
    branch, size = growth.branch, growth.size
    token_TB, gain_TB = _best_children(
        state, step, logits_TC, sampling, depth=depth, row_T=row_T, ids_C=ids_C, branch=branch,
    )  # fmt: skip
    is_last = depth == len(growth.grown)
    num_grown = 0 if is_last else growth.grown[depth]
    node_T, next_T, up_T = growth.node_T.new_empty(3, num_rows * num_grown)
    path_TP = growth.path_TP
    if step.has_rules and not is_last:
        path_TP = path_TP.new_full((num_rows * num_grown, max_path), -1)
    blocks = [next_power_of_2(n) for n in (num_parents, branch, size, max(num_grown, 1))]
    _extend_kernel[(num_rows,)](
        token_TB, gain_TB, gain_TB if odds_T is None else odds_T, growth.chance_RG, growth.node_T,
        growth.path_TP, step.ids_R, step.max_draft_R, step.num_checked_R, state.known_X,
        state.end_X, state.is_done_X, sampling.temperature_X, state.num_nodes_X, state.draft_XG,
        state.parents_XG, step.result_RC, node_T, next_T, up_T, path_TP, num_parents, num_grown,
        size, depth, max_path, state.draft_XG.stride(0), step.result_RC.stride(0),
        step.guesses_at, float("-inf") if least is None else least, BRANCH=branch,
        IS_SHARED=len(logits_TC) < num_tokens, HAS_ODDS=odds_T is not None, HAS_NEXT=not is_last,
        HAS_PATHS=step.has_rules, BLOCK_N=blocks[0], BLOCK_B=blocks[1], BLOCK_G=blocks[2],
        BLOCK_W=blocks[3], **options(min(max((blocks[0] * blocks[1]) ** 2 // 1024, 1), 16)),
    )  # fmt: skip
    growth.node_T, growth.path_TP = node_T, path_TP
    return None if is_last else (next_T, up_T)


def ranked(
    state: RowState, step: StepRows, logits_RC: Tensor, sampling: RowSampling,
    level: RankedLevel, ids_C: Tensor | None,
) -> None:  # fmt: skip
    """`ranked_ref`."""
    token_RB, _ = _best_children(
        state, step, logits_RC, sampling, depth=level.depth,
        row_T=step.ids_R.clamp(min=0), ids_C=ids_C, branch=level.num_ranks, has_chances=False,
    )  # fmt: skip
    _ranked_kernel[(len(step.ids_R),)](
        token_RB, level.rank_N, level.parent_N, step.ids_R, step.max_draft_R, step.num_checked_R,
        state.known_X, state.end_X, state.is_done_X, state.num_nodes_X, state.draft_XG,
        state.parents_XG, step.result_RC, level.depth, level.first, len(level.rank_N),
        level.num_ranks, state.draft_XG.stride(0), step.result_RC.stride(0),
        step.guesses_at, BLOCK_N=next_power_of_2(len(level.rank_N)), **options(1),
    )  # fmt: skip
