"""One level of a draft on a device, in two launches: children of every node, then the best paths.

The first reads the logits, one program per chunk of a row; the second writes the level's nodes and
the inputs of the pass over them. A child is a rank: the bits of its score, then of its inverted
column, so that the greatest rank has the best score and, among equals, the lowest column.

Shape letters: R rows of the step, N nodes that get children, B children of each, W nodes of a level
(a chain has one), T packed nodes (R times N), X rows of the engine, C columns of the model's
logits, K chunks of them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels import gpu_filters
from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_filters import MAX_COLUMNS, edges, id_of, rank_of, score_of
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options, take_turns
from hunch.kernels.gpu_process import process_level
from hunch.kernels.gpu_sampling import scores_of
from hunch.kernels.gpu_step import C_DRAFTED, C_MATCHED, live_row, live_slots
from hunch.kernels.step import Draws, RowState, StepRows

CHUNK = 1024  # columns of one program: many small programs are faster than a few large ones


class RowSampling(Protocol):
    """What kernels need of `sampling.state.SamplingState`: parameters of the engine's rows."""

    temperature_X: Tensor
    top_k_X: Tensor
    top_p_X: Tensor
    log_min_p_X: Tensor
    seed_X: Tensor
    sample_X: Tensor
    processors: Any  # its `tables` hold the rows' rules


