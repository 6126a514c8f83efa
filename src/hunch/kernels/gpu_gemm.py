"""Matrix products whose rows do not depend on each other: y = x W^T, with fused endings.

Products are added over K in order, 16 at a time inside the tensor core, in `split` slices fixed by
the weight's shape; the slices' sums are added in order. Tile sizes change with M, the order of
additions never does. Weights in few bits (`quant.Quantised`) give bit for bit the results of the
16-bit weights that they stand for.

Shape letters: M rows, N outputs, K inputs, F width of a gated layer, S slices, T packed tokens,
C cache slots, H head width, L positions.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hunch.kernels import gpu_direct, gpu_quant
from hunch.kernels.activation import gated
from hunch.kernels.gpu_endings import Tile, finish, outputs, place, turns
from hunch.kernels.gpu_launch import (
    HAS_BULK_COPIES,
    cdiv,
    let_next_start,
    next_power_of_2,
    options,
    prefetch_l2,
    wait_for_inputs,
)
from hunch.kernels.quant import Quantised, Weight, slices_of
from hunch.kernels.slices import NUM_SMS, SLICE, slice_of

# Tiles of many rows are loaded by the GPU's bulk copies, which need no address per number: tiles of
# more than 64 rows if sums have `BULK_K` inputs or more, tiles of 64 rows if they have `LONG_K`.
BULK_K, LONG_K = 1024, 3072
MANY_OUTPUTS = 16384  # of an output matrix: with few rows, bulk copies gain nothing there


def gemm_ref(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """The specification, in float64."""
    y_MN = x_MK.double() @ w_NK.double().T
    return y_MN if bias_N is None else y_MN + bias_N.double()


def gated_ref(x_MK: Tensor, w_2FK: Tensor, activation: str = "silu") -> Tensor:
    """act(gate) * up; gate rows come before up rows."""
    return gated(gemm_ref(x_MK, w_2FK), activation)


def rope_ref(x_TNH: Tensor, pos_T: Tensor, table_LH: Tensor) -> Tensor:
    """Rotate halves; the table holds cos | sin of each position."""
    lo, hi = x_TNH.double().chunk(2, dim=-1)
    cos, sin = table_LH[pos_T, None].double().chunk(2, dim=-1)
    return torch.cat([lo * cos - hi * sin, hi * cos + lo * sin], dim=-1)


@triton.jit
def walk(
    x_ptrs, wa_ptrs, wb_ptrs, x_tiles, w_tiles, is_row, a, first_m, first_a, first_b, k_first,
    k_last, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SLICE_K: tl.constexpr, IS_DUAL: tl.constexpr, HAS_SLICES: tl.constexpr, IS_EVEN: tl.constexpr,
    IS_BULK: tl.constexpr,
):  # fmt: skip
    """Inputs k_first to k_last, in order; b is for pairs: gate and up, or the halves of a head.

    HAS_SLICES: all of K in one loop, to read ahead across slices; their sums are added to `a` in
    order. IS_BULK: tiles are loaded by bulk copies.
    """
    offs_k = tl.arange(0, BLOCK_K)
    part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    b = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(k_first, k_last, BLOCK_K):
        if IS_BULK:
            x = x_tiles.load([first_m, k])
            wa = w_tiles.load([first_a, k]).T
        elif IS_EVEN:
            x = tl.load(x_ptrs + k, mask=is_row[:, None], other=0.0)
            wa = tl.load(wa_ptrs + k)
        else:
            is_k = offs_k < k_last - k
            x = tl.load(x_ptrs + k, mask=is_row[:, None] & is_k[None, :], other=0.0)
            wa = tl.load(wa_ptrs + k, mask=is_k[:, None], other=0.0)
        part = tl.dot(x, wa, part, input_precision="ieee")
        if IS_DUAL:
            if IS_BULK:
                wb = w_tiles.load([first_b, k]).T
            elif IS_EVEN:
                wb = tl.load(wb_ptrs + k)
            else:
                wb = tl.load(wb_ptrs + k, mask=is_k[:, None], other=0.0)
            b = tl.dot(x, wb, b, input_precision="ieee")
        if HAS_SLICES and (k + BLOCK_K) % SLICE_K == 0:
            a += part
            part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if not HAS_SLICES:
        a = part
    elif k_last % SLICE_K != 0:
        a += part
    return a, b


@triton.jit(do_not_specialize=["M"])
def _gemm_kernel(
    x_ptr, w_ptr, x_tiles, w_tiles, y_ptr, bias_ptr, residual_ptr, M, N, K, x_stride, y_stride,
    pos_ptr, slot_ptr, rope_ptr, k_cache_ptr, v_cache_ptr,
    NUM_SPLITS: tl.constexpr, SLICE_K: tl.constexpr, IS_GRID_SPLIT: tl.constexpr,
    ENDING: tl.constexpr, HEAD: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr, PREFETCH: tl.constexpr, GROUP: tl.constexpr, IS_BULK: tl.constexpr,
):  # fmt: skip
    """ENDING: "store" (+ bias, residual), an activation's name (act(a) * b), or "rope" (q out, k, v
    to the cache). IS_BULK: x and w are read by tiles, and K is a multiple of BLOCK_K."""
    pid_m, pid_n = place(tl.cdiv(M, BLOCK_M), GROUP)
    pid_s = tl.program_id(1)
    let_next_start()
    IS_DUAL: tl.constexpr = ENDING != "store"
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = offs_m < M
    offs_n, is_col, offs_a, offs_b, head, offs_h = outputs(pid_n, N, ENDING, HEAD, BLOCK_N)
    HAS_SLICES: tl.constexpr = NUM_SPLITS > 1 and not IS_GRID_SPLIT
    k_first = 0 if HAS_SLICES else pid_s * SLICE_K
    k_last = K if HAS_SLICES else tl.minimum(k_first + SLICE_K, K)
    x_ptrs, wa_ptrs, wb_ptrs = None, None, None
    if not IS_BULK:
        x_ptrs = x_ptr + offs_m[:, None].to(tl.int64) * x_stride + tl.arange(0, BLOCK_K)[None, :]
        wa_ptrs = w_ptr + offs_a[None, :].to(tl.int64) * K + tl.arange(0, BLOCK_K)[:, None]
        wb_ptrs = w_ptr + offs_b[None, :].to(tl.int64) * K + tl.arange(0, BLOCK_K)[:, None]
    if PREFETCH > 0:  # weights do not depend on the previous kernel: start reading them
        lines = tl.minimum(k_first + tl.arange(0, PREFETCH) * 64, K - 1)
        prefetch_l2(w_ptr + offs_a[:, None].to(tl.int64) * K + lines[None, :])
        if IS_DUAL:
            prefetch_l2(w_ptr + offs_b[:, None].to(tl.int64) * K + lines[None, :])
    wait_for_inputs()
    slot, cos, sin = offs_m, offs_m, offs_m
    if ENDING == "rope":  # loaded now, to be ready when the sums are
        slot, cos, sin = turns(pos_ptr, slot_ptr, rope_ptr, offs_m, is_row, offs_h, HEAD)
    a = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if HAS_SLICES and bias_ptr is not None:
        a += tl.load(bias_ptr + offs_a).to(tl.float32)[None, :]
    first_n = pid_n * BLOCK_N
    a, b = walk(x_ptrs, wa_ptrs, wb_ptrs, x_tiles, w_tiles, is_row, a, pid_m * BLOCK_M, first_n,
                N + first_n, k_first, k_last, BLOCK_M, BLOCK_N, BLOCK_K, SLICE_K, IS_DUAL,
                HAS_SLICES, IS_EVEN, IS_BULK)  # fmt: skip
    if bias_ptr is not None and not HAS_SLICES and pid_s == 0:  # in the first slice
        a += tl.load(bias_ptr + offs_a).to(tl.float32)[None, :]
        b += tl.load(bias_ptr + (offs_b if IS_DUAL else offs_a)).to(tl.float32)[None, :]
    finish(a, b, y_ptr, residual_ptr, k_cache_ptr, v_cache_ptr, slot, cos, sin, offs_m, offs_n,
           head, offs_h, is_row, is_col, M, y_stride, pid_s, ENDING, HEAD, NUM_HEADS,
           NUM_KV)  # fmt: skip


def tile_of(m: int, num_outputs: int, k: int, num_splits: int, is_dual: bool) -> Tile:
    """The best tile for m rows, as measured on an H200. Up to 64 rows the weights' bytes decide."""
    num_tiles = num_outputs * num_splits / 32
    is_huge = num_tiles > 4 * NUM_SMS
    if m > 512 or (m > 64 and is_huge):
        if is_huge and not is_dual and num_splits == 1:
            return Tile(128, 256, 64, 8, 4, group=8)
        if num_tiles < 64:
            return Tile(128, 64, 64, 8, 3, group=8)
        return Tile(128, 128, 64, 8, 4, group=8)
    if k >= 2048:
        return _deep_tile(m, num_tiles, is_dual)
    if m > 64:
        return Tile(64, 32 if is_dual or num_tiles < 64 else 64, 64, 4, 4, 8)
    if m > 16:
        if is_dual:
            return Tile(64, 32, 128 if num_tiles < 2 * NUM_SMS else 64, 4, 4, 8)
        if num_tiles < 32:
            return Tile(16, 32, 128, 4, 4, 8)
        return Tile(64, 64 if num_tiles > 2 * NUM_SMS else 32, 64, 4, 5, 8)
    if is_dual:
        if k >= 1024 and k % 256 == 0 and num_tiles <= NUM_SMS:
            return Tile(16, 32, 256, 4, 3, 4)
        # Two of these fit a multiprocessor, or three with fewer stages: all should run at once.
        is_second = k >= 1024 and 2 * NUM_SMS < num_tiles <= 3 * NUM_SMS
        return Tile(16, 32, 128, 4, 3 if is_second else 5, 8)
    return Tile(16, 64 if num_tiles > 2 * NUM_SMS else 16 if num_tiles < 64 else 32, 64, 4, 6, 8)


