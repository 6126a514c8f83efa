"""Pack, commit and compact on the device, without the host.

`kernels.step` holds the state, and the plain Python form of each of these kernels.

Shape letters: R rows of the step, X rows of the engine, N nodes of a step's draft, G nodes a draft
can have, K tokens one step can commit (N + 1), M rows of logits (R times K), L longest sequence, B
blocks of a table, S stop ids, P tree depth, T packed tokens (R times K), C columns of a result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_launch import (
    IS_INTERPRETED,
    next_power_of_2,
    options,
    take_turns,
    warp_block,
)
from hunch.kernels.kv_store import KVCache
from hunch.kernels.step import (
    CHECKED,
    DRAFTED,
    FIRST,
    KNOWN,
    MATCHED,
    REASON,
    TOKENS,
    RowState,
    StepRows,
)

# Columns of a result, for kernels.
C_TOKENS, C_REASON, C_CHECKED = tl.constexpr(TOKENS), tl.constexpr(REASON), tl.constexpr(CHECKED)
C_MATCHED, C_DRAFTED, C_KNOWN = tl.constexpr(MATCHED), tl.constexpr(DRAFTED), tl.constexpr(KNOWN)
C_FIRST = tl.constexpr(FIRST)
HAS_CLOCK = tl.constexpr(not IS_INTERPRETED)


@triton.jit
def live_row(ids_ptr, num_checked_ptr, done_ptr):
    """This program's row of the step, that of the engine, and whether it goes on."""
    r = tl.program_id(0).to(tl.int64)
    take_turns()
    row = tl.maximum(tl.load(ids_ptr + r), 0)
    return r, row, (tl.load(num_checked_ptr + r) >= 0) & (tl.load(done_ptr + row) == 0)


@triton.jit
def put_chain(
    tokens, node, num_guesses, matched, known, r, row, max_draft_ptr, end_ptr, num_nodes_ptr,
    draft_ptr, parents_ptr, result_ptr, draft_stride, result_stride, num_nodes, guesses_at,
):  # fmt: skip
    """Write all of a row's guesses to its result. The first of them become its draft, as many as it
    may check and can still use."""
    is_node = node < num_guesses
    draft_at = row * draft_stride + node
    tl.store(draft_ptr + draft_at, tokens, mask=is_node)
    tl.store(parents_ptr + draft_at, (node - 1).to(tl.int64), mask=is_node)
    left = tl.maximum(tl.load(end_ptr + row) - known - 1, 0)
    count = tl.minimum(tl.minimum(tl.load(max_draft_ptr + r), left), num_guesses)
    result_ptr += r * result_stride
    tokens = tl.where(is_node, tokens, -1)
    tl.store(result_ptr + guesses_at + node, tokens, mask=node < num_nodes)
    tl.store(result_ptr + C_MATCHED, matched)
    tl.store(result_ptr + C_DRAFTED, count)
    tl.store(num_nodes_ptr + row, count)


# --- pack -----------------------------------------------------------------------------------------


@triton.jit
def now():
    """Nanoseconds of a clock that all multiprocessors share; the interpreter has none."""
    time = tl.zeros((), tl.int64)
    if HAS_CLOCK:
        time = globaltimer()
    return time