# --- children -------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_parents", "depth"])
def _children_kernel(
    logits_ptr, rows_ptr, known_ptr, ids_ptr, temperature_ptr, min_p_ptr, seed_ptr, sample_ptr,
    edge_ptr, best_ptr, rank_ptr, top_ptr, mass_ptr, num_columns, num_parents, depth,
    IS_SAMPLED: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_IDS: tl.constexpr, BRANCH: tl.constexpr,
    HAS_CHANCES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best children of one node in one chunk, and the chunk's share of all chances."""
    m, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    take_turns()
    row, pos = m, m
    if IS_SAMPLED:
        row = tl.maximum(tl.load(rows_ptr + tl.program_id(0) // num_parents), 0)
        pos = tl.load(known_ptr + row) + depth
    z = scores_of(
        logits_ptr, m, chunk, row, pos, ids_ptr, temperature_ptr, min_p_ptr, seed_ptr, sample_ptr,
        edge_ptr, best_ptr, num_columns, 0, IS_SAMPLED, HAS_EDGE, HAS_IDS, CHUNK,
    )  # fmt: skip
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    rank = tl.where(columns < num_columns, rank_of(z, columns), -1)
    at = m * tl.num_programs(1) + chunk
    best = tl.max(rank, axis=0)
    tl.store(rank_ptr + at * BRANCH, best)
    top = score_of(best)
    for i in tl.static_range(1, BRANCH):
        rank = tl.where(rank == best, -1, rank)
        best = tl.max(rank, axis=0)
        tl.store(rank_ptr + at * BRANCH + i, best)
    if HAS_CHANCES:
        tl.store(top_ptr + at, top)
        # A chunk of which the filters keep nothing has mass 0, not NaN.
        tl.store(mass_ptr + at, tl.sum(tl.exp(z - tl.where(top > float("-inf"), top, 0.0)), axis=0))


# --- paths ----------------------------------------------------------------------------------------


@triton.jit
def merged(rank_ptr, r, num_chunks, NUM_PARENTS: tl.constexpr, BRANCH: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """The best children of each node of a row, best first."""
    n, k, b = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K * BLOCK_B), tl.arange(0, BLOCK_B)
    size = num_chunks * BRANCH
    at = (r * NUM_PARENTS + n)[:, None] * size + k[None, :]
    is_at = (n < NUM_PARENTS)[:, None] & (k < size)[None, :]
    rank = tl.load(rank_ptr + at, mask=is_at, other=-1)
    best_NB = tl.full((BLOCK_N, BLOCK_B), -1, tl.int64)
    for i in tl.static_range(BRANCH):
        best = tl.max(rank, axis=1)[:, None]
        best_NB = tl.where((b == i)[None, :], best, best_NB)
        rank = tl.where(rank == best, -1, rank)
    return best_NB


@triton.jit
def log_totals(top_ptr, mass_ptr, r, num_chunks, NUM_PARENTS: tl.constexpr,
                BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):  # fmt: skip
    """Per node of a row: its children's best score, and their logsumexp relative to that."""
    n, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    at = (r * NUM_PARENTS + n)[:, None] * num_chunks + k[None, :]
    is_at = (n < NUM_PARENTS)[:, None] & (k < num_chunks)[None, :]
    top_NK = tl.load(top_ptr + at, mask=is_at, other=float("-inf"))
    mass_NK = tl.load(mass_ptr + at, mask=is_at, other=0.0)
    top = tl.max(top_NK, axis=1)
    top = tl.where(top > float("-inf"), top, 0.0)
    total = tl.sum(mass_NK * tl.exp(top_NK - top[:, None]), axis=1)
    return top, tl.log(tl.where(n < NUM_PARENTS, total, 1.0))


@triton.jit
def _place_nodes(
    token, place, parent, is_in, is_row, r, row, kept, max_draft_ptr, num_nodes_ptr, draft_ptr,
    parents_ptr, result_ptr, first_node, draft_stride, result_stride, guesses_at,
):  # fmt: skip
    """Write the level's nodes into the draft and the guesses, and the new number of nodes.

    kept: nodes of the level; 0: the draft ended before it.
    """
    count = tl.minimum(tl.load(max_draft_ptr + r), first_node + kept)
    before = tl.load(num_nodes_ptr + row)  # after the level before
    count = tl.where(kept > 0, count, tl.where(first_node > 0, before, 0))
    at = row * draft_stride + first_node + place
    result_ptr += r * result_stride
    if is_row:
        tl.store(draft_ptr + at, token, mask=is_in)
        tl.store(parents_ptr + at, parent, mask=is_in)
        tl.store(num_nodes_ptr + row, count)
        tl.store(result_ptr + guesses_at + first_node + place, token, mask=is_in)
        tl.store(result_ptr + C_MATCHED, tl.full((), 1, tl.int64))
        tl.store(result_ptr + C_DRAFTED, count)


@triton.jit
def _next_inputs(
    token, place, parent, is_in, is_live, r, row, known, table_ptr, parents_ptr, packed_ptr,
    pos_ptr, slot_ptr, seq_ptr, base_ptr, tree_ptr, first_node, depth, max_depth,
    GROWN: tl.constexpr, IS_TREE: tl.constexpr, SEES_NEXT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """The inputs of the pass over the level's first nodes; their slots follow the known tokens'."""
    if SEES_NEXT:  # of which the last has none
        known -= 1
    at = r * GROWN + place
    pos = known + depth + place * 0
    slot = live_slots(table_ptr, known + first_node + place, is_live, BLOCK_SIZE)
    tl.store(packed_ptr + at, tl.where(is_live, token, 0), mask=is_in)
    tl.store(pos_ptr + at, tl.where(is_live, pos, 0), mask=is_in)
    tl.store(slot_ptr + at, slot, mask=is_in)
    tl.store(seq_ptr + at, row + place * 0, mask=is_in)
    tl.store(base_ptr + at, known + place * 0 if IS_TREE else pos + 1, mask=is_in)
    if IS_TREE:
        tree_ptr += at * max_depth + depth
        tl.store(tree_ptr, slot, mask=is_live)
        up = tl.where(is_live, parent, -1)  # of earlier launches from here on
        for i in range(depth):
            is_up = up >= 0
            slot = live_slots(table_ptr, known + up, is_up, BLOCK_SIZE)
            tl.store(tree_ptr - 1 - i, slot, mask=is_up)
            up = tl.load(parents_ptr + up, mask=is_up, other=-1)


@triton.jit(do_not_specialize=["first_node", "first_parent", "depth", "guesses_at", "least"])
def _grow_kernel(
    rank_ptr, top_ptr, mass_ptr, chance_ptr, ids_ptr, rows_ptr, max_draft_ptr, num_checked_ptr,
    known_ptr, end_ptr, done_ptr, num_nodes_ptr, table_ptr, draft_ptr, parents_ptr, result_ptr,
    packed_ptr, pos_ptr, slot_ptr, seq_ptr, base_ptr, tree_ptr, num_chunks, first_node,
    first_parent, depth, max_depth, draft_stride, chance_stride, table_stride, result_stride,
    guesses_at, least, NUM_PARENTS: tl.constexpr, LEVEL_SIZE: tl.constexpr, BRANCH: tl.constexpr,
    GROWN: tl.constexpr, HAS_IDS: tl.constexpr, HAS_CHANCES: tl.constexpr, HAS_LEAST: tl.constexpr,
    HAS_NEXT: tl.constexpr, IS_TREE: tl.constexpr, SEES_NEXT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row: the likeliest paths become the level's nodes, the path of first children first."""
    r, row, is_row = live_row(rows_ptr, num_checked_ptr, done_ptr)
    known = tl.load(known_ptr + row)
    left = tl.load(end_ptr + row) - known
    rank_NB = merged(rank_ptr, r, num_chunks, NUM_PARENTS, BRANCH, BLOCK_N, BLOCK_B, BLOCK_K)
    # From here on one candidate per thread, which finds its own place among the level's nodes.
    rank = tl.reshape(rank_NB, (BLOCK_N * BLOCK_B,))
    one = tl.arange(0, BLOCK_N * BLOCK_B)
    n, b = one // BLOCK_B, one % BLOCK_B
    is_in = (n < NUM_PARENTS) & (b < BRANCH)
    place = one.to(tl.int64) * 0
    kept = tl.full((), LEVEL_SIZE, tl.int64)
    if HAS_CHANCES:
        top, log_total = log_totals(top_ptr, mass_ptr, r, num_chunks, NUM_PARENTS, BLOCK_N,
                                     BLOCK_K)  # fmt: skip
        i = tl.arange(0, BLOCK_N)
        chance_ptr += r * chance_stride
        path = tl.load(
            chance_ptr + first_parent + i, mask=(i < NUM_PARENTS) & (depth > 0), other=0.0
        )
        gain_NB = (score_of(rank_NB) - top[:, None]) - log_total[:, None]
        chance = tl.reshape(path[:, None] + gain_NB, (BLOCK_N * BLOCK_B,))
        order = tl.where(is_in, rank_of(chance, one), -1)
        order = tl.where(one == 0, 0x7FFFFFFFFFFFFFFF, order)  # the target is likeliest to take it
        place = tl.sum((order[None, :] > order[:, None]).to(tl.int64), axis=1)
        is_in &= place < LEVEL_SIZE
        tl.store(chance_ptr + first_node + place, chance, mask=is_in)
        if HAS_LEAST:  # nodes stand in order, the first path's before all others
            kept = tl.max(tl.where(is_in & (chance >= least), place + 1, 0), axis=0)
    token = id_of(rank)
    if HAS_IDS:
        token = tl.load(ids_ptr + token, mask=is_in, other=0)
    parent = first_parent + n.to(tl.int64)
    _place_nodes(
        token, place, parent, is_in, is_row, r, row, tl.where(depth < left - 1, kept, 0),
        max_draft_ptr, num_nodes_ptr, draft_ptr, parents_ptr, result_ptr, first_node, draft_stride,
        result_stride, guesses_at,
    )  # fmt: skip
    if HAS_NEXT:
        is_in &= place < GROWN
        is_live = (
            is_row & is_in & (first_node + place < tl.load(max_draft_ptr + r)) & (depth < left)
        )
        _next_inputs(
            token, place, parent, is_in, is_live, r, row, known, table_ptr + row * table_stride,
            parents_ptr + row * draft_stride, packed_ptr, pos_ptr, slot_ptr, seq_ptr, base_ptr,
            tree_ptr, first_node, depth, max_depth, GROWN, IS_TREE, SEES_NEXT, BLOCK_SIZE,
        )  # fmt: skip


# --- launch ---------------------------------------------------------------------------------------


def children_of(
    state: RowState, step: StepRows, logits_TC: Tensor, sampling: RowSampling, *,
    depth: int, row_T: Tensor, ids_C: Tensor | None, branch: int, has_chances: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Ranks of the best children in every chunk of the logits, and its best score and mass.

    The mass is relative to that score; without `has_chances` neither is computed.
    """
    num_tokens, num_columns = logits_TC.shape
    assert logits_TC.is_contiguous()
    assert branch <= num_columns < MAX_COLUMNS
    num_chunks = cdiv(num_columns, CHUNK)
    rank_TKB = logits_TC.new_empty(num_tokens, num_chunks, branch, dtype=torch.int64)
    top_TK, mass_TK = logits_TC.new_empty(2, num_tokens, num_chunks, dtype=torch.float32)
    edge_T, best_T = rank_TKB, top_TK
    if step.draws == Draws.FILTERED:
        part = logits_TC.new_empty(num_tokens, cdiv(num_columns, gpu_filters.CHUNK))
        edge_T, best_T = edges(
            logits_TC, row_T.contiguous(), sampling.temperature_X, sampling.top_k_X,
            sampling.top_p_X, sampling.log_min_p_X, part,
        )  # fmt: skip
    ids = step.ids_R if ids_C is None else ids_C
    _children_kernel[(num_tokens, num_chunks)](
        logits_TC, step.ids_R, state.known_X, ids, sampling.temperature_X, sampling.log_min_p_X,
        sampling.seed_X, sampling.sample_X, edge_T, best_T, rank_TKB, top_TK, mass_TK, num_columns,
        num_tokens // len(step.ids_R), depth, IS_SAMPLED=step.draws != Draws.GREEDY,
        HAS_EDGE=step.draws == Draws.FILTERED, HAS_IDS=ids_C is not None, BRANCH=branch,
        HAS_CHANCES=has_chances, CHUNK=CHUNK, **options(4),
    )  # fmt: skip
    return rank_TKB, top_TK, mass_TK


def _warps_for(num_candidates: int) -> int:
    """Warps of one program that has so many in registers: more than 16,384 do not fit four."""
    return 1 if num_candidates <= 512 else 4 if num_candidates <= 16384 else 32


def grow_level(
    state: RowState, step: StepRows, logits_TC: Tensor, chances_RN: Tensor, sampling: RowSampling,
    *, depth: int, level_size: int, row_T: Tensor, ids_C: Tensor | None,
    following: tuple[Tensor, AttnInputs] | None, sees_next: bool = False,
    branch: int | None = None, least: float | None = None,
) -> None:  # fmt: skip
    """Grow a level below the nodes with these logits: W nodes per row, and the next inputs.

    The first level has depth 0 and one row of logits per row of the step. chances_RN gets the
    log of each node's chance; nodes are numbered level by level. row_T names the engine's row of
    each row of logits. Nodes past a row's limit are padding in the next pass; a level past the
    row's last token is left out.
    If the next pass has fewer nodes than a level, it takes the first of each row, and only those
    get children.
    sees_next: the network keeps a token's key one position early, with the state before it.
    branch: children considered per node; of the first level always W.
    least: log of a chance; a level without a path of that chance ends the row's draft.
    """
    num_rows = len(step.ids_R)
    if step.has_rules:  # the target will choose by them
        logits_TC = process_level(
            logits_TC, row_T, step.ids_R, state.known_X, state.draft_XG, state.parents_XG, depth,
            level_size, sampling.processors.tables, ids_C,
        )  # fmt: skip
    branch = min(branch or level_size, level_size) if depth else level_size
    has_chances = level_size > 1 or least is not None
    rank_TKB, top_TK, mass_TK = children_of(
        state, step, logits_TC, sampling, depth=depth, row_T=row_T, ids_C=ids_C, branch=branch,
        has_chances=has_chances,
    )  # fmt: skip
    num_parents, num_chunks = len(logits_TC) // num_rows, rank_TKB.shape[1]
    ids = step.ids_R if ids_C is None else ids_C
    ids_T, attn = (step.ids_R, None) if following is None else following
    tree_TP = None if attn is None else attn.tree_TP
    max_depth = 0 if tree_TP is None else tree_TP.shape[1]
    places = (ids_T,) * 4 if attn is None else (attn.pos_T, attn.slot_T, attn.seq_T, attn.base_T)
    sizes = (num_parents, branch, num_chunks)
    block_n, block_b, block_k = (next_power_of_2(size) for size in sizes)
    _grow_kernel[(num_rows,)](
        rank_TKB, top_TK, mass_TK, chances_RN, ids, step.ids_R, step.max_draft_R,
        step.num_checked_R, state.known_X, state.end_X, state.is_done_X, state.num_nodes_X,
        state.table_XB, state.draft_XG, state.parents_XG, step.result_RC, ids_T, *places,
        ids_T if tree_TP is None else tree_TP, num_chunks, depth * level_size,
        (depth - 1) * level_size if depth else -1, depth, max_depth,
        state.draft_XG.stride(0), chances_RN.stride(0), state.table_XB.stride(0),
        step.result_RC.stride(0), step.guesses_at, least or 0.0,
        NUM_PARENTS=num_parents, LEVEL_SIZE=level_size, BRANCH=branch, GROWN=len(ids_T) // num_rows,
        HAS_IDS=ids_C is not None, HAS_CHANCES=has_chances, HAS_LEAST=least is not None,
        HAS_NEXT=attn is not None, IS_TREE=tree_TP is not None, SEES_NEXT=sees_next,
        BLOCK_SIZE=state.block_size, BLOCK_N=block_n, BLOCK_B=block_b, BLOCK_K=block_k,
        **options(_warps_for(block_n * block_b * block_k)),
    )  # fmt: skip