def _deep_tile(m: int, num_tiles: float, is_dual: bool) -> Tile:
    """`tile_of` for long sums, in which a program can read far ahead.

    A multiprocessor has room for one of the largest tiles: where there are a few more of them than
    multiprocessors, these few would take as long as all before, and smaller tiles are faster.
    """
    is_huge = num_tiles > 4 * NUM_SMS
    is_second = 2 * NUM_SMS < num_tiles <= 3 * NUM_SMS
    if m > 64:
        return Tile(128, 64 if is_dual else 128 if num_tiles > 2 * NUM_SMS else 64, 128, 8, 3, 8)
    if m > 16:
        if is_dual:
            return Tile(64, 64, 64, 4, 4, 4)
        if m <= 32 and num_tiles < NUM_SMS:
            return Tile(16, 64, 256, 4, 3, 4)
        if is_second:
            return Tile(64, 64, 64, 4, 6, 8)
        return Tile(64, 128, 64, 4, 3, 8) if is_huge else Tile(64, 64, 128, 8, 5, 4)
    if is_dual:
        return Tile(16, 32, 256, 4, 3)
    if num_tiles < NUM_SMS:
        return Tile(16, 32, 256, 4, 4)
    if is_second:
        return Tile(16, 32, 128, 4, 6)
    return Tile(16, 64, 128 if is_huge else 256, 4, 4, 8)


