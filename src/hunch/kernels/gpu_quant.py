"""Products with weights held in few bits, bit for bit those of `gpu_gemm` with the same weights
in 16 bits.

Codes become numbers in registers, between the load and the tensor core: (code - offset) * scale +
minimum in float32, rounded once, or the same in 16 bits if that is exact. The order over K and the
slices are those of `gpu_gemm`. Weights are the left operand, which may be in registers, so tiles of
sums are transposed: [outputs, rows].

Shape letters: M rows, N outputs, K inputs, F width of a gated layer, S slices (of a sum) or spans
(of codes), W words of a span, G groups, U units, T packed tokens, C cache slots, H head width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_codes import form_of, numbers_of, places, pointers_of, scales_at
from hunch.kernels.gpu_endings import Tile, finish, outputs, place, turns
from hunch.kernels.gpu_launch import (
    cdiv,
    let_next_start,
    next_power_of_2,
    options,
    prefetch_l2,
    wait_for_inputs,
)
from hunch.kernels.quant import Quantised
from hunch.kernels.slices import slice_of
from hunch.kernels.words import num_parts


@triton.jit
def _span(
    sum, data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, x_ptrs, is_row, k, K,
    offs_w, num_rows, scale, offset, minimum, FORMAT: tl.constexpr, SPAN: tl.constexpr,
    WORDS: tl.constexpr, OFFSET: tl.constexpr, GROUP_K: tl.constexpr, UNIT_K: tl.constexpr,
    HAS_ZERO: tl.constexpr, HAS_MINIMUM: tl.constexpr, HAS_UNIT: tl.constexpr,
    PAIRED: tl.constexpr, ROUTE: tl.constexpr, IS_EVEN: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Add one span's products to the sums; the given scales are used if all of K has one scale."""
    dtype: tl.constexpr = x_ptrs.dtype.element_ty
    offs_k = tl.arange(0, WORDS)
    line_W = (offs_w + (k // SPAN) * num_rows).to(tl.int64)
    word = tl.load(data_ptr + line_W[:, None] * WORDS + places(WORDS)[None, :])
    for part in tl.static_range(SPAN // WORDS):
        first = k + part * WORDS
        if not IS_WHOLE and (part == 0 or GROUP_K < SPAN):
            known = first if IS_EVEN else tl.minimum(first, K - 1)  # padding has no scales
            scale, offset, minimum = scales_at(
                scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, known, offs_w, num_rows,
                OFFSET, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED)  # fmt: skip
        w = numbers_of(word, scale, offset, minimum, dtype, part, FORMAT, ROUTE, HAS_ZERO)
        if IS_EVEN:
            x = tl.load(x_ptrs + first, mask=is_row[None, :], other=0.0)
        else:
            is_k = offs_k < K - first
            x = tl.load(x_ptrs + first, mask=is_row[None, :] & is_k[:, None], other=0.0)
        sum = tl.dot(w, x, sum, input_precision="ieee")
    return sum


@triton.jit(do_not_specialize=["M"])
def _quant_kernel(
    x_ptr, data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, y_ptr, bias_ptr,
    residual_ptr, M, N, K, num_rows, x_stride, y_stride, pos_ptr, slot_ptr, rope_ptr, k_cache_ptr,
    v_cache_ptr, NUM_SPLITS: tl.constexpr, SLICE_K: tl.constexpr, IS_GRID_SPLIT: tl.constexpr,
    ENDING: tl.constexpr, HEAD: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr,
    FORMAT: tl.constexpr, SPAN: tl.constexpr, WORDS: tl.constexpr, OFFSET: tl.constexpr,
    GROUP_K: tl.constexpr, UNIT_K: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_MINIMUM: tl.constexpr,
    HAS_UNIT: tl.constexpr, PAIRED: tl.constexpr, ROUTE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, IS_EVEN: tl.constexpr, IS_WHOLE: tl.constexpr, PREFETCH: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """As `_gemm_kernel`. `num_rows` are the weight's; N may be half of them."""
    pid_m, pid_n = place(tl.cdiv(M, BLOCK_M), GROUP)
    pid_s = tl.program_id(1)
    let_next_start()
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = offs_m < M
    offs_n, is_col, offs_a, offs_b, head, offs_h = outputs(pid_n, N, ENDING, HEAD, BLOCK_N)
    x_ptrs = x_ptr + offs_m[None, :].to(tl.int64) * x_stride + tl.arange(0, WORDS)[:, None]
    first = pid_s * SLICE_K
    last = K
    if IS_GRID_SPLIT or NUM_SPLITS == 1:
        last = tl.minimum(first + SLICE_K, K)
    if PREFETCH > 0:  # weights do not depend on the kernel before: start reading them
        spans = first // SPAN + tl.arange(0, PREFETCH)
        line_P = tl.minimum(spans, (K - 1) // SPAN)[None, :] * num_rows
        prefetch_l2(data_ptr + (line_P + offs_a[:, None]).to(tl.int64) * WORDS)
        if ENDING != "store":
            prefetch_l2(data_ptr + (line_P + offs_b[:, None]).to(tl.int64) * WORDS)
    wait_for_inputs()
    slot, cos, sin = offs_m, offs_m, offs_m
    if ENDING == "rope":
        slot, cos, sin = turns(pos_ptr, slot_ptr, rope_ptr, offs_m, is_row, offs_h, HEAD)
    of_a = scales_at(scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, first, offs_a,
                   num_rows, OFFSET, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT,
                   PAIRED)  # fmt: skip
    of_b = of_a
    if ENDING != "store":
        of_b = scales_at(scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, first, offs_b,
                       num_rows, OFFSET, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT,
                       PAIRED)  # fmt: skip
    a = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    b = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if bias_ptr is not None and pid_s == 0:
        total += tl.load(bias_ptr + offs_a).to(tl.float32)[:, None]
    for k in range(first, last, SPAN):
        a = _span(a, data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, x_ptrs,
                  is_row, k, K, offs_a, num_rows, of_a[0], of_a[1], of_a[2], FORMAT, SPAN, WORDS,
                  OFFSET, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED, ROUTE, IS_EVEN,
                  IS_WHOLE)  # fmt: skip
        if ENDING != "store":
            b = _span(b, data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, x_ptrs,
                      is_row, k, K, offs_b, num_rows, of_b[0], of_b[1], of_b[2], FORMAT, SPAN,
                      WORDS, OFFSET, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED,
                      ROUTE, IS_EVEN, IS_WHOLE)  # fmt: skip
        if NUM_SPLITS > 1 and not IS_GRID_SPLIT and (k + SPAN) % SLICE_K == 0:
            total += a
            a = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if NUM_SPLITS > 1 and not IS_GRID_SPLIT:
        if K % SLICE_K != 0:
            total += a
        a = total
    elif bias_ptr is not None and pid_s == 0:
        a += tl.load(bias_ptr + offs_a).to(tl.float32)[:, None]
        b += tl.load(bias_ptr + (offs_b if ENDING != "store" else offs_a)).to(tl.float32)[:, None]
    finish(tl.trans(a), tl.trans(b), y_ptr, residual_ptr, k_cache_ptr, v_cache_ptr, slot, cos, sin,
           offs_m, offs_n, head, offs_h, is_row, is_col, M, y_stride, pid_s, ENDING, HEAD,
           NUM_HEADS, NUM_KV)  # fmt: skip


def tile_of(m: int, is_narrow: bool, is_split: bool) -> Tile:
    """The best tile for m rows, as measured on an H200; block_k is the weight's span. `is_narrow`:
    codes of 4 bits, which take longest to convert."""
    if m <= 16:
        is_thin = is_narrow and is_split
        return Tile(16, 16, 0, 1, 6, prefetch=4) if is_thin else Tile(16, 32, 0, 2, 6, prefetch=4)
    if m <= 64:
        return Tile(next_power_of_2(m), 64, 0, 4, 4, prefetch=2)
    return Tile(128, 64, 0, 4, 3) if is_narrow else Tile(128, 128, 0, 8, 3)


def launch(
    x_MK: Tensor, w: Quantised, y: Tensor, ending: str, num_outputs: int, split: int,
    *, bias: Tensor | None = None, residual: Tensor | None = None, rope: tuple | None = None,
    heads: tuple[int, int, int] = (2, 0, 0),
) -> None:  # fmt: skip
    """A product of `gpu_gemm` with a quantised weight."""
    if w.order_K is not None:
        x_MK = x_MK.index_select(1, w.order_K)
    assert x_MK.dtype == w.dtype, "a weight stands for numbers of one precision"
    (m, k), span = x_MK.shape, w.span
    is_grid_split = y.dim() == 3 and y.shape[0] == split > 1
    slice_k = slice_of(k, split)
    assert split == 1 or slice_k % span == 0, "a span belongs to one slice"
    num_splits = split if is_grid_split else 1
    tile = tile_of(m, num_parts(w.format) == 4, num_splits > 1)
    block_n = tile.block_n
    if ending == "rope":  # a tile must not cross a head's half
        half = heads[0] // 2
        block_n = max(16, min(block_n, next_power_of_2(half)))
        num_tiles = w.shape[0] // heads[0] * cdiv(half, block_n)
    else:
        num_tiles = cdiv(num_outputs, block_n)
    _quant_kernel[(cdiv(m, tile.block_m) * num_tiles, num_splits)](
        x_MK, *pointers_of(w), y, bias, residual, m, num_outputs, k, w.shape[0], x_MK.stride(0),
        y.stride(-2), *(rope or (None,) * 5), NUM_SPLITS=split, SLICE_K=slice_k,
        IS_GRID_SPLIT=is_grid_split, ENDING=ending, HEAD=heads[0], NUM_HEADS=heads[1],
        NUM_KV=heads[2], **form_of(w), BLOCK_M=tile.block_m, BLOCK_N=block_n, IS_EVEN=k % span == 0,
        IS_WHOLE=len(w.scale_GN) == 1, PREFETCH=tile.prefetch, GROUP=tile.group,
        **options(tile.num_warps, tile.num_stages),
    )  # fmt: skip


@triton.jit
def _expand_kernel(
    data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, y_ptr, num_rows, K,
    FORMAT: tl.constexpr, SPAN: tl.constexpr, WORDS: tl.constexpr, OFFSET: tl.constexpr,
    GROUP_K: tl.constexpr, UNIT_K: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, HAS_UNIT: tl.constexpr, PAIRED: tl.constexpr, ROUTE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One span of a few outputs."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, WORDS)
    is_row = offs_n < num_rows
    offs_w = tl.minimum(offs_n, num_rows - 1)
    line_W = (offs_w + tl.program_id(1) * num_rows).to(tl.int64)
    word = tl.load(data_ptr + line_W[:, None] * WORDS + places(WORDS)[None, :])
    for part in tl.static_range(SPAN // WORDS):
        first = tl.program_id(1) * SPAN + part * WORDS
        scale, offset, minimum = scales_at(
            scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, tl.minimum(first, K - 1),
            offs_w, num_rows, OFFSET, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED
        )  # fmt: skip
        w = numbers_of(word, scale, offset, minimum, y_ptr.dtype.element_ty, part, FORMAT, ROUTE,
                     HAS_ZERO)  # fmt: skip
        is_in = is_row[:, None] & (offs_k < K - first)[None, :]
        tl.store(y_ptr + offs_n[:, None].to(tl.int64) * K + first + offs_k[None, :], w, mask=is_in)


def expand(w: Quantised) -> Tensor:
    """The numbers that a weight stands for, [N, K]; columns in the order of its codes."""
    y_NK = torch.empty(w.shape, dtype=w.dtype, device=w.device)
    block_n = 64
    _expand_kernel[(cdiv(w.shape[0], block_n), len(w.data_SNW))](
        *pointers_of(w), y_NK, *w.shape, **form_of(w), BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return y_NK
