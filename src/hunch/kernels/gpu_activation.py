"""Activations on a GPU: at the end of a product, or over its result.

Shape letters: P rows padded to what a library wants, F inner width of an MLP.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.activation import CLIP_LIMIT, CLIP_SLOPE
from hunch.kernels.gpu_launch import cdiv, let_next_start, options, wait_for_inputs

assert (CLIP_LIMIT, CLIP_SLOPE) == (7.0, 1.702), "the kernels have these numbers in them"


@triton.jit
def activate(a, ACT: tl.constexpr):
    """act(a) in float32; ACT is one of `activation.KERNEL_NAMES`."""
    # One return at the end: code after a return in a branch is compiled too.
    tl.static_assert(
        ACT == "silu" or ACT == "relu" or ACT == "relu2" or ACT == "gelu" or ACT == "gelu_tanh"
    )
    if ACT == "silu":
        y = a / (1.0 + tl.exp(-a))
    elif ACT == "relu":
        y = tl.maximum(a, 0.0)
    elif ACT == "relu2":
        y = tl.maximum(a, 0.0) * tl.maximum(a, 0.0)
    elif ACT == "gelu":
        y = 0.5 * a * (1.0 + tl.math.erf(a * 0.7071067811865476))
    else:  # a * (1 + tanh(u)) / 2 is a / (1 + e^-2u)
        y = a / (1.0 + tl.exp(-1.5957691216057308 * a * (1.0 + 0.044715 * a * a)))
    return y


@triton.jit
def gate(a, b, ACT: tl.constexpr):
    """act(a) * b; "clipped" is a function of both together."""
    if ACT == "clipped":
        a, b = tl.minimum(a, 7.0), tl.minimum(tl.maximum(b, -7.0), 7.0)
        y = (b + 1.0) * (a / (1.0 + tl.exp(-1.702 * a)))
    else:
        y = activate(a, ACT) * b
    return y


@triton.jit
def _activated_kernel(
    x_ptr, y_ptr, F, ACT: tl.constexpr, IS_GATED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < F
    wait_for_inputs()
    let_next_start()
    if IS_GATED:
        a = tl.load(x_ptr + row * 2 * F + offs, mask=is_in, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + row * 2 * F + F + offs, mask=is_in, other=0.0).to(tl.float32)
        y = gate(a, b, ACT)
    else:
        y = activate(tl.load(x_ptr + row * F + offs, mask=is_in, other=0.0).to(tl.float32), ACT)
    tl.store(y_ptr + row * F + offs, y.to(y_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def _gated_by_kernel(x_ptr, gate_ptr, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < F
    wait_for_inputs()
    let_next_start()
    x = tl.load(x_ptr + row * F + offs, mask=is_in, other=0.0).to(tl.float32)
    a = tl.load(gate_ptr + row * F + offs, mask=is_in, other=0.0).to(tl.float32)
    y = x / (1.0 + tl.exp(-a))
    tl.store(x_ptr + row * F + offs, y.to(x_ptr.dtype.element_ty), mask=is_in)


def gated_by(x_PF: Tensor, gate_PF: Tensor, num_rows: int) -> None:
    """The first rows of x times the sigmoid of their gates, in place."""
    width = x_PF.shape[1]
    grid = (num_rows, cdiv(width, 1024))
    _gated_by_kernel[grid](x_PF, gate_PF, width, BLOCK=1024, **options(4))


def activated(
    x: Tensor, y_PF: Tensor, num_rows: int, activation: str = "silu", *, is_gated: bool = True
) -> None:
    """act(gate) * up of the first rows, as the ending of `gemm_gated` computes it; without a gate,
    act(x). x holds gate and up side by side; it may be y where there is no gate."""
    width = y_PF.shape[1]
    _activated_kernel[(num_rows, cdiv(width, 1024))](
        x, y_PF, width, ACT=activation, IS_GATED=is_gated, BLOCK=1024, **options(4)
    )