def bulk_tile_of(m: int, num_outputs: int, num_splits: int, is_dual: bool) -> Tile:
    """The best tile for bulk copies, as measured on an H200 for models of 1.5B and 7B."""
    tall = cdiv(m, 128) * num_splits
    wide = tall * cdiv(num_outputs, 128) / NUM_SMS  # tiles per multiprocessor
    narrow = tall * cdiv(num_outputs, 64) / NUM_SMS
    if is_dual:
        if m <= 64 or narrow < 0.75:
            return Tile(64, 64, 64, 4, 3, 4, 8)
        is_filled = wide <= 1 or wide / ceil(wide) >= 0.75
        return Tile(128, 128, 64, 8, 4, 4, 8) if is_filled else Tile(128, 64, 64, 8, 3, 4, 8)
    if m <= 64 or narrow < 0.5:
        return Tile(64, 64, 128, 4, 4, 4, 8)
    if m <= 128:
        return Tile(128, 64, 128, 8, 4, 4, 8) if narrow <= 1 else Tile(64, 64, 64, 4, 4, 4, 8)
    return Tile(128, 128, 64, 4, 3, 4, 8) if wide > 1 else Tile(128, 64, 64, 4, 4, 4, 8)


def has_bulk(m: int, weight: Weight) -> bool:
    """Whether bulk copies load the tiles of a product of m rows."""
    if isinstance(weight, Quantised) or not HAS_BULK_COPIES or m < 64:
        return False
    k, is_fit = weight.shape[1], weight.element_size() == 2 and weight.data_ptr() % 16 == 0
    return is_fit and k % SLICE == 0 and k >= (LONG_K if m == 64 else BULK_K)


