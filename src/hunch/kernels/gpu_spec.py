"""Verify, commit, compact, look up and pack on the device: a step that never asks the host.

Shape letters: R rows of the step, X rows of the engine, N nodes of a draft, K tokens one step can
commit (N + 1), M rows of logits (R times N + 1), L longest sequence, B blocks of a table, S stop
ids, P tree depth, T packed tokens (R times N + 1), C cache slots.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.attention import KVCache
from hunch.kernels.gpu_launch import let_next_start, next_power_of_2, options, wait_for_inputs

GOES_ON, STOP, LENGTH = 0, 1, 2


@triton.jit
def _commit_kernel(
    ids_ptr, choice_ptr, tokens_ptr, parents_ptr, num_nodes_ptr, history_ptr, known_ptr, prompt_ptr,
    end_ptr, min_tokens_ptr, stop_ptr, out_ptr, path_ptr, num_out_ptr, reason_ptr,
    num_nodes, history_stride, num_stops,
    BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """One row: walk the draft while it says what the target chose; append; look for the end."""
    r = tl.program_id(0).to(tl.int64)
    let_next_start()
    wait_for_inputs()
    row = tl.load(ids_ptr + r)
    is_row = row >= 0
    row = tl.maximum(row, 0)
    node_N = tl.arange(0, BLOCK_N)
    is_node = node_N < tl.load(num_nodes_ptr + r)
    tokens_N = tl.load(tokens_ptr + r * num_nodes + node_N, mask=is_node, other=-1)
    parents_N = tl.load(parents_ptr + r * num_nodes + node_N, mask=is_node, other=-2)
    stop_S = tl.arange(0, BLOCK_S)
    stops = tl.load(stop_ptr + row * num_stops + stop_S, mask=stop_S < num_stops, other=-1)
    known, end = tl.load(known_ptr + row), tl.load(end_ptr + row)
    first_stop = tl.load(prompt_ptr + row) + tl.load(min_tokens_ptr + row)
    choice_ptr += r * (num_nodes + 1)
    node = tl.full((), -1, tl.int32)
    count = tl.zeros((), tl.int32)
    reason = tl.zeros((), tl.int32)
    is_walking = is_row
    while is_walking:
        token = tl.load(choice_ptr + 1 + node)
        tl.store(history_ptr + row * history_stride + known + count, token)
        tl.store(out_ptr + r * (num_nodes + 1) + count, token)
        is_stop = (tl.max((stops == token).to(tl.int32), axis=0) > 0) & (token >= 0)
        is_stop &= known + count >= first_stop
        found = tl.max(tl.where((parents_N == node) & (tokens_N == token), node_N, -1), axis=0)
        tl.store(path_ptr + r * (num_nodes + 1) + count, found.to(tl.int64))
        count += 1
        reason = tl.where(is_stop, 1, tl.where(known + count >= end, 2, 0))
        node = found
        is_walking = (found >= 0) & (reason == 0)
    tl.store(num_out_ptr + r, count.to(tl.int64))
    tl.store(reason_ptr + r, reason.to(tl.int64))
    if is_row:
        tl.store(known_ptr + row, known + count)


def commit(
    ids_R: Tensor, choice_M: Tensor, tokens_RN: Tensor, parents_RN: Tensor, num_nodes_R: Tensor,
    tokens_XL: Tensor, known_X: Tensor, prompt_X: Tensor, end_X: Tensor, min_tokens_X: Tensor,
    stop_XS: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(tokens_RK, path_RK, num_tokens_R, reason_R): what each row commits, appended to its tokens.

    choice_M holds the target's token after the root and after each of N nodes, row by row. The
    accepted nodes stand in path_RK, -1 after the last. Rows with id -1 are padding. Tokens after a
    stop id or past the end are not committed; reason: GOES_ON, STOP or LENGTH.
    """
    num_rows, num_nodes = tokens_RN.shape
    device = ids_R.device
    out_RK = torch.zeros(num_rows, num_nodes + 1, dtype=torch.int64, device=device)
    path_RK = torch.full((num_rows, num_nodes + 1), -1, dtype=torch.int64, device=device)
    num_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    reason_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    _commit_kernel[(num_rows,)](
        ids_R, choice_M, tokens_RN, parents_RN, num_nodes_R, tokens_XL, known_X, prompt_X, end_X,
        min_tokens_X, stop_XS, out_RK, path_RK, num_R, reason_R, num_nodes, tokens_XL.stride(0),
        stop_XS.shape[1], BLOCK_N=next_power_of_2(max(num_nodes, 1)),
        BLOCK_S=next_power_of_2(max(stop_XS.shape[1], 1)), **options(1),
    )  # fmt: skip
    return out_RK, path_RK, num_R, reason_R


