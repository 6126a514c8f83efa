"""Products of a draft's layers in as few launches as they can have, for a few rows.

What is drafted is checked, so that sums may have any order here. A product that reads the stream
norms it: it takes rows times the norm's weights, and divides its sums by their root mean square,
whose squares came with the rows. It can give heads and units at once. A product that writes the
stream adds to it, sums over what attention and units gave in one go, and leaves the rows and
squares for the next. No product is cut into slices, and none needs a kernel of its own for sums.

Shape letters: T rows (packed tokens), D width of the stream, N heads' outputs, F units, I tiles of
a product that wrote the stream, C cache slots, M KV heads, H head width, L positions, V columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_endings import Tile, finish, outputs, turns
from hunch.kernels.gpu_fused import rope_kv_ref
from hunch.kernels.gpu_gemm import _walk, gated_ref, gemm_ref, tile_of
from hunch.kernels.gpu_launch import (
    cdiv,
    let_next_start,
    next_power_of_2,
    options,
    prefetch_l2,
    wait_for_inputs,
)
from hunch.kernels.slices import NUM_SMS

MAX_ROWS = 32
NARROW, WIDE = 16, 32  # outputs of a tile: narrow ones fill the chip


class Rows(NamedTuple):
    """What a product reads of the stream: its rows times the norm's weights, and of each row the
    squares of a part of the stream; None: the rows are normed."""

    scaled_TD: Tensor
    squares_IT: Tensor | None


class ToHeads(NamedTuple):
    """A product that gives tokens' heads: queries out, keys and values into the cache."""

    qkv_ND: Tensor
    bias_N: Tensor | None
    q_TN: Tensor
    k_CMH: Tensor
    v_CMH: Tensor
    pos_T: Tensor
    slot_T: Tensor
    table_LH: Tensor


class ToUnits(NamedTuple):
    """A product that gives an MLP's units: act(gate) * up."""

    up_2FD: Tensor
    y_TF: Tensor
    activation: str = "silu"


def normed_ref(rows: Rows, eps: float) -> Tensor:
    """The rows divided by the root mean square of their stream, in float64."""
    x_TD = rows.scaled_TD.double()
    if rows.squares_IT is None:
        return x_TD
    mean_T = rows.squares_IT.double().sum(0) / x_TD.shape[1]
    return x_TD * (mean_T + eps).rsqrt()[:, None]


def read_stream_ref(
    rows: Rows, eps: float, heads: ToHeads | None, units: ToUnits | None
) -> tuple[Tensor | None, Tensor | None]:
    """Queries (keys and values are written) and activated units; see `read_stream`."""
    x_TD, q, y = normed_ref(rows, eps), None, None
    if heads is not None:
        qkv_ND, bias_N, _, *places = heads
        q = rope_kv_ref(gemm_ref(x_TD, qkv_ND, bias_N), *places).flatten(1)
    if units is not None:
        y = gated_ref(x_TD, units.up_2FD, units.activation)
    return q, y


def write_stream_ref(
    x_TD: Tensor, out_TN: Tensor | None, out_DN: Tensor | None, y_TF: Tensor | None,
    down_DF: Tensor | None, norm_D: Tensor, tile: int,
) -> tuple[Tensor, Rows]:  # fmt: skip
    """The new stream, its rows times the norm's weights, and squares by tiles of outputs."""
    x = x_TD.double()
    for some, weight in ((out_TN, out_DN), (y_TF, down_DF)):
        if some is not None and weight is not None:
            x = x + gemm_ref(some, weight)
    x = x.to(x_TD.dtype).double()  # as it is stored
    squares = torch.stack([part.square().sum(1) for part in x.split(tile, dim=1)])
    return x, Rows(x * norm_D.double(), squares)


