"""The gate of an MLP and the rotation of heads for training, forward and backward in one kernel
each. Plain torch reads and writes the same numbers two to four times as often, which takes a tenth
of a training step.

Shape letters: T tokens, F inner width of the MLP, N heads, H head width.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_activation import activated

_BLOCK = 1024
_HEADS = 16  # of a token that are turned at a time


@triton.jit
def _gate_back_kernel(z_ptr, dy_ptr, dz_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    at = row * 2 * width + column
    gate = tl.load(z_ptr + at, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(z_ptr + at + width, mask=is_in, other=0.0).to(tl.float32)
    dy = tl.load(dy_ptr + row * width + column, mask=is_in, other=0.0).to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-gate))
    tl.store(dz_ptr + at, dy * up * share * (1.0 + gate * (1.0 - share)), mask=is_in)
    tl.store(dz_ptr + at + width, dy * gate * share, mask=is_in)


@triton.jit
def _turn_kernel(
    x_ptr, y_ptr, cos_ptr, sin_ptr, row_stride, num_heads, sign,
    HALF: tl.constexpr, HALF_UP: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """HEADS of a token's heads, whose angles are one: (l, r) becomes (l cos - r sin, r cos + l
    sin); sign -1 turns them back."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    at = tl.arange(0, HALF_UP)[None, :]
    is_half = at < HALF
    is_in = (head < num_heads) & is_half
    x_at = x_ptr + token * row_stride + head * 2 * HALF + at
    y_at = y_ptr + (token * num_heads + head) * 2 * HALF + at
    cos = tl.load(cos_ptr + token * 2 * HALF + at, mask=is_half, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * 2 * HALF + HALF + at, mask=is_half, other=0.0).to(tl.float32)
    sin = sin * sign
    left = tl.load(x_at, mask=is_in, other=0.0).to(tl.float32)
    right = tl.load(x_at + HALF, mask=is_in, other=0.0).to(tl.float32)
    tl.store(y_at, left * cos - right * sin, mask=is_in)
    tl.store(y_at + HALF, right * cos + left * sin, mask=is_in)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_T2F: Tensor) -> Tensor:
        z_T2F = z_T2F.contiguous()
        ctx.save_for_backward(z_T2F)
        y_TF = z_T2F.new_empty(z_T2F.shape[0], z_T2F.shape[1] // 2)
        if len(y_TF):
            activated(z_T2F, y_TF, len(y_TF))
        return y_TF

    @staticmethod
    def backward(ctx: Any, dy_TF: Tensor) -> Tensor:
        (z_T2F,) = ctx.saved_tensors
        dy_TF, dz_T2F = dy_TF.contiguous(), torch.empty_like(z_T2F)
        num_rows, width = dy_TF.shape
        if num_rows:
            grid = (num_rows, triton.cdiv(width, _BLOCK))
            _gate_back_kernel[grid](z_T2F, dy_TF, dz_T2F, width, BLOCK=_BLOCK)
        return dz_T2F


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1H, sin_T1H)
        return _turned(x_TNH, cos_T1H, sin_T1H, 1.0)

    @staticmethod
    def backward(ctx: Any, dy_TNH: Tensor) -> tuple[Tensor, None, None]:
        return _turned(dy_TNH, *ctx.saved_tensors, -1.0), None, None


def _turned(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor, sign: float) -> Tensor:
    num_tokens, num_heads, width = x_TNH.shape
    if x_TNH.stride(1) != width or x_TNH.stride(2) != 1:  # heads of a token lie side by side
        x_TNH = x_TNH.contiguous()
    y_TNH = x_TNH.new_empty(num_tokens, num_heads, width)
    shape = (num_tokens, 1, width)
    cos_T1H, sin_T1H = (x.expand(shape).contiguous() for x in (cos_T1H, sin_T1H))
    if num_tokens:
        heads = min(triton.next_power_of_2(num_heads), _HEADS)
        _turn_kernel[(num_tokens, triton.cdiv(num_heads, heads))](
            x_TNH, y_TNH, cos_T1H, sin_T1H, x_TNH.stride(0), num_heads, sign,
            HALF=width // 2, HALF_UP=triton.next_power_of_2(width // 2), HEADS=heads,
        )  # fmt: skip
    return y_TNH


def gate(z_T2F: Tensor) -> Tensor:
    """silu of the first half, times the second."""
    found: Tensor = _Gate.apply(z_T2F)  # type: ignore[no-untyped-call]
    return found


def turn(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """Rotate heads as `rope` does; the angles have no gradient."""
    found: Tensor = _Turn.apply(x_TNH, cos_T1H, sin_T1H)  # type: ignore[no-untyped-call]
    return found
