"""Row-wise steps between products: gather, residual add, norm; rotary and KV write with head norms.

One program has one row (or one head of it), in a layout fixed by the width, so that a row's sum is
always added in the same order.

Shape letters: T rows out, V rows of a table, D width, S slices, N heads, M KV heads, H head width,
C cache slots, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_gemm import rope_ref
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options, slice_at, take_turns
from hunch.kernels.kv_store import codes_ref


@dataclass(frozen=True, slots=True)
class RowNorm:
    """A norm over a row: by root mean square or, if it is centred, by mean and deviation."""

    weight_D: Tensor
    bias_D: Tensor | None = None
    is_centred: bool = False


@dataclass(frozen=True, slots=True)
class Places:
    """Learned positions, which are added to embeddings."""

    table_LD: Tensor  # from position 0 on
    pos_T: Tensor


def add_norm_ref(
    x_VD: Tensor, norm: RowNorm | Tensor, eps: float, parts_SVD: Tensor | None = None,
    index_T: Tensor | None = None, *, branch: RowNorm | None = None, part_scale: float = 1.0,
    row_scale: float = 1.0, places: Places | None = None, sum_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(x + parts, its norm), in float64, for the rows named by index_T; see `add_norm`."""
    x = x_VD.double() * row_scale
    if parts_SVD is not None:
        part = parts_SVD.double().sum(0)
        x = x + part_scale * (part if branch is None else _row_norm_ref(part, branch, eps))
    x = x if index_T is None else x[index_T]
    if places is not None:
        x = x + places.table_LD[places.pos_T].double()
    x = (x * sum_scale).to(x_VD.dtype).double()  # the sum is stored, then normed
    return x, _row_norm_ref(x, norm if isinstance(norm, RowNorm) else RowNorm(norm), eps)


def _row_norm_ref(x: Tensor, norm: RowNorm, eps: float) -> Tensor:
    if norm.is_centred:
        x = x - x.mean(-1, keepdim=True)
    y = norm_ref(x, norm.weight_D, eps)
    return y if norm.bias_D is None else y + norm.bias_D.double()


def rope_kv_ref(
    qkv_TK: Tensor, k_CMH: Tensor, v_CMH: Tensor, pos_T: Tensor, slot_T: Tensor,
    table_LH: Tensor | None, norms: tuple[Tensor, Tensor] | None = None, eps: float = 1e-6,
    scales: tuple[Tensor, Tensor] | None = None, is_v_normed: bool = False, is_reader: bool = False,
) -> Tensor:  # fmt: skip
    """Returns q, normed and (with a table) rotated; writes k and v, and scales of codes. A layer
    that reads another's KV (`is_reader`) has q alone."""
    head, num_kv = k_CMH.shape[2], k_CMH.shape[1]
    x = qkv_TK.double().unflatten(-1, (-1, head))
    if is_reader:
        x = torch.cat((x, x[:, :1].expand(-1, 2 * num_kv, -1)), dim=1)
    q, k, v = x.split([x.shape[1] - 2 * num_kv, num_kv, num_kv], dim=1)
    if norms is not None:
        q, k = (
            norm_ref(y.reshape(len(y), -1, len(w)), w, eps).view_as(y)  # of heads, or of all
            for y, w in zip((q, k), norms, strict=True)
        )
    if is_v_normed:
        v = norm_ref(v, torch.ones_like(v), eps)
    if table_LH is not None:
        q, k = (rope_ref(y, pos_T, table_LH) for y in (q, k))
    if is_reader:
        return q
    live_T = slot_T >= 0
    for which, (some_TMH, cache_CMH) in enumerate(((k, k_CMH), (v, v_CMH))):
        some_TMH = some_TMH[live_T]
        if scales is not None:
            some_TMH, scales[which][slot_T[live_T]] = codes_ref(some_TMH, cache_CMH.dtype)
        cache_CMH[slot_T[live_T]] = some_TMH.to(cache_CMH.dtype)
    return q