@triton.jit
def _read_tile(
    pid, x_ptr, square_ptr, w_ptr, bias_ptr, y_ptr, pos_ptr, slot_ptr, rope_ptr, k_cache_ptr,
    v_cache_ptr, M, N, K, x_stride, y_stride, square_stride, row_stride, eps,
    ENDING: tl.constexpr, HAS_BIAS: tl.constexpr, NUM_SQUARES: tl.constexpr,
    SQUARES_PAD: tl.constexpr, HEAD: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """One tile of outputs of all rows; ENDING as in `gpu_gemm`."""
    IS_DUAL: tl.constexpr = ENDING != "store"
    offs_m = tl.arange(0, BLOCK_M)
    is_row = offs_m < M
    offs_n, is_col, offs_a, offs_b, head, offs_h = outputs(pid, N, ENDING, HEAD, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + offs_m[:, None] * x_stride + k[None, :]
    wa_ptrs = w_ptr + offs_a[None, :].to(tl.int64) * K + k[:, None]
    wb_ptrs = w_ptr + offs_b[None, :].to(tl.int64) * K + k[:, None]
    if PREFETCH > 0:  # weights do not depend on the previous kernel: start reading them
        lines = tl.minimum(tl.arange(0, PREFETCH) * 64, K - 1)
        prefetch_l2(w_ptr + offs_a[:, None].to(tl.int64) * K + lines[None, :])
        if IS_DUAL:
            prefetch_l2(w_ptr + offs_b[:, None].to(tl.int64) * K + lines[None, :])
    wait_for_inputs()
    slot, cos, sin = offs_m, offs_m, offs_m
    if ENDING == "rope":  # loaded now, to be ready when the sums are
        slot, cos, sin = turns(pos_ptr, slot_ptr, rope_ptr, offs_m, is_row, offs_h, HEAD)
    if NUM_SQUARES > 0:
        i = tl.arange(0, SQUARES_PAD)
        square_IM = tl.load(square_ptr + i[:, None] * square_stride + offs_m[None, :] * row_stride,
                            mask=(i < NUM_SQUARES)[:, None] & is_row[None, :],
                            other=0.0)  # fmt: skip
        share = tl.math.rsqrt(tl.sum(square_IM, axis=0) / K + eps)
    a, b = _walk(x_ptrs, wa_ptrs, wb_ptrs, is_row, 0, K, BLOCK_M, BLOCK_N, BLOCK_K, IS_DUAL,
                 IS_EVEN)  # fmt: skip
    if NUM_SQUARES > 0:
        a, b = a * share[:, None], b * share[:, None]
    if HAS_BIAS:
        a += tl.load(bias_ptr + offs_a).to(tl.float32)[None, :]
        if IS_DUAL:
            b += tl.load(bias_ptr + offs_b).to(tl.float32)[None, :]
    finish(a, b, y_ptr, y_ptr, k_cache_ptr, v_cache_ptr, slot, cos, sin, offs_m, offs_n, head,
           offs_h, is_row, is_col, M, y_stride, tl.program_id(1), ENDING, False, HEAD, NUM_HEADS,
           NUM_KV)  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _read_kernel(
    x_ptr, square_ptr, qkv_ptr, bias_ptr, q_ptr, pos_ptr, slot_ptr, rope_ptr, k_cache_ptr,
    v_cache_ptr, up_ptr, y_ptr, M, N, K, x_stride, q_stride, y_stride, square_stride, row_stride,
    eps, NUM_TURNED: tl.constexpr, UNITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    NUM_SQUARES: tl.constexpr, SQUARES_PAD: tl.constexpr, HEAD: tl.constexpr,
    NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """The first NUM_TURNED programs have heads, all others units: UNITS is their ending, "" if
    there are none."""
    pid = tl.program_id(0)
    let_next_start()
    if NUM_TURNED > 0 and UNITS == "":
        _read_tile(pid, x_ptr, square_ptr, qkv_ptr, bias_ptr, q_ptr, pos_ptr, slot_ptr, rope_ptr,
                   k_cache_ptr, v_cache_ptr, M, N, K, x_stride, q_stride, square_stride, row_stride,
                   eps, "rope", HAS_BIAS, NUM_SQUARES, SQUARES_PAD, HEAD, NUM_HEADS, NUM_KV,
                   BLOCK_M, BLOCK_H, BLOCK_K, IS_EVEN, PREFETCH)  # fmt: skip
    elif NUM_TURNED == 0:
        _read_tile(pid, x_ptr, square_ptr, up_ptr, bias_ptr, y_ptr, pos_ptr, slot_ptr, rope_ptr,
                   k_cache_ptr, v_cache_ptr, M, N, K, x_stride, y_stride, square_stride, row_stride,
                   eps, UNITS, HAS_BIAS, NUM_SQUARES, SQUARES_PAD, HEAD, NUM_HEADS, NUM_KV,
                   BLOCK_M, BLOCK_N, BLOCK_K, IS_EVEN, PREFETCH)  # fmt: skip
    else:
        if pid < NUM_TURNED:
            _read_tile(pid, x_ptr, square_ptr, qkv_ptr, bias_ptr, q_ptr, pos_ptr, slot_ptr,
                       rope_ptr, k_cache_ptr, v_cache_ptr, M, N, K, x_stride, q_stride,
                       square_stride, row_stride, eps, "rope", HAS_BIAS, NUM_SQUARES, SQUARES_PAD,
                       HEAD, NUM_HEADS, NUM_KV, BLOCK_M, BLOCK_H, BLOCK_K, IS_EVEN,
                       PREFETCH)  # fmt: skip
        else:
            _read_tile(pid - NUM_TURNED, x_ptr, square_ptr, up_ptr, bias_ptr, y_ptr, pos_ptr,
                       slot_ptr, rope_ptr, k_cache_ptr, v_cache_ptr, M, N, K, x_stride, y_stride,
                       square_stride, row_stride, eps, UNITS, False, NUM_SQUARES, SQUARES_PAD,
                       HEAD, NUM_HEADS, NUM_KV, BLOCK_M, BLOCK_N, BLOCK_K, IS_EVEN,
                       PREFETCH)  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _write_kernel(
    x_ptr, first_ptr, first_w_ptr, more_ptr, more_w_ptr, norm_ptr, out_ptr, scaled_ptr, square_ptr,
    M, N, K, K_MORE, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_MORE: tl.constexpr, IS_EVEN: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """One tile of outputs of all rows: x + first W^T + more W^T."""
    pid = tl.program_id(0)
    let_next_start()
    offs_m, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_col = offs_m < M, offs_n < N
    from_n = tl.minimum(offs_n, N - 1).to(tl.int64)
    norm = tl.load(norm_ptr + from_n).to(tl.float32)
    line = tl.arange(0, LINES) * 64
    prefetch_l2(first_w_ptr + from_n[:, None] * K + tl.minimum(line, K - 1)[None, :])
    if HAS_MORE:
        prefetch_l2(more_w_ptr + from_n[:, None] * K_MORE + tl.minimum(line, K_MORE - 1)[None, :])
    wait_for_inputs()
    at = offs_m[:, None].to(tl.int64) * N + offs_n[None, :]
    is_out = is_row[:, None] & is_col[None, :]
    before = tl.load(x_ptr + at, mask=is_out, other=0.0)
    w_ptrs = first_w_ptr + from_n[None, :] * K + k[:, None]
    total, _ = _walk(first_ptr + offs_m[:, None] * K + k[None, :], w_ptrs, w_ptrs, is_row, 0, K,
                     BLOCK_M, BLOCK_N, BLOCK_K, False, IS_EVEN)  # fmt: skip
    if HAS_MORE:
        w_ptrs = more_w_ptr + from_n[None, :] * K_MORE + k[:, None]
        more, _ = _walk(more_ptr + offs_m[:, None] * K_MORE + k[None, :], w_ptrs, w_ptrs, is_row, 0,
                        K_MORE, BLOCK_M, BLOCK_N, BLOCK_K, False, IS_EVEN)  # fmt: skip
        total += more
    x = (before.to(tl.float32) + total).to(before.dtype)
    tl.store(out_ptr + at, x, mask=is_out)
    x = x.to(tl.float32)
    tl.store(scaled_ptr + at, (x * norm[None, :]).to(before.dtype), mask=is_out)
    tl.store(square_ptr + pid * M + offs_m, tl.sum(tl.where(is_out, x * x, 0.0), axis=1),
             mask=is_row)  # fmt: skip


# --- launch ---------------------------------------------------------------------------------------


def read_stream(rows: Rows, eps: float, heads: ToHeads | None, units: ToUnits | None) -> None:
    """What a layer reads of the stream: heads, units, or both in one launch."""
    x_TD = rows.scaled_TD
    num_units = 0 if units is None else units.up_2FD.shape[0] // 2
    head, num_heads, num_kv, num_turned, block_h = 2, 0, 0, 0, NARROW
    num_outputs = num_units + (0 if heads is None else heads.qkv_ND.shape[0] // 2)
    tile = _tile(len(x_TD), num_outputs, x_TD.shape[1], is_dual=True)
    if heads is not None:
        head, num_kv = heads.k_CMH.shape[2], heads.k_CMH.shape[1]
        num_all = heads.qkv_ND.shape[0] // head
        num_heads = num_all - 2 * num_kv
        block_h = NARROW if num_outputs <= NUM_SMS * NARROW else tile.block_n
        block_h = max(NARROW, min(block_h, next_power_of_2(head // 2)))
        num_turned = num_all * cdiv(head // 2, block_h)
    given, ending = heads or (None, None, *(x_TD,) * 6), "" if units is None else units.activation
    _launch_read(
        rows, eps, tile, num_turned + cdiv(num_units, tile.block_n), given,
        (None, None) if units is None else units[:2], num_units,
        NUM_TURNED=num_turned, UNITS=ending, HEAD=head, NUM_HEADS=num_heads, NUM_KV=num_kv,
        BLOCK_H=block_h,
    )  # fmt: skip


def read_logits(rows: Rows, eps: float, head_VD: Tensor, bias_V: Tensor | None = None) -> Tensor:
    """Scores of every column in float32, after the norm of the stream."""
    x_TD, num_columns = rows.scaled_TD, len(head_VD)
    logits_TV = torch.empty(len(x_TD), num_columns, dtype=torch.float32, device=x_TD.device)
    tile = _tile(len(x_TD), num_columns, x_TD.shape[1], is_dual=False)
    _launch_read(
        rows, eps, tile, cdiv(num_columns, tile.block_n), (None, bias_V, *(x_TD,) * 6),
        (head_VD, logits_TV), num_columns,
        NUM_TURNED=0, UNITS="store", HEAD=2, NUM_HEADS=0, NUM_KV=0, BLOCK_H=NARROW,
    )  # fmt: skip
    return logits_TV


def _tile(num_rows: int, num_outputs: int, num_inputs: int, *, is_dual: bool) -> Tile:
    """As for a target's rows, up to 16 of them: weights' bytes decide, and a tile has all rows."""
    tile = tile_of(NARROW, num_outputs, num_inputs, 1, is_dual)
    return replace(tile, block_m=_height(num_rows))


def _height(num_rows: int) -> int:
    assert num_rows <= MAX_ROWS
    return max(16, next_power_of_2(num_rows))


def _launch_read(
    rows: Rows, eps: float, tile: Tile, num_programs: int, heads: tuple[Tensor | None, ...],
    units: tuple[Tensor | None, ...], num_outputs: int, **known: object,
) -> None:  # fmt: skip
    (x_TD, squares_IT), (num_rows, width) = rows, rows.scaled_TD.shape
    assert x_TD.stride(1) == 1
    (qkv, bias, q, k_cache, v_cache, pos, slot, table), (up, y) = heads, units
    weight = up if qkv is None else qkv
    squares = x_TD if squares_IT is None else squares_IT
    num_squares = 0 if squares_IT is None else len(squares_IT)
    _read_kernel[(num_programs,)](
        x_TD, squares, weight, weight if bias is None else bias, q, pos, slot, table, k_cache,
        v_cache, weight if up is None else up, q if y is None else y, num_rows, num_outputs, width,
        x_TD.stride(0), q.stride(0), 0 if y is None else y.stride(0), squares.stride(0),
        squares.stride(1), eps, HAS_BIAS=bias is not None, NUM_SQUARES=num_squares,
        SQUARES_PAD=next_power_of_2(max(num_squares, 1)), BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, IS_EVEN=width % tile.block_k == 0,
        PREFETCH=tile.prefetch, **known, **options(tile.num_warps, tile.num_stages),
    )  # fmt: skip


def write_tile(width: int) -> int:
    """Outputs of one tile of a product that writes a stream of this width."""
    return NARROW if width <= 2 * NUM_SMS * NARROW else WIDE


def write_stream(
    x_TD: Tensor, first: tuple[Tensor, Tensor], more: tuple[Tensor, Tensor] | None, norm_D: Tensor
) -> tuple[Tensor, Rows]:
    """x + first + more, each an input and its weight, and what the next product reads of that."""
    num_rows, width = x_TD.shape
    block_n, block_k = write_tile(width), 256
    num_tiles = cdiv(width, block_n)
    out_TD, scaled_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
    squares_IT = torch.empty(num_tiles, num_rows, dtype=torch.float32, device=x_TD.device)
    (some, weight), (other, other_w) = first, more or first
    assert all(each.is_contiguous() for each in (x_TD, some, weight, other, other_w))
    inputs = weight.shape[1], other_w.shape[1]
    _write_kernel[(num_tiles,)](
        x_TD, some, weight, other, other_w, norm_D, out_TD, scaled_TD, squares_IT, num_rows, width,
        *inputs, BLOCK_M=_height(num_rows), BLOCK_N=block_n, BLOCK_K=block_k,
        HAS_MORE=more is not None, IS_EVEN=all(k % block_k == 0 for k in inputs), LINES=16,
        **options(4, 5),
    )  # fmt: skip
    return out_TD, Rows(scaled_TD, squares_IT)
