"""Latent attention on a GPU, without the attention itself: what is cached, and products per head.

Shape letters: T packed tokens, N heads, P width of a head's part without a position, R width of the
part that is turned, C width of the latent, X = P + R, H = C + R width of what is cached, Q width of
the queries' own latent, S slices, O outputs and I inputs of a product per head, L positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_fused import _summed, norm_ref
from hunch.kernels.gpu_gemm import rope_ref
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options, take_turns


def keep_latent_ref(
    kv_TH: Tensor, weight_C: Tensor, eps: float, cache_CH: Tensor, pos_T: Tensor, slot_T: Tensor,
    table_LR: Tensor,
) -> None:  # fmt: skip
    """Write the normed latent and the rotated rest to the token's slot, in float64."""
    size = len(weight_C)
    x = kv_TH.double()
    turned_TR = rope_ref(x[:, None, size:], pos_T, table_LR)[:, 0]
    kept_TH = torch.cat((norm_ref(x[:, :size], weight_C, eps), turned_TR), dim=1)
    live_T = slot_T >= 0
    cache_CH[slot_T[live_T]] = kept_TH[live_T].to(cache_CH.dtype)


def absorb_ref(q_TNX: Tensor, k_up_NCP: Tensor, pos_T: Tensor, table_LR: Tensor) -> Tensor:
    """Queries over what is cached, TNH, in float64."""
    size = k_up_NCP.shape[2]
    q = q_TNX.double()
    latent_TNC = torch.einsum("tnp,ncp->tnc", q[..., :size], k_up_NCP.double())
    return torch.cat((latent_TNC, rope_ref(q[..., size:], pos_T, table_LR)), dim=-1)


@triton.jit
def _normed(row_ptr, weight_ptr, eps, part_stride, NUM_PARTS: tl.constexpr, SIZE: tl.constexpr,
            SIZE_PAD: tl.constexpr, dtype: tl.constexpr):  # fmt: skip
    """The norm of a product's SIZE numbers, and their offsets."""
    offs = tl.arange(0, SIZE_PAD)
    is_in = offs < SIZE
    weight = tl.load(weight_ptr + offs, mask=is_in, other=0.0).to(tl.float32)
    x = _summed(row_ptr + offs, is_in, part_stride, NUM_PARTS, dtype)
    return (x * tl.math.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) * weight).to(dtype), offs, is_in


@triton.jit
def _keep(
    row_ptr, norm_ptr, cache_ptr, pos_ptr, slot_ptr, rope_ptr, token, eps, part_stride,
    NUM_PARTS: tl.constexpr, LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE: tl.constexpr,
    HALF_PAD: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slot_ptr + token).to(tl.int64)
    stored: tl.constexpr = cache_ptr.dtype.element_ty
    to_ptr = cache_ptr + slot * (LATENT + ROPE)
    y, offs, is_in = _normed(row_ptr, norm_ptr, eps, part_stride, NUM_PARTS, LATENT, LATENT_PAD,
                             dtype)  # fmt: skip
    tl.store(to_ptr + offs, y.to(stored), mask=is_in & (slot >= 0))
    HALF: tl.constexpr = ROPE // 2
    offs_r = tl.arange(0, HALF_PAD)
    is_r = offs_r < HALF
    lo = _summed(row_ptr + LATENT + offs_r, is_r, part_stride, NUM_PARTS, dtype)
    hi = _summed(row_ptr + LATENT + HALF + offs_r, is_r, part_stride, NUM_PARTS, dtype)
    at = rope_ptr + tl.load(pos_ptr + token) * ROPE + offs_r
    cos = tl.load(at, mask=is_r, other=0.0)
    sin = tl.load(at + HALF, mask=is_r, other=0.0)
    left, right = lo * cos - hi * sin, hi * cos + lo * sin
    is_r = is_r & (slot >= 0)
    tl.store(to_ptr + LATENT + offs_r, left.to(dtype).to(stored), mask=is_r)
    tl.store(to_ptr + LATENT + HALF + offs_r, right.to(dtype).to(stored), mask=is_r)