def rows_for(m: int, weight: Weight) -> int:
    """Rows to pad a product of m rows to, as a bulk copy of less than a tile is slow."""
    size = 64 if m <= 64 else 128
    return size if 16 < m < size and has_bulk(size, weight) else m


def _whole_tile(num_outputs: int) -> Tile:
    """A tile for all slices of a product of many rows in one loop."""
    if num_outputs <= 1024:
        return Tile(128, 64, 64, 4, 3, group=8)
    return Tile(128, 128, 64, 8, 4, group=8)


def _launch(
    x_MK: Tensor, w_NK: Weight, y: Tensor, ending: str, num_outputs: int, split: int,
    *, bias: Tensor | None = None, residual: Tensor | None = None, rope: tuple | None = None,
    heads: tuple[int, int, int] = (2, 0, 0),
) -> None:  # fmt: skip
    if isinstance(w_NK, Quantised):
        if gpu_direct.can_multiply(x_MK, w_NK, y, ending, split):
            gpu_direct.launch(x_MK, w_NK, y, ending, num_outputs, split, bias=bias,
                              residual=residual)  # fmt: skip
        else:
            gpu_quant.launch(x_MK, w_NK, y, ending, num_outputs, split, bias=bias,
                             residual=residual, rope=rope, heads=heads)  # fmt: skip
        return
    m, k = x_MK.shape
    is_dual = ending != "store"
    is_grid_split = y.dim() == 3 and y.shape[0] == split > 1
    slice_k = slice_of(k, split)
    is_bulk = ending != "rope" and has_bulk(m, w_NK) and _is_aligned(x_MK)
    is_bulk = is_bulk and (is_dual or m > 128 or num_outputs <= MANY_OUTPUTS)
    if split > 1 and not is_grid_split:
        tile = _whole_tile(num_outputs)
        assert slice_k % tile.block_k == 0, "a step of the walk belongs to one slice"
    elif is_bulk:
        tile = bulk_tile_of(m, num_outputs, split if is_grid_split else 1, is_dual)
        if k % tile.block_k or slice_k % tile.block_k:
            tile = replace(tile, block_k=SLICE)
    else:
        tile = tile_of(m, num_outputs, k, split if is_grid_split else 1, is_dual)
    if ending == "rope":  # a tile must not cross a head's half
        half = heads[0] // 2
        block_n = max(16, min(tile.block_n, next_power_of_2(half)))
        num_tiles = w_NK.shape[0] // heads[0] * cdiv(half, block_n)
    else:
        block_n = tile.block_n
        num_tiles = cdiv(num_outputs, block_n)
    grid = (cdiv(m, tile.block_m) * num_tiles, split if is_grid_split else 1)
    x_tiles, w_tiles = None, None
    if is_bulk:
        x_tiles = TensorDescriptor.from_tensor(x_MK, [tile.block_m, tile.block_k])
        w_tiles = TensorDescriptor.from_tensor(w_NK, [block_n, tile.block_k])
    _gemm_kernel[grid](
        x_MK, w_NK, x_tiles, w_tiles, y, bias, residual, m, num_outputs, k, x_MK.stride(0),
        y.stride(-2), *(rope or (None,) * 5),
        NUM_SPLITS=split, SLICE_K=slice_k, IS_GRID_SPLIT=is_grid_split, ENDING=ending,
        HEAD=heads[0], NUM_HEADS=heads[1], NUM_KV=heads[2],
        BLOCK_M=tile.block_m, BLOCK_N=block_n, BLOCK_K=tile.block_k,
        IS_EVEN=k % tile.block_k == 0 and slice_k % tile.block_k == 0, PREFETCH=tile.prefetch,
        GROUP=tile.group, IS_BULK=is_bulk, **options(tile.num_warps, tile.num_stages),
    )  # fmt: skip


