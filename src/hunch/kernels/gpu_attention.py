"""Paged attention on a GPU: one kernel for decoding, trees and chunked prefill.

A row goes through positions in tiles of TILE from position 0, in splits of SPLIT positions; split
results are merged in order. Which program computes a split, and which rows share a tile, does not
change a bit.

Shape letters: T packed tokens, I tiles of tokens, N heads, M KV heads, H head width, C cache slots,
S splits, B blocks of a table, P tree depth.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_launch import (
    cdiv,
    let_next_start,
    next_power_of_2,
    wait_for_inputs,
)
from hunch.kernels.gpu_step import slots_at
from hunch.kernels.gpu_tiling import (
    NUM_SMS,
    SPLIT,
    Tiling,
    launch_options,
    least_share,
    parts_of,
)

TILE = 64  # positions per step of the walk
LOG2E = 1.4426950408889634


@triton.jit
def _attend(
    q, q_tail, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slot_P, is_key, is_pair, m, z, acc, scale,
    cap, offs_h, offs_t, kv_stride, HEAD: tl.constexpr, TAIL: tl.constexpr, TILE: tl.constexpr,
    IS_NEAR: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Fold one tile of positions into (m, z, acc). A row with no pair here is left as it was."""
    is_h = offs_h < HEAD
    at = slot_P.to(tl.int32) * kv_stride if IS_NEAR else slot_P.to(tl.int64) * kv_stride
    k = tl.load(k_ptr + at[None, :] + offs_h[:, None], mask=is_key[None, :] & is_h[:, None],
                other=0.0)  # fmt: skip
    k = k.to(q.dtype)  # for caches of 8 bits
    scores = tl.dot(q, k, input_precision="ieee")
    if TAIL > 0:  # keys are longer than values, which are their first part
        tail = tl.load(k_ptr + HEAD + at[None, :] + offs_t[:, None],
                       mask=is_key[None, :] & (offs_t < TAIL)[:, None], other=0.0)  # fmt: skip
        scores = tl.dot(q_tail, tail.to(q.dtype), scores, input_precision="ieee")
        v = tl.trans(k)
    else:
        v = tl.load(v_ptr + at[:, None] + offs_h[None, :], mask=is_key[:, None] & is_h[None, :],
                    other=0.0).to(q.dtype)  # fmt: skip
    if HAS_SCALES:
        to = slot_P.to(tl.int64) * (kv_stride // HEAD)
        scores *= tl.load(k_scale_ptr + to, mask=is_key, other=0.0)[None, :]
    if HAS_CAP:  # cap * tanh(score / cap), in units of log2 from here on
        wave = tl.math.exp2(tl.minimum(tl.maximum(scores * (scale * 2.885390082 / cap), -60), 60))
        scores = cap * (1.0 - 2.0 / (wave + 1.0))
        scale = 1.0
    scores = tl.where(is_pair, scores, -1e30)
    m_new = tl.maximum(m, tl.max(scores, axis=1) * scale)
    p = tl.where(is_pair, tl.math.exp2(scores * scale - m_new[:, None]), 0.0)
    share = p.to(v.dtype)
    if HAS_SCALES:
        share = (p * tl.load(v_scale_ptr + to, mask=is_key, other=0.0)[None, :]).to(v.dtype)
    shrink = tl.math.exp2(m - m_new)
    # The tensor core computes the sum too, so that its order does not depend on the layout.
    ones = tl.full((TILE, 16), 1.0, v.dtype)
    z = tl.dot(p.to(v.dtype), ones, z * shrink[:, None], input_precision="ieee")
    acc = tl.dot(share, v, acc * shrink[:, None], input_precision="ieee")
    return m_new, z, acc


@triton.jit
def _merge(m, z, acc, m1, z1, acc1):
    """Two partial results of one row, the earlier positions first."""
    m_new = tl.maximum(m, m1)
    w, w1 = tl.math.exp2(m - m_new), tl.math.exp2(m1 - m_new)
    z = z * w + z1 * w1
    acc = acc * w[:, None] + acc1 * w1[:, None]
    return m_new, z, acc


@triton.jit
def _end_split(
    m, z, acc, m1, z1, acc1, is_alone, split, acc_ptr, stat_ptr, part_R, is_row, offs_h,
    ROWS: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, IS_SHARED: tl.constexpr,
):  # fmt: skip
    """A split is done: merge it if this program has all of the row, else store it."""
    z1_R = tl.max(z1, axis=1)  # its 16 columns are equal
    if not IS_SHARED:
        m, z, acc = _merge(m, z, acc, m1, z1_R, acc1)
    else:
        if is_alone:
            m, z, acc = _merge(m, z, acc, m1, z1_R, acc1)
        else:
            to_R = part_R + split
            is_in = is_row[:, None] & (offs_h < HEAD)[None, :]
            tl.store(acc_ptr + to_R[:, None] * HEAD + offs_h[None, :], acc1, mask=is_in)
            tl.store(stat_ptr + to_R * 2, m1, mask=is_row)
            tl.store(stat_ptr + to_R * 2 + 1, z1_R, mask=is_row)
    m1 = tl.full((ROWS,), -1e30, tl.float32)
    z1 = tl.zeros((ROWS, 16), tl.float32)
    acc1 = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    return m, z, acc, m1, z1, acc1


@triton.jit
def _first_own(base_R, last, TILE: tl.constexpr):
    """The first tile, among positions below `last`, in which tokens have keys of their own."""
    return tl.minimum(tl.min(base_R, axis=0) // TILE * TILE, last)


@triton.jit
def _own_keys(table_ptr, tree_ptr, p, token, tok_R, pos_R, base_R, tree_stride,
              BLOCK_SIZE: tl.constexpr):  # fmt: skip
    """Slots of one drafted token's keys: by table below its base, of its ancestors above."""
    base = tl.min(tl.where(tok_R == token, base_R, 2147483647), axis=0)
    pos = tl.max(tl.where(tok_R == token, pos_R, -1), axis=0)
    is_key = p <= pos
    in_table = is_key & (p < base)
    slot = slots_at(table_ptr, p, in_table, BLOCK_SIZE)
    node = tl.load(tree_ptr + token.to(tl.int64) * tree_stride + (p - base),
                   mask=is_key & (p >= base), other=0).to(tl.int64)  # fmt: skip
    return tl.where(in_table, slot, node), is_key


@triton.jit
def _walk(
    q, q_tail, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, tree_ptr, acc_ptr, stat_ptr,
    tok_R, pos_R, low_R, base_R, part_R, is_row, token0, num_tokens, first, last, is_alone, scale,
    cap, offs_h, offs_t, kv_stride, tree_stride,
    ROWS: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, TAIL: tl.constexpr,
    TILE: tl.constexpr, SPLIT: tl.constexpr, IS_SHARED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HAS_TREE: tl.constexpr, IS_NEAR: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SCALES: tl.constexpr,
):  # fmt: skip
    """Positions [first, last), tile by tile; (m1, z1, acc1) is the current split. Where tokens have
    keys of their own, those of `num_tokens` tokens from `token0` on."""
    m = tl.full((ROWS,), -1e30, tl.float32)
    z = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    m1 = tl.full((ROWS,), -1e30, tl.float32)
    z1 = tl.zeros((ROWS, 16), tl.float32)
    acc1 = tl.zeros((ROWS, HEAD_PAD), tl.float32)
    offs_p = tl.arange(0, TILE)
    shared = last  # below it all rows find their keys by table
    if HAS_TREE:
        shared = tl.maximum(_first_own(base_R, last, TILE), first)
    for p0 in range(first, shared, TILE):
        p = p0 + offs_p
        is_key = p < last
        slot_P = slots_at(table_ptr, p, is_key, BLOCK_SIZE)
        is_pair = (p[None, :] <= pos_R[:, None]) & (p[None, :] >= low_R[:, None])
        m1, z1, acc1 = _attend(q, q_tail, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slot_P, is_key,
                               is_pair, m1, z1, acc1, scale, cap, offs_h, offs_t, kv_stride, HEAD,
                               TAIL, TILE, IS_NEAR, HAS_CAP, HAS_SCALES)  # fmt: skip
        if ((p0 + TILE) % SPLIT == 0) | (p0 + TILE >= last):
            m, z, acc, m1, z1, acc1 = _end_split(
                m, z, acc, m1, z1, acc1, is_alone, p0 // SPLIT, acc_ptr, stat_ptr, part_R,
                is_row, offs_h, ROWS, HEAD, HEAD_PAD, IS_SHARED)  # fmt: skip
    if HAS_TREE:  # each token has keys of its own here: one tile per token
        for p0 in range(shared, last, TILE):
            p = p0 + offs_p
            for j in range(num_tokens):
                slot_P, is_key = _own_keys(table_ptr, tree_ptr, p, token0 + j, tok_R, pos_R, base_R,
                                           tree_stride, BLOCK_SIZE)  # fmt: skip
                is_pair = is_key[None, :] & (tok_R == token0 + j)[:, None]
                is_pair &= p[None, :] >= low_R[:, None]
                m1, z1, acc1 = _attend(q, q_tail, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, slot_P,
                                       is_key, is_pair, m1, z1, acc1, scale, cap, offs_h, offs_t,
                                       kv_stride, HEAD, TAIL, TILE, IS_NEAR, HAS_CAP,
                                       HAS_SCALES)  # fmt: skip
            if ((p0 + TILE) % SPLIT == 0) | (p0 + TILE >= last):
                m, z, acc, m1, z1, acc1 = _end_split(
                    m, z, acc, m1, z1, acc1, is_alone, p0 // SPLIT, acc_ptr, stat_ptr,
                    part_R, is_row, offs_h, ROWS, HEAD, HEAD_PAD, IS_SHARED)  # fmt: skip
    return m, z, acc


@triton.jit
def _merge_all(m, z, acc, acc_ptr, stat_ptr, part_R, is_row, first, last, offs_h,
               HEAD: tl.constexpr):  # fmt: skip
    """Merge the splits that all programs of a row have stored, in order."""
    is_in = is_row[:, None] & (offs_h < HEAD)[None, :]
    for s in tl.range(first, last, num_stages=4):
        at_R = part_R + s
        acc_s = tl.load(acc_ptr + at_R[:, None] * HEAD + offs_h[None, :], mask=is_in, other=0.0,
                        cache_modifier=".cg")  # fmt: skip
        m_s = tl.load(stat_ptr + at_R * 2, mask=is_row, other=-1e30, cache_modifier=".cg")
        z_s = tl.load(stat_ptr + at_R * 2 + 1, mask=is_row, other=0.0, cache_modifier=".cg")
        m, z, acc = _merge(m, z, acc, m_s, z_s, acc_s)
    return m, z, acc


@triton.jit
def _tail(q, row_ptrs, offs_t, is_row, TAIL: tl.constexpr):
    """The part of queries for the keys' part that is no value; q itself if there is none."""
    tail = q
    if TAIL > 0:
        is_in = is_row[:, None] & (offs_t < TAIL)[None, :]
        tail = tl.load(row_ptrs[:, None] + offs_t[None, :], mask=is_in, other=0.0)
    return tail


@triton.jit
def _join_sinks(m, z, acc, sink_ptrs, is_row):
    """Add one more score to each row's softmax, whose value is zero."""
    sink_R = tl.load(sink_ptrs, mask=is_row, other=-1e30).to(tl.float32) * 1.44269504
    m_new = tl.maximum(m, sink_R)
    shrink = tl.math.exp2(m - m_new)
    return z * shrink + tl.math.exp2(sink_R - m_new), acc * shrink[:, None]


@triton.jit
def _first_seen(pos_R, window, HAS_WINDOW: tl.constexpr, IS_CHUNK: tl.constexpr):
    """As `attention.first_seen`."""
    low_R = tl.zeros_like(pos_R)
    if HAS_WINDOW:
        low_R = tl.maximum(pos_R - window + 1, 0)
        if IS_CHUNK:
            low_R = pos_R // -window * -window
    return low_R


@triton.jit
def _shared_out(
    share, first_split, num_splits, num_keys, min_share, tok_R, base_R, is_row, token0, num_tokens,
    TILE: tl.constexpr, SPLIT: tl.constexpr, NUM_OWN: tl.constexpr,
):  # fmt: skip
    """This program's positions, how many programs share the tile, and whose rows it answers for.

    Splits in which tokens have keys of their own come last, with a program for NUM_OWN tokens.
    """
    num_common, num_own = num_splits, num_splits * 0
    if NUM_OWN:
        num_common = tl.maximum(_first_own(base_R, num_keys, TILE) // SPLIT, first_split)
        num_own = tl.where(num_common < num_splits, tl.cdiv(num_tokens, NUM_OWN), 0)
    num_programs = tl.num_programs(2) - num_own
    share_size = tl.maximum(tl.cdiv(num_common - first_split, num_programs), min_share)
    num_before = tl.cdiv(num_common - first_split, share_size)
    first = (first_split + share * share_size) * SPLIT
    last = tl.minimum(first + share_size * SPLIT, tl.minimum(num_common * SPLIT, num_keys))
    if NUM_OWN:
        is_own = share >= num_before
        first, last = tl.where(is_own, num_common * SPLIT, first), tl.where(is_own, num_keys, last)
        begin = (share - num_before) * NUM_OWN
        token0 = tl.where(is_own, token0 + begin, token0)
        num_tokens = tl.where(is_own, tl.minimum(num_tokens - begin, NUM_OWN), num_tokens)
        is_row &= ((tok_R >= token0) & (tok_R < token0 + num_tokens)) | (share < num_before)
    return first, last, num_before + num_own, token0, num_tokens, is_row


@triton.jit(
    do_not_specialize=["num_packed", "max_splits", "table_stride", "tree_stride", "min_share"]
)
def _attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, acc_ptr, stat_ptr, count_ptr,
    pos_ptr, slot_ptr, seq_ptr, table_ptr, base_ptr, tree_ptr, tile_ptr, sink_ptr,
    scale, cap, window, table_stride, tree_stride, max_splits, num_packed, min_share,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, GROUP: tl.constexpr, GROUP_PAD: tl.constexpr,
    KV_PARTS: tl.constexpr, HEAD: tl.constexpr, HEAD_PAD: tl.constexpr, TAIL: tl.constexpr,
    TAIL_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    IS_SHARED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_TREE: tl.constexpr,
    HAS_TILES: tl.constexpr, HAS_WINDOW: tl.constexpr, IS_CHUNK: tl.constexpr,
    IS_NEAR: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_SCALES: tl.constexpr,
    NUM_OWN: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens of one sequence, heads that share keys, share of the splits);
    KV_PARTS programs read the same KV head, each for some of its heads."""
    tile, kv_head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait_for_inputs()
    token0, num_tokens = tile, 1
    if HAS_TILES:
        token0, num_tokens = tl.load(tile_ptr + 2 * tile), tl.load(tile_ptr + 2 * tile + 1)
    row = tl.arange(0, ROWS)
    tok_R = token0 + row // GROUP_PAD
    head_R = kv_head * GROUP + row % GROUP_PAD
    is_row = (row // GROUP_PAD < num_tokens) & (row % GROUP_PAD < GROUP) & (tok_R < num_packed)
    # Independent loads come first: a short row takes little but their latency.
    is_live = is_row & (tl.load(slot_ptr + tok_R, mask=is_row, other=-1) >= 0)
    pos_R = tl.load(pos_ptr + tok_R, mask=is_row, other=-1).to(tl.int32)
    base_R = tl.load(base_ptr + tok_R, mask=is_row, other=2147483647).to(tl.int32)
    seq = tl.load(seq_ptr + token0).to(tl.int64)
    offs_h = tl.arange(0, HEAD_PAD)
    at_R = tok_R.to(tl.int64) * NUM_HEADS + head_R
    is_q = is_row[:, None] & (offs_h < HEAD)[None, :]
    q = tl.load(q_ptr + at_R[:, None] * (HEAD + TAIL) + offs_h[None, :], mask=is_q, other=0.0)
    offs_t = tl.arange(0, TAIL_PAD)
    q_tail = _tail(q, q_ptr + at_R * (HEAD + TAIL) + HEAD, offs_t, is_row, TAIL)
    out_ptrs = out_ptr + at_R[:, None] * HEAD + offs_h[None, :]
    pos_R = tl.where(is_live, pos_R, -1)
    base_R = tl.where(base_R > pos_R, 2147483647, base_R)  # no drafted ancestor
    low_R = tl.where(is_live, _first_seen(pos_R, window, HAS_WINDOW, IS_CHUNK), 2147483647)
    num_keys = tl.max(pos_R, axis=0) + 1
    if num_keys == 0:  # padding: store zeros, which later kernels can compute with
        if share == 0:
            tl.store(out_ptrs, tl.zeros((ROWS, HEAD_PAD), out_ptr.dtype.element_ty), mask=is_q)
        return
    low = tl.min(low_R, axis=0)
    first_split, num_splits = low // SPLIT, tl.cdiv(num_keys, SPLIT)
    first, last, num_shares, token0, num_tokens, is_ours = _shared_out(
        share, first_split, num_splits, num_keys, min_share, tok_R, base_R, is_row, token0,
        num_tokens, TILE, SPLIT, NUM_OWN)  # fmt: skip
    if share >= num_shares:
        return
    kv_start = kv_head // KV_PARTS * (HEAD + TAIL)
    m, z, acc = _walk(
        q, q_tail, k_ptr + kv_start, v_ptr + kv_start, k_scale_ptr + kv_head // KV_PARTS,
        v_scale_ptr + kv_head // KV_PARTS, table_ptr + seq * table_stride, tree_ptr, acc_ptr,
        stat_ptr, tok_R, pos_R, low_R, base_R, at_R * max_splits, is_ours, token0, num_tokens,
        tl.maximum(first, low // TILE * TILE), last, num_shares == 1, scale, cap, offs_h, offs_t,
        NUM_KV // KV_PARTS * (HEAD + TAIL), tree_stride, ROWS, HEAD, HEAD_PAD, TAIL, TILE, SPLIT,
        IS_SHARED, BLOCK_SIZE, HAS_TREE, IS_NEAR, HAS_CAP, HAS_SCALES)  # fmt: skip
    let_next_start()
    if num_shares > 1:  # the last program merges all
        tl.debug_barrier()
        done = tl.atomic_add(count_ptr + tile * NUM_KV + kv_head, 1, sem="acq_rel")
        if done != num_shares - 1:
            return
        m, z, acc = _merge_all(m, z, acc, acc_ptr, stat_ptr, at_R * max_splits, is_row, first_split,
                               num_splits, offs_h, HEAD)  # fmt: skip
        tl.store(count_ptr + tile * NUM_KV + kv_head, 0)
    if HAS_SINKS:
        z, acc = _join_sinks(m, z, acc, sink_ptr + head_R, is_row)
    out = acc / tl.where(z > 0, z, 1.0)[:, None]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_q)


def attention(
    q_TNH: Tensor, k_CMH: Tensor, v_CMH: Tensor, attn: AttnInputs, scale: float, out_TNH: Tensor,
    *, window: int | None = None, cap: float = 0.0, sinks_N: Tensor | None = None,
    tiling: Tiling | None = None, scales: tuple[Tensor, Tensor] | None = None,
) -> None:  # fmt: skip
    """softmax(q K^T * scale) V over each token's positions. No tiling: every token is a tile.

    Caps and sinks as in `attention_ref`; scales, [C, M, 1], of keys and values in 8 bits. If the
    output is narrower than the keys, values are the keys' first numbers.
    """
    tiling = tiling or Tiling(None)
    tiles_I2, block_tokens, workspace = tiling.tiles_I2, tiling.block_tokens, tiling.workspace
    programs = tiling.programs
    num_tokens, num_heads, head = out_TNH.shape
    tail = q_TNH.shape[2] - head
    assert tail == 0 or k_CMH is v_CMH or k_CMH.data_ptr() == v_CMH.data_ptr()
    parts = parts_of(num_heads, k_CMH.shape[1], head)
    num_kv = k_CMH.shape[1] * parts
    group = num_heads // num_kv
    group_pad = next_power_of_2(group)
    rows = max(16, block_tokens * group_pad)
    group_pad = rows // block_tokens
    if workspace is None or num_tokens > workspace.max_tokens:
        programs = 1
    num_tiles = num_tokens if tiles_I2 is None else tiles_I2.shape[0]
    tree, num_own = attn.tree_TP, 0  # tokens for whose own keys there is a program
    if programs > 1 and tree is not None and tiles_I2 is not None:
        num_own = 1 if num_tiles * num_kv < NUM_SMS // 3 else 2
        programs += cdiv(block_tokens, num_own)
    head_pad = next_power_of_2(head)
    acc, stat, count, max_splits = q_TNH, q_TNH, q_TNH, 0
    if programs > 1:
        acc, stat, count = workspace.acc, workspace.stat, workspace.count
        max_splits = workspace.max_splits
    _attention_kernel[(num_tiles, num_kv, programs)](
        q_TNH, k_CMH, v_CMH, *(scales or (q_TNH, q_TNH)), out_TNH, acc, stat, count,
        attn.pos_T, attn.slot_T, attn.seq_T, attn.table_SB, attn.base_T,
        attn.pos_T if tree is None else tree, attn.pos_T if tiles_I2 is None else tiles_I2,
        q_TNH if sinks_N is None else sinks_N, scale * LOG2E, cap * LOG2E,
        0 if window is None else window, attn.table_SB.stride(0),
        0 if tree is None else tree.stride(0), max_splits, num_tokens,
        least_share(num_tiles * num_kv),
        NUM_HEADS=num_heads, NUM_KV=num_kv, GROUP=group, GROUP_PAD=group_pad, KV_PARTS=parts,
        HEAD=head, HEAD_PAD=head_pad, TAIL=tail, TAIL_PAD=max(16, next_power_of_2(tail)), ROWS=rows,
        TILE=TILE, SPLIT=SPLIT, IS_SHARED=programs > 1,
        BLOCK_SIZE=attn.block_size, HAS_TREE=tree is not None, HAS_TILES=tiles_I2 is not None,
        HAS_WINDOW=window is not None, IS_CHUNK=(window or 0) < 0,
        IS_NEAR=k_CMH.numel() < 2**31, HAS_CAP=cap > 0, HAS_SINKS=sinks_N is not None,
        HAS_SCALES=scales is not None, NUM_OWN=num_own,
        **launch_options(tiling, rows, num_tiles * num_kv, head_pad, tail > 0, tree is not None),
    )  # fmt: skip