@triton.jit
def _narrow_kernel(
    x_ptr, q_norm_ptr, kv_norm_ptr, q_ptr, cache_ptr, pos_ptr, slot_ptr, rope_ptr, q_eps, kv_eps,
    part_stride, x_stride, NUM_PARTS: tl.constexpr, RANK: tl.constexpr, RANK_PAD: tl.constexpr,
    LATENT: tl.constexpr, LATENT_PAD: tl.constexpr, ROPE: tl.constexpr, HALF_PAD: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Program (token, 0 for what is kept or 1 for the queries' latent). A row of x has the latter
    first."""
    token = tl.program_id(0).to(tl.int64)
    take_turns()
    row_ptr = x_ptr + token * x_stride
    if tl.program_id(1) == 0:
        _keep(row_ptr + RANK, kv_norm_ptr, cache_ptr, pos_ptr, slot_ptr, rope_ptr, token, kv_eps,
              part_stride, NUM_PARTS, LATENT, LATENT_PAD, ROPE, HALF_PAD, dtype)  # fmt: skip
    else:
        y, offs, is_in = _normed(row_ptr, q_norm_ptr, q_eps, part_stride, NUM_PARTS, RANK, RANK_PAD,
                                 dtype)  # fmt: skip
        tl.store(q_ptr + token * RANK + offs, y, mask=is_in)


@triton.jit(do_not_specialize=["num_rows"])
def _heads_kernel(
    x_ptr, w_ptr, y_ptr, pos_ptr, rope_ptr, num_rows, x_stride, x_head, y_stride, y_head,
    OUT: tl.constexpr, IN: tl.constexpr, ROPE: tl.constexpr, HALF_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, tile of outputs, head). With ROPE, one more tile of outputs has the
    inputs after the first IN, turned."""
    pid_m, pid_n, head = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    is_row = offs_m < num_rows
    row_ptrs = x_ptr + offs_m * x_stride + head * x_head
    to_ptrs = y_ptr + offs_m * y_stride + head * y_head
    take_turns()
    if ROPE > 0 and pid_n == tl.cdiv(OUT, BLOCK_N):
        HALF: tl.constexpr = ROPE // 2
        offs_r = tl.arange(0, HALF_PAD)[None, :]
        is_r = is_row[:, None] & (offs_r < HALF)
        lo = tl.load(row_ptrs[:, None] + IN + offs_r, mask=is_r, other=0.0).to(tl.float32)
        hi = tl.load(row_ptrs[:, None] + IN + HALF + offs_r, mask=is_r, other=0.0).to(tl.float32)
        pos = tl.load(pos_ptr + offs_m, mask=is_row, other=0).to(tl.int64)
        cos = tl.load(rope_ptr + pos[:, None] * ROPE + offs_r, mask=is_r, other=0.0)
        sin = tl.load(rope_ptr + pos[:, None] * ROPE + HALF + offs_r, mask=is_r, other=0.0)
        lo, hi = lo * cos - hi * sin, hi * cos + lo * sin
        tl.store(to_ptrs[:, None] + OUT + offs_r, lo.to(y_ptr.dtype.element_ty), mask=is_r)
        tl.store(to_ptrs[:, None] + OUT + HALF + offs_r, hi.to(y_ptr.dtype.element_ty), mask=is_r)
    else:
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        is_col = offs_n < OUT
        w_ptrs = w_ptr + (head * OUT + offs_n)[None, :] * IN + offs_k[:, None]
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, IN, BLOCK_K):
            is_k = offs_k < IN - k
            x = tl.load(row_ptrs[:, None] + k + offs_k[None, :],
                        mask=is_row[:, None] & is_k[None, :], other=0.0)  # fmt: skip
            w = tl.load(w_ptrs + k, mask=is_k[:, None] & is_col[None, :], other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        is_in = is_row[:, None] & is_col[None, :]
        tl.store(to_ptrs[:, None] + offs_n[None, :], acc.to(y_ptr.dtype.element_ty), mask=is_in)


def narrow(
    x_STY: Tensor, q_norm: tuple[Tensor, float] | None, kv_norm: tuple[Tensor, float],
    q_TQ: Tensor | None, cache_CH: Tensor, pos_T: Tensor, slot_T: Tensor, table_LR: Tensor,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """From slices of [queries' latent, latent, part to be turned]: the first normed to q_TQ, the
    others as `keep_latent_ref` has them. Norms are a weight and its eps."""
    (num_parts, num_tokens, width), rope = x_STY.shape, table_LR.shape[1]
    latent = len(kv_norm[0])
    rank = width - latent - rope
    assert (rank > 0) == (q_norm is not None)
    q_weight, q_eps = q_norm or (kv_norm[0], 0.0)
    size = max(next_power_of_2(max(rank, 1)), next_power_of_2(latent))
    _narrow_kernel[(num_tokens, 1 if q_norm is None else 2)](
        x_STY, q_weight, kv_norm[0], x_STY if q_TQ is None else q_TQ, cache_CH, pos_T, slot_T,
        table_LR, q_eps, kv_norm[1], x_STY.stride(0), x_STY.stride(1), NUM_PARTS=num_parts,
        RANK=rank, RANK_PAD=next_power_of_2(max(rank, 1)), LATENT=latent,
        LATENT_PAD=next_power_of_2(latent), ROPE=rope, HALF_PAD=next_power_of_2(rope // 2),
        dtype=_TRITON_TYPES[dtype], **options(max(1, min(8, size // 512))),
    )  # fmt: skip


def heads_product(
    x_TNX: Tensor, w_NOI: Tensor, y_TNY: Tensor, pos_T: Tensor | None = None,
    table_LR: Tensor | None = None,
) -> None:  # fmt: skip
    """Each head's first I numbers times its matrix. With a table, what follows them is turned and
    stands after the outputs, as `absorb_ref` has it."""
    num_rows, num_heads, _ = x_TNX.shape
    _, num_out, num_in = w_NOI.shape
    assert x_TNX.stride(2) == y_TNY.stride(2) == 1
    assert w_NOI.is_contiguous()
    rope = 0 if table_LR is None else table_LR.shape[1]
    block_m = 16 if num_rows <= 16 else 64
    block_n, block_k = min(64, max(16, next_power_of_2(num_out))), 64
    grid = (cdiv(num_rows, block_m), cdiv(num_out, block_n) + (rope > 0), num_heads)
    _heads_kernel[grid](
        x_TNX, w_NOI, y_TNY, x_TNX if pos_T is None else pos_T,
        x_TNX if table_LR is None else table_LR, num_rows, x_TNX.stride(0), x_TNX.stride(1),
        y_TNY.stride(0), y_TNY.stride(1), OUT=num_out, IN=num_in, ROPE=rope,
        HALF_PAD=next_power_of_2(max(rope // 2, 1)), BLOCK_M=block_m, BLOCK_N=block_n,
        BLOCK_K=block_k, **options(4, 3),
    )  # fmt: skip


_TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