def _is_aligned(x_MK: Tensor) -> bool:
    return x_MK.data_ptr() % 16 == 0 and x_MK.stride(0) % 8 == 0 and x_MK.stride(1) == 1


def gemm(
    x_MK: Tensor, w_NK: Weight, y_MN: Tensor, bias_N: Tensor | None = None,
    residual_MN: Tensor | None = None,
) -> None:  # fmt: skip
    """y = x W^T + bias + residual, rounded once. K is one slice."""
    _launch(x_MK, w_NK, y_MN, "store", w_NK.shape[0], 1, bias=bias_N, residual=residual_MN)


def gemm_parts(
    x_MK: Tensor, w_NK: Weight, parts_SMN: Tensor, bias_N: Tensor | None = None,
    split: int | None = None,
) -> None:  # fmt: skip
    """The slices' sums in float32, for `add_norm` to add in order. S = 1: already added.

    split: slices; None: as the weight's shape and bits say.
    """
    split = split or slices_of(w_NK)
    assert parts_SMN.dtype == torch.float32
    assert parts_SMN.shape[0] in (1, split)
    _launch(x_MK, w_NK, parts_SMN, "store", w_NK.shape[0], split, bias=bias_N)


def gemm_gated(
    x_MK: Tensor, w_2FK: Weight, y_MF: Tensor, bias_2F: Tensor | None = None,
    activation: str = "silu",
) -> None:  # fmt: skip
    """act(x Wg^T) * (x Wu^T); w_2FK holds the gate's rows, then the up projection's."""
    _launch(x_MK, w_2FK, y_MF, activation, w_2FK.shape[0] // 2, 1, bias=bias_2F)


def gemm_rope(
    x_TK: Tensor, w_NK: Weight, q_TN: Tensor, k_CMH: Tensor, v_CMH: Tensor, pos_T: Tensor,
    slot_T: Tensor, table_LH: Tensor, bias_N: Tensor | None = None,
) -> None:  # fmt: skip
    """q, k and v of each token: q and k rotated, k and v written to the token's slot."""
    head, num_kv = k_CMH.shape[2], k_CMH.shape[1]
    num_heads = w_NK.shape[0] // head - 2 * num_kv
    rope = (pos_T, slot_T, table_LH, k_CMH, v_CMH)
    _launch(x_TK, w_NK, q_TN, "rope", w_NK.shape[0] // 2, 1, bias=bias_N, rope=rope,
            heads=(head, num_heads, num_kv))  # fmt: skip


def num_parts(m: int, weight: Weight) -> int:
    """Slices that `gemm_parts` should store apart for m rows: all, if they help fill the chip."""
    n = weight.shape[0]
    tile = _whole_tile(n)
    num_tiles = cdiv(m, tile.block_m) * cdiv(n, tile.block_n)
    return 1 if m > 128 and num_tiles >= 0.75 * NUM_SMS else slices_of(weight)