@triton.jit
def _compact_kernel(
    k_ptr, v_ptr, path_ptr, num_out_ptr, slot_ptr, layer_stride, num_nodes, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Row r, layer l: node path[i] moves to the slot after the root's by i. In order of i, as a
    node never stands before its place."""
    r, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    let_next_start()
    wait_for_inputs()
    offs = tl.arange(0, BLOCK)
    is_in = offs < WIDTH
    path_ptr += r * (num_nodes + 1)
    slot_ptr += r * (num_nodes + 1) + 1
    num_moved = tl.load(num_out_ptr + r) - 1
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


def compact(kv: KVCache, path_RK: Tensor, num_tokens_R: Tensor, slot_T: Tensor) -> None:
    """Move the accepted nodes' KV to the slots of their positions; slot_T is the packed step's."""
    num_rows, num_k = path_RK.shape
    width = kv.k_LCMH.shape[2] * kv.k_LCMH.shape[3]
    _compact_kernel[(num_rows, kv.k_LCMH.shape[0])](
        kv.k_LCMH, kv.v_LCMH, path_RK, num_tokens_R, slot_T, kv.k_LCMH.stride(0), num_k - 1,
        WIDTH=width, BLOCK=next_power_of_2(width), **options(4),
    )  # fmt: skip


@triton.jit
def _lookup_kernel(
    ids_ptr, history_ptr, known_ptr, max_draft_ptr, limit_ptr, tokens_ptr, parents_ptr,
    num_nodes_ptr, history_stride, num_nodes,
    MIN_MATCH: tl.constexpr, MAX_MATCH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row: the longest earlier match of its end, the most recent among equals."""
    r = tl.program_id(0).to(tl.int64)
    let_next_start()
    wait_for_inputs()
    row = tl.load(ids_ptr + r)
    is_row = row >= 0
    row = tl.maximum(row, 0)
    history_ptr += row * history_stride
    known = tl.where(is_row, tl.load(known_ptr + row), 0).to(tl.int32)
    offs = tl.arange(0, BLOCK)
    best = tl.zeros((BLOCK,), tl.int64)
    for start in range(1, known, BLOCK):
        place = start + offs  # the token here follows the match
        matched = tl.zeros((BLOCK,), tl.int32)
        is_equal = place < known
        for i in tl.static_range(MAX_MATCH):
            is_equal &= place - 1 - i >= 0
            token = tl.load(history_ptr + place - 1 - i, mask=is_equal, other=-1)
            wanted = tl.load(history_ptr + tl.maximum(known - 1 - i, 0))
            is_equal &= token == wanted
            matched += is_equal.to(tl.int32)
        score = (matched.to(tl.int64) << 32) + place
        best = tl.maximum(best, tl.where(matched >= MIN_MATCH, score, 0))
    found = tl.max(best, axis=0)
    place = (found & 0xFFFFFFFF).to(tl.int32)
    matched = (found >> 32).to(tl.int32)
    node = tl.arange(0, BLOCK_N)
    is_node = node < num_nodes
    period = tl.maximum(known - place, 1)  # past the text's end the guesses themselves go on
    token = tl.load(history_ptr + place + node % period, mask=is_node & (matched > 0), other=0)
    tl.store(tokens_ptr + r * num_nodes + node, token, mask=is_node)
    tl.store(parents_ptr + r * num_nodes + node, (node - 1).to(tl.int64), mask=is_node)
    count = tl.minimum(tl.load(max_draft_ptr + row), tl.load(limit_ptr + matched))
    count = tl.where(is_row & (matched > 0), tl.minimum(count, num_nodes), 0)
    tl.store(num_nodes_ptr + r, count)


def lookup(
    ids_R: Tensor, tokens_XL: Tensor, known_X: Tensor, max_draft_X: Tensor, limit_K: Tensor,
    num_nodes: int, min_match: int, max_match: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(tokens_RN, parents_RN, num_nodes_R): a chain per row, as `spec.ngram` draws it.

    limit_K says how many nodes a match of each length (0 to max_match) may draft.
    """
    num_rows = len(ids_R)
    make = {"dtype": torch.int64, "device": ids_R.device}
    tokens_RN = torch.empty(num_rows, num_nodes, **make)
    parents_RN = torch.empty(num_rows, num_nodes, **make)
    num_nodes_R = torch.empty(num_rows, **make)
    _lookup_kernel[(num_rows,)](
        ids_R, tokens_XL, known_X, max_draft_X, limit_K, tokens_RN, parents_RN, num_nodes_R,
        tokens_XL.stride(0), num_nodes, MIN_MATCH=min_match, MAX_MATCH=max_match, BLOCK=2048,
        BLOCK_N=next_power_of_2(num_nodes), **options(8),
    )  # fmt: skip
    return tokens_RN, parents_RN, num_nodes_R


@triton.jit
def _pack_kernel(
    ids_ptr, history_ptr, known_ptr, table_ptr, tokens_ptr, parents_ptr, num_nodes_ptr,
    packed_ptr, pos_ptr, slot_ptr, seq_ptr, base_ptr, tree_ptr,
    num_nodes, max_depth, history_stride, table_stride,
    BLOCK_SIZE: tl.constexpr, IS_TREE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row: its last known token, then its nodes, and where each finds its keys."""
    r = tl.program_id(0).to(tl.int64)
    let_next_start()
    wait_for_inputs()
    row = tl.load(ids_ptr + r)
    is_row = row >= 0
    row = tl.maximum(row, 0)
    known = tl.load(known_ptr + row)
    count = tl.load(num_nodes_ptr + r)
    place = tl.arange(0, BLOCK_N)  # 0: the root; then node place - 1
    is_in = place < num_nodes + 1
    is_live = is_row & (place <= count) & is_in
    at = r * (num_nodes + 1) + place
    node_ptr = r * num_nodes + place - 1
    token = tl.load(tokens_ptr + node_ptr, mask=is_live & (place > 0), other=0)
    last = tl.load(history_ptr + row * history_stride + tl.maximum(known - 1, 0))
    tl.store(packed_ptr + at, tl.where(place == 0, last, token), mask=is_in)
    p = tl.maximum(known - 1, 0) + place
    block = tl.load(table_ptr + row * table_stride + p // BLOCK_SIZE, mask=is_live, other=0)
    slot = tl.where(is_live, block * BLOCK_SIZE + p % BLOCK_SIZE, -1)
    tl.store(slot_ptr + at, slot, mask=is_in)
    tl.store(seq_ptr + at, (place * 0).to(tl.int64) + row, mask=is_in)
    if IS_TREE:
        depth = tl.zeros((BLOCK_N,), tl.int64)
        node = tl.where(is_live, place - 1, -1).to(tl.int64)
        for _ in range(max_depth):
            is_up = node >= 0
            depth += is_up.to(tl.int64)
            node = tl.load(parents_ptr + r * num_nodes + node, mask=is_up, other=-1)
        tl.store(pos_ptr + at, tl.where(is_live, known - 1 + depth, 0), mask=is_in)
        tl.store(base_ptr + at, (place * 0).to(tl.int64) + known, mask=is_in)
        node = tl.where(is_live, place - 1, -1).to(tl.int64)
        for i in range(max_depth):
            is_up = node >= 0
            p = known + node
            block = tl.load(table_ptr + row * table_stride + p // BLOCK_SIZE, mask=is_up, other=0)
            tl.store(tree_ptr + at * max_depth + depth - 1 - i,
                     block * BLOCK_SIZE + p % BLOCK_SIZE, mask=is_up)  # fmt: skip
            node = tl.load(parents_ptr + r * num_nodes + node, mask=is_up, other=-1)
    else:
        tl.store(pos_ptr + at, tl.where(is_live, p, 0), mask=is_in)
        tl.store(base_ptr + at, p + 1, mask=is_in)


def pack(
    ids_R: Tensor, tokens_XL: Tensor, known_X: Tensor, table_XB: Tensor, tokens_RN: Tensor,
    parents_RN: Tensor, num_nodes_R: Tensor, block_size: int, *, ids_T: Tensor, pos_T: Tensor,
    slot_T: Tensor, seq_T: Tensor, base_T: Tensor, tree_TP: Tensor | None = None,
) -> None:  # fmt: skip
    """A step of N + 1 tokens per row into given buffers: the row's last known token, its nodes.

    Places past a row's nodes, and rows with id -1, are padding (slot -1). seq_T names rows of the
    engine, so table_XB is the step's table as it is. Without tree_TP the draft is a chain.
    """
    num_rows, num_nodes = tokens_RN.shape
    _pack_kernel[(num_rows,)](
        ids_R, tokens_XL, known_X, table_XB, tokens_RN, parents_RN, num_nodes_R, ids_T, pos_T,
        slot_T, seq_T, base_T, ids_T if tree_TP is None else tree_TP, num_nodes,
        0 if tree_TP is None else tree_TP.shape[1], tokens_XL.stride(0), table_XB.stride(0),
        BLOCK_SIZE=block_size, IS_TREE=tree_TP is not None,
        BLOCK_N=next_power_of_2(num_nodes + 1), **options(1),
    )  # fmt: skip