@triton.jit
def slots_at(table_ptr, where, is_live, BLOCK_SIZE: tl.constexpr):
    """The slots of a row's positions; for padding, any slot."""
    block = tl.load(table_ptr + where // BLOCK_SIZE, mask=is_live, other=0).to(tl.int64)
    return block * BLOCK_SIZE + where % BLOCK_SIZE


@triton.jit
def live_slots(table_ptr, where, is_live, BLOCK_SIZE: tl.constexpr):
    """The slots of a row's positions; for padding, -1."""
    return tl.where(is_live, slots_at(table_ptr, where, is_live, BLOCK_SIZE), -1)


@triton.jit(do_not_specialize=["num_nodes", "max_depth"])
def _pack_kernel(
    ids_ptr, max_checked_ptr, num_checked_ptr, history_ptr, known_ptr, done_ptr, num_nodes_ptr,
    table_ptr, draft_ptr, parents_ptr, packed_ptr, pos_ptr, slot_ptr, seq_ptr, base_ptr, tree_ptr,
    clock_ptr, num_nodes, max_depth, history_stride, table_stride, draft_stride,
    BLOCK_SIZE: tl.constexpr, IS_TREE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row: its last known token, then its nodes, and where each finds its keys."""
    r = tl.program_id(0).to(tl.int64)
    take_turns()
    row = tl.load(ids_ptr + r)
    is_row = row >= 0
    if (r == 0) & is_row:
        tl.store(clock_ptr, tl.load(clock_ptr) + 1)
        tl.store(clock_ptr + 1, now())
    row = tl.maximum(row, 0)
    is_row &= tl.load(done_ptr + row) == 0
    known = tl.load(known_ptr + row)
    count = tl.minimum(tl.load(num_nodes_ptr + row), tl.load(max_checked_ptr + r))
    count = tl.minimum(count, num_nodes)
    tl.store(num_checked_ptr + r, tl.where(is_row, count, -1))
    place = tl.arange(0, BLOCK_N)  # 0: the root; then node place - 1
    is_in = place < num_nodes + 1
    is_live = is_row & (place <= count) & is_in
    at = r * (num_nodes + 1) + place
    token = tl.load(draft_ptr + row * draft_stride + place - 1, mask=is_live & (place > 0), other=0)
    last = tl.load(history_ptr + row * history_stride + tl.maximum(known - 1, 0))
    tl.store(packed_ptr + at, tl.where(place == 0, last, token), mask=is_in)
    p = tl.maximum(known - 1, 0) + place
    table_ptr += row * table_stride
    tl.store(slot_ptr + at, live_slots(table_ptr, p, is_live, BLOCK_SIZE), mask=is_in)
    tl.store(seq_ptr + at, (place * 0).to(tl.int64) + row, mask=is_in)
    if IS_TREE:
        parents_ptr += row * draft_stride
        depth = tl.zeros((BLOCK_N,), tl.int64)
        node = tl.where(is_live, place - 1, -1).to(tl.int64)
        for _ in range(max_depth):
            is_up = node >= 0
            depth += is_up.to(tl.int64)
            node = tl.load(parents_ptr + node, mask=is_up, other=-1)
        tl.store(pos_ptr + at, tl.where(is_live, known - 1 + depth, 0), mask=is_in)
        tl.store(base_ptr + at, (place * 0).to(tl.int64) + known, mask=is_in)
        node = tl.where(is_live, place - 1, -1).to(tl.int64)
        for i in range(max_depth):
            is_up = node >= 0
            tl.store(
                tree_ptr + at * max_depth + depth - 1 - i,
                live_slots(table_ptr, known + node, is_up, BLOCK_SIZE),
                mask=is_up,
            )
            node = tl.load(parents_ptr + node, mask=is_up, other=-1)
    else:
        tl.store(pos_ptr + at, tl.where(is_live, p, 0), mask=is_in)
        tl.store(base_ptr + at, p + 1, mask=is_in)


def pack(state: RowState, step: StepRows, ids_T: Tensor, attn: AttnInputs) -> None:
    """Fill the buffers of a step of N + 1 tokens per row: its last known token, then its nodes.

    Places past a row's nodes, and rows that ended, are padding (slot -1). seq_T names rows of the
    engine, so the step's block table is table_XB itself. Without tree_TP the draft is a chain. A
    step whose first row is padding has no rows, and is not counted.
    """
    tree_TP = attn.tree_TP
    _pack_kernel[(len(step.ids_R),)](
        step.ids_R, step.max_checked_R, step.num_checked_R, state.tokens_XL, state.known_X,
        state.is_done_X, state.num_nodes_X, state.table_XB, state.draft_XG, state.parents_XG,
        ids_T, attn.pos_T, attn.slot_T, attn.seq_T, attn.base_T,
        ids_T if tree_TP is None else tree_TP, state.clock_2, step.num_nodes,
        0 if tree_TP is None else tree_TP.shape[1], state.tokens_XL.stride(0),
        state.table_XB.stride(0), state.draft_XG.stride(0), BLOCK_SIZE=attn.block_size,
        IS_TREE=tree_TP is not None, BLOCK_N=warp_block(step.num_nodes + 1), **options(1),
    )  # fmt: skip


# --- commit ---------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_nodes"])
def _commit_kernel(
    ids_ptr, choice_ptr, num_checked_ptr, draft_ptr, parents_ptr, history_ptr, known_ptr, end_ptr,
    done_ptr, num_nodes_ptr, stop_ptr, path_ptr, result_ptr,
    num_nodes, draft_stride, history_stride, result_stride, num_stops,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One row: walk the draft while it agrees with the target, append tokens, look for the end."""
    r = tl.program_id(0).to(tl.int64)
    take_turns()
    num_checked = tl.load(num_checked_ptr + r)
    is_row = num_checked >= 0
    row = tl.maximum(tl.load(ids_ptr + r), 0)
    node_N = tl.arange(0, BLOCK_N)
    is_node = node_N < num_checked
    tokens_N = tl.load(draft_ptr + row * draft_stride + node_N, mask=is_node, other=-1)
    parents_N = tl.load(parents_ptr + row * draft_stride + node_N, mask=is_node, other=-2)
    stop_S = tl.arange(0, BLOCK_S)
    stops = tl.load(stop_ptr + row * num_stops + stop_S, mask=stop_S < num_stops, other=-1)
    known, end = tl.load(known_ptr + row), tl.load(end_ptr + row)
    choice_ptr += r * (num_nodes + 1)
    result_ptr += r * result_stride
    node = tl.full((), -1, tl.int32)
    count = tl.zeros((), tl.int32)
    reason = tl.zeros((), tl.int32)
    is_walking = is_row
    while is_walking:
        token = tl.load(choice_ptr + 1 + node)
        tl.store(history_ptr + row * history_stride + known + count, token)
        tl.store(result_ptr + C_FIRST + count, token)
        is_stop = (tl.max((stops == token).to(tl.int32), axis=0) > 0) & (token >= 0)
        found = tl.max(tl.where((parents_N == node) & (tokens_N == token), node_N, -1), axis=0)
        tl.store(path_ptr + r * (num_nodes + 1) + count, found.to(tl.int64))
        count += 1
        reason = tl.where(is_stop, 1, tl.where(known + count >= end, 2, 0))
        node = found
        is_walking = (found >= 0) & (reason == 0)
    tl.store(result_ptr + C_TOKENS, count.to(tl.int64))
    tl.store(result_ptr + C_REASON, reason.to(tl.int64))
    tl.store(result_ptr + C_CHECKED, num_checked)
    tl.store(result_ptr + C_MATCHED, tl.zeros((), tl.int64))
    tl.store(result_ptr + C_DRAFTED, tl.zeros((), tl.int64))
    tl.store(result_ptr + C_KNOWN, known + count)
    if is_row:
        tl.store(known_ptr + row, known + count)
        tl.store(done_ptr + row, (reason > 0).to(tl.int64))
        tl.store(num_nodes_ptr + row, tl.zeros((), tl.int64))


def commit(state: RowState, step: StepRows, choice_M: Tensor) -> None:
    """Append each row's tokens; choice_M holds the target's token after the root and each node.

    Tokens after a stop id or past the end are not committed. The row then has no draft.
    """
    num_stops = state.stop_XS.shape[1]
    _commit_kernel[(len(step.ids_R),)](
        step.ids_R, choice_M, step.num_checked_R, state.draft_XG, state.parents_XG, state.tokens_XL,
        state.known_X, state.end_X, state.is_done_X, state.num_nodes_X, state.stop_XS, step.path_RK,
        step.result_RC, step.num_nodes, state.draft_XG.stride(0), state.tokens_XL.stride(0),
        step.result_RC.stride(0), num_stops,
        BLOCK_N=warp_block(step.num_nodes), BLOCK_S=next_power_of_2(num_stops), **options(1),
    )  # fmt: skip


# --- compact --------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_nodes"])
def _compact_kernel(
    k_ptr, v_ptr, path_ptr, result_ptr, slot_ptr, layer_stride, num_nodes, result_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row r, layer l: the KV of node path[i] moves to node i's slot.

    In order of i: path[i] >= i, so that nothing is overwritten before it was moved.
    """
    r, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    take_turns()
    offs = tl.arange(0, BLOCK)
    is_in = offs < WIDTH
    path_ptr += r * (num_nodes + 1)
    slot_ptr += r * (num_nodes + 1) + 1
    num_moved = tl.load(result_ptr + r * result_stride + C_TOKENS) - 1
    for i in range(num_moved):
        node = tl.load(path_ptr + i)
        if node != i:
            source = layer * layer_stride + tl.load(slot_ptr + node) * WIDTH
            target = layer * layer_stride + tl.load(slot_ptr + i) * WIDTH
            k = tl.load(k_ptr + source + offs, mask=is_in)
            v = tl.load(v_ptr + source + offs, mask=is_in)
            tl.store(k_ptr + target + offs, k, mask=is_in)
            tl.store(v_ptr + target + offs, v, mask=is_in)
            tl.debug_barrier()


def compact(kv: KVCache, step: StepRows, slot_T: Tensor) -> None:
    """Move the accepted nodes' KV to the slots of their positions; slot_T is the packed step's."""
    num_rows, num_k = step.path_RK.shape
    width = kv.k_LCMH.shape[2] * kv.k_LCMH.shape[3]
    _compact_kernel[(num_rows, kv.k_LCMH.shape[0])](
        kv.k_LCMH, kv.v_LCMH, step.path_RK, step.result_RC, slot_T, kv.k_LCMH.stride(0), num_k - 1,
        step.result_RC.stride(0), WIDTH=width, BLOCK=next_power_of_2(width), **options(4),
    )  # fmt: skip
    for more in (kv.scales, kv.others):
        if more is not None:
            compact(more, step, slot_T)