def norm_ref(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


@triton.jit
def _row_norm(x, weight, bias_ptr, offs, is_in, D, eps, IS_CENTRED: tl.constexpr):
    """The norm of one row, which one program has as a whole."""
    if IS_CENTRED:
        x = tl.where(is_in, x - tl.sum(x, axis=0) / D, 0.0)
    y = x * tl.math.rsqrt(tl.sum(x * x, axis=0) / D + eps) * weight
    if bias_ptr is not None:
        y += tl.load(bias_ptr + offs, mask=is_in, other=0.0).to(tl.float32)
    return y


@triton.jit
def _add_norm_kernel(
    x_ptr, parts_ptr, index_ptr, weight_ptr, bias_ptr, branch_ptr, branch_bias_ptr, place_ptr,
    pos_ptr, sum_ptr, y_ptr, part_stride, D, eps, part_scale, row_scale, sum_scale,
    NUM_SPLITS: tl.constexpr, IS_CENTRED: tl.constexpr, HAS_PART_SCALE: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr, HAS_SUM_SCALE: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_EAGER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_D)
    is_in = offs < D
    if y_ptr is not None:
        weight = tl.load(weight_ptr + offs, mask=is_in, other=0.0).to(tl.float32)
    take_turns(IS_EAGER)
    source = tl.load(index_ptr + row).to(tl.int64) if index_ptr is not None else row
    x = tl.load(x_ptr + source * D + offs, mask=is_in, other=0.0)
    dtype = x.dtype
    if HAS_ROW_SCALE:
        x = (x.to(tl.float32) * row_scale).to(dtype)
    if pos_ptr is not None:
        at = tl.load(pos_ptr + row).to(tl.int64) * D + offs
        place = tl.load(place_ptr + at, mask=is_in, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + place).to(dtype)
    if NUM_SPLITS > 0:
        total = tl.load(parts_ptr + source * D + offs, mask=is_in, other=0.0)
        for s in tl.static_range(1, NUM_SPLITS):
            at_ptr = parts_ptr + slice_at(s, part_stride) + source * D
            total += tl.load(at_ptr + offs, mask=is_in, other=0.0)
        if branch_ptr is not None:
            share = tl.load(branch_ptr + offs, mask=is_in, other=0.0).to(tl.float32)
            total = _row_norm(total, share, branch_bias_ptr, offs, is_in, D, eps, IS_CENTRED)
        if HAS_PART_SCALE:
            total = total * part_scale
        total = x.to(tl.float32) + total
        if HAS_SUM_SCALE:
            total = total * sum_scale
        x = total.to(dtype)
    if sum_ptr is not None:
        tl.store(sum_ptr + row * D + offs, x, mask=is_in)
    if y_ptr is not None:
        y = _row_norm(x.to(tl.float32), weight, bias_ptr, offs, is_in, D, eps, IS_CENTRED)
        tl.store(y_ptr + row * D + offs, y.to(dtype), mask=is_in)


@triton.jit
def _summed(ptrs, is_in, part_stride, NUM_PARTS: tl.constexpr, dtype: tl.constexpr):
    """A product's numbers: slices are added in order, then rounded like a stored product."""
    total = tl.load(ptrs, mask=is_in, other=0.0).to(tl.float32)
    for s in tl.static_range(1, NUM_PARTS):
        total += tl.load(ptrs + slice_at(s, part_stride), mask=is_in, other=0.0)
    return total.to(dtype).to(tl.float32)


@triton.jit
def _store_kv(lo, hi, ptrs, scale_ptr, at, is_live, is_slot, HALF: tl.constexpr):
    """Both halves of heads to the cache; as codes where it has scales, see `codes_ref`."""
    dtype: tl.constexpr = ptrs.dtype.element_ty
    if scale_ptr is not None:
        MOST: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
        AXIS: tl.constexpr = len(lo.shape) - 1
        peak = tl.maximum(tl.max(tl.abs(lo), AXIS), tl.max(tl.abs(hi), AXIS))
        scale = tl.where(peak > 0, peak / MOST, 1.0)
        if AXIS == 1:
            scale = scale[:, None]
        lo, hi = lo / scale, hi / scale
        if dtype == tl.int8:  # to the nearest; between two the even one
            lo, hi = (lo + 12582912.0) - 12582912.0, (hi + 12582912.0) - 12582912.0
        tl.store(scale_ptr + at, scale, mask=is_slot)
    tl.store(ptrs, lo.to(dtype), mask=is_live)
    tl.store(ptrs + HALF, hi.to(dtype), mask=is_live)


@triton.jit
def _rope_kv_kernel(
    qkv_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, pos_ptr, slot_ptr, rope_ptr,
    temper_ptr, q_norm_ptr, k_norm_ptr, eps, part_stride,
    HEAD: tl.constexpr, HALF_PAD: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr,
    NUM_ALL: tl.constexpr, NUM_PARTS: tl.constexpr, IS_V_NORMED: tl.constexpr,
    WHOLE_PAD: tl.constexpr, IS_EAGER: tl.constexpr,
):  # fmt: skip
    """With head norms: one program per token and head: q heads, then k heads, then v heads.

    With WHOLE_PAD a norm is over all heads of q, or of k, which each program adds up for itself.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = HEAD // 2
    offs = tl.arange(0, HALF_PAD)
    is_in = offs < HALF
    take_turns(IS_EAGER)
    row_ptr = qkv_ptr + (token * NUM_ALL + head) * HEAD
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    lo = _summed(row_ptr + offs, is_in, part_stride, NUM_PARTS, dtype)
    hi = _summed(row_ptr + HALF + offs, is_in, part_stride, NUM_PARTS, dtype)
    if head < NUM_HEADS + NUM_KV:
        norm_ptr = q_norm_ptr if head < NUM_HEADS else k_norm_ptr
        if WHOLE_PAD:
            first = 0 if head < NUM_HEADS else NUM_HEADS
            count = NUM_HEADS * HEAD if head < NUM_HEADS else NUM_KV * HEAD
            all_offs = tl.arange(0, WHOLE_PAD)
            all_ptrs = qkv_ptr + (token * NUM_ALL + first) * HEAD + all_offs
            every = _summed(all_ptrs, all_offs < count, part_stride, NUM_PARTS, dtype)
            rstd = tl.math.rsqrt(tl.sum(every * every, 0) / count + eps)
            norm_ptr += (head - first) * HEAD
        else:
            rstd = tl.math.rsqrt((tl.sum(lo * lo, 0) + tl.sum(hi * hi, 0)) / HEAD + eps)
        lo = lo * rstd * tl.load(norm_ptr + offs, mask=is_in, other=0.0).to(tl.float32)
        hi = hi * rstd * tl.load(norm_ptr + HALF + offs, mask=is_in, other=0.0).to(tl.float32)
        if rope_ptr is not None:
            at = rope_ptr + tl.load(pos_ptr + token) * HEAD + offs
            cos = tl.load(at, mask=is_in, other=0.0)
            sin = tl.load(at + HALF, mask=is_in, other=0.0)
            lo, hi = lo * cos - hi * sin, hi * cos + lo * sin
    elif IS_V_NORMED:
        rstd = tl.math.rsqrt((tl.sum(lo * lo, 0) + tl.sum(hi * hi, 0)) / HEAD + eps)
        lo, hi = lo * rstd, hi * rstd
    if head < NUM_HEADS:
        if temper_ptr is not None:
            temper = tl.load(temper_ptr + tl.load(pos_ptr + token))
            lo, hi = lo * temper, hi * temper
        q_ptrs = q_ptr + (token * NUM_HEADS + head) * HEAD + offs
        tl.store(q_ptrs, lo.to(q_ptr.dtype.element_ty), mask=is_in)
        tl.store(q_ptrs + HALF, hi.to(q_ptr.dtype.element_ty), mask=is_in)
    else:
        slot = tl.load(slot_ptr + token).to(tl.int64)
        cache_ptr = k_cache_ptr if head < NUM_HEADS + NUM_KV else v_cache_ptr
        at = slot * NUM_KV + (head - NUM_HEADS) % NUM_KV
        kv_ptrs = cache_ptr + at * HEAD + offs
        is_live = is_in & (slot >= 0)
        scale_ptr = k_scale_ptr
        if k_scale_ptr is not None:
            scale_ptr = k_scale_ptr if head < NUM_HEADS + NUM_KV else v_scale_ptr
        _store_kv(lo, hi, kv_ptrs, scale_ptr, at, is_live, slot >= 0, HALF)


@triton.jit
def _rope_rows_kernel(
    qkv_ptr, q_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, pos_ptr, slot_ptr, rope_ptr,
    temper_ptr, num_tokens, part_stride,
    HEAD: tl.constexpr, HALF_PAD: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr,
    BLOCK_T: tl.constexpr, NUM_PARTS: tl.constexpr, IS_EAGER: tl.constexpr,
):  # fmt: skip
    """`_rope_kv_kernel` without norms, one head of many tokens: with no sums, any tile will do."""
    head = tl.program_id(1)
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    HALF: tl.constexpr = HEAD // 2
    offs = tl.arange(0, HALF_PAD)[None, :]
    is_token = token < num_tokens
    is_in = is_token[:, None] & (offs < HALF)
    take_turns(IS_EAGER)
    row_ptrs = qkv_ptr + (token[:, None] * (NUM_HEADS + 2 * NUM_KV) + head) * HEAD + offs
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    lo = _summed(row_ptrs, is_in, part_stride, NUM_PARTS, dtype)
    hi = _summed(row_ptrs + HALF, is_in, part_stride, NUM_PARTS, dtype)
    if rope_ptr is not None:  # noqa: SIM102 - known when the kernel is compiled
        if head < NUM_HEADS + NUM_KV:
            pos = tl.load(pos_ptr + token, mask=is_token, other=0)
            cos = tl.load(rope_ptr + pos[:, None] * HEAD + offs, mask=is_in, other=0.0)
            sin = tl.load(rope_ptr + pos[:, None] * HEAD + HALF + offs, mask=is_in, other=0.0)
            lo, hi = lo * cos - hi * sin, hi * cos + lo * sin
    if head < NUM_HEADS:
        if temper_ptr is not None:
            temper_ptrs = temper_ptr + tl.load(pos_ptr + token, mask=is_token, other=0)
            temper = tl.load(temper_ptrs, mask=is_token, other=0.0)[:, None]
            lo, hi = lo * temper, hi * temper
        q_ptrs = q_ptr + (token[:, None] * NUM_HEADS + head) * HEAD + offs
        tl.store(q_ptrs, lo.to(q_ptr.dtype.element_ty), mask=is_in)
        tl.store(q_ptrs + HALF, hi.to(q_ptr.dtype.element_ty), mask=is_in)
    else:
        slot = tl.load(slot_ptr + token, mask=is_token, other=-1).to(tl.int64)[:, None]
        cache_ptr = k_cache_ptr if head < NUM_HEADS + NUM_KV else v_cache_ptr
        at = slot * NUM_KV + (head - NUM_HEADS) % NUM_KV
        kv_ptrs = cache_ptr + at * HEAD + offs
        is_live = is_in & (slot >= 0)
        scale_ptr = k_scale_ptr
        if k_scale_ptr is not None:
            scale_ptr = k_scale_ptr if head < NUM_HEADS + NUM_KV else v_scale_ptr
        _store_kv(lo, hi, kv_ptrs, scale_ptr, at, is_live, slot >= 0, HALF)


def add_norm(
    x_VD: Tensor, norm: RowNorm | Tensor | None, eps: float, y_TD: Tensor | None,
    sum_TD: Tensor | None = None, parts_SVD: Tensor | None = None, index_T: Tensor | None = None,
    *, branch: RowNorm | None = None, part_scale: float = 1.0, row_scale: float = 1.0,
    places: Places | None = None, sum_scale: float = 1.0, is_eager: bool = False,
) -> None:  # fmt: skip
    """x + parts (slices in order) to sum_TD, its norm to y_TD; rows by index_T where given.

    With an embedding table for x and token ids for index_T this is the embedding; without a norm
    only the sum is stored. sum_TD, and y_TD without it, may be x itself where no index is given.
    The parts' sum is normed by `branch` and scaled before it is added; rows of x are scaled and
    have learned positions added. The sum of x and parts is scaled by `sum_scale`. `norm` may be
    just a weight. `is_eager`: the next kernel may start at once.
    """
    out = y_TD if sum_TD is None else sum_TD
    assert out is not None
    assert (norm is None) == (y_TD is None)
    norm = RowNorm(norm) if isinstance(norm, Tensor) else norm
    assert norm is None or branch is None or norm.is_centred == branch.is_centred
    width = x_VD.shape[1]
    block = next_power_of_2(width)
    _add_norm_kernel[(out.shape[0],)](
        x_VD, parts_SVD, index_T, *_of_norm(norm), *_of_norm(branch),
        *((None, None) if places is None else (places.table_LD, places.pos_T)), sum_TD, y_TD,
        0 if parts_SVD is None else parts_SVD.stride(0), width, eps, part_scale, row_scale,
        sum_scale, NUM_SPLITS=0 if parts_SVD is None else parts_SVD.shape[0],
        IS_CENTRED=any(some is not None and some.is_centred for some in (norm, branch)),
        HAS_PART_SCALE=part_scale != 1.0, HAS_ROW_SCALE=row_scale != 1.0,
        HAS_SUM_SCALE=sum_scale != 1.0, BLOCK_D=block, IS_EAGER=is_eager,
        **options(max(1, min(8, block // 512))),
    )  # fmt: skip


def _of_norm(norm: RowNorm | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.weight_D, norm.bias_D)


def embed(table_VD: Tensor, ids_T: Tensor, out_TD: Tensor) -> None:
    """Rows of the embedding table."""
    add_norm(table_VD, None, 0.0, None, sum_TD=out_TD, index_T=ids_T)


def rope_kv(
    qkv_TK: Tensor, q_TN: Tensor, k_CMH: Tensor, v_CMH: Tensor, pos_T: Tensor, slot_T: Tensor,
    table_LH: Tensor | None, norms: tuple[Tensor, Tensor] | None = None, eps: float = 1e-6,
    scales: tuple[Tensor, Tensor] | None = None, is_v_normed: bool = False, is_reader: bool = False,
    *, temper_L: Tensor | None = None, is_eager: bool = False,
) -> None:  # fmt: skip
    """Head norms and rotation (if given) and the KV write, after a product that did not do them.

    A product may come as sums of its slices, [S, T, K] in float32. A cache of 8 bits has scales,
    [C, M, 1], of keys and values. Norms are of each head. Where they have a weight for every
    number of every head, they are of all heads of q, and of k, at once. With norms, heads of v may
    be divided by their root mean square, and a reader has q alone. Queries are multiplied by
    `temper_L` at their position.
    """
    head, num_kv = k_CMH.shape[2], k_CMH.shape[1]
    num_tokens, width = qkv_TK.shape[-2:]
    num_all = width // head
    num_heads = num_all if is_reader else num_all - 2 * num_kv
    assert norms is not None or not (is_v_normed or is_reader)
    num_parts, stride = (len(qkv_TK), qkv_TK.stride(0)) if qkv_TK.dim() == 3 else (1, 0)
    assert table_LH is None or table_LH.dtype == torch.float32
    where = (q_TN, k_CMH, v_CMH, *(scales or (None, None)), pos_T, slot_T, table_LH, temper_L)
    if norms is None:
        _rope_rows_kernel[(cdiv(num_tokens, 16), num_heads + 2 * num_kv)](
            qkv_TK, *where, num_tokens, stride, HEAD=head, HALF_PAD=next_power_of_2(head // 2),
            NUM_HEADS=num_heads, NUM_KV=num_kv, BLOCK_T=16, NUM_PARTS=num_parts, IS_EAGER=is_eager,
            **options(4),
        )  # fmt: skip
        return
    q_norm, k_norm = norms
    whole = next_power_of_2(num_heads * head) if len(q_norm) > head else 0
    _rope_kv_kernel[(num_tokens, num_all)](
        qkv_TK, *where, q_norm, k_norm, eps, stride, HEAD=head,
        HALF_PAD=next_power_of_2(head // 2), NUM_HEADS=num_heads, NUM_KV=num_kv, NUM_ALL=num_all,
        NUM_PARTS=num_parts, IS_V_NORMED=is_v_normed, WHOLE_PAD=whole, IS_EAGER=is_eager,
        **options(4 if whole else 1),
    )  # fmt: skip
