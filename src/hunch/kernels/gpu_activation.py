"""Activations on a GPU: at the end of a product, or over its result.

Shape letters: P rows padded to what a library wants, F inner width of an MLP.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_launch import cdiv, options, take_turns


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
    """act(a) * b; "clipped" is a function of both together, "sigmoid" has one rounding less."""
    if ACT == "clipped":  # by activation.CLIP_LIMIT and CLIP_SLOPE
        a, b = tl.minimum(a, 7.0), tl.minimum(tl.maximum(b, -7.0), 7.0)
        y = (b + 1.0) * (a / (1.0 + tl.exp(-1.702 * a)))
    elif ACT == "sigmoid":
        y = b / (1.0 + tl.exp(-a))
    else:
        y = activate(a, ACT) * b
    return y


@triton.jit
def _activated_kernel(
    a_ptr, b_ptr, y_ptr, F, a_stride, b_stride, y_stride, ACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < F
    take_turns()
    a = tl.load(a_ptr + row * a_stride + offs, mask=is_in, other=0.0).to(tl.float32)
    if b_ptr is not None:
        b = tl.load(b_ptr + row * b_stride + offs, mask=is_in, other=0.0).to(tl.float32)
        y = gate(a, b, ACT)
    else:
        y = activate(a, ACT)
    tl.store(y_ptr + row * y_stride + offs, y.to(y_ptr.dtype.element_ty), mask=is_in)


def gated(
    a_PF: Tensor, b_PF: Tensor | None, y_PF: Tensor, num_rows: int, activation: str,
    block: int = 1024, num_warps: int = 4,
) -> None:  # fmt: skip
    """act(a) * b of the first rows, or act(a); y may be either of them. Rows may be parts of longer
    ones."""
    width = y_PF.shape[1]
    _activated_kernel[(num_rows, cdiv(width, block))](
        a_PF, b_PF, y_PF, width, a_PF.stride(0), 0 if b_PF is None else b_PF.stride(0),
        y_PF.stride(0), ACT=activation, BLOCK=block, **options(num_warps),
    )  # fmt: skip


def gated_by(x_PF: Tensor, gate_PF: Tensor, num_rows: int) -> None:
    """The first rows of x times the sigmoid of their gates, in place."""
    gated(gate_PF, x_PF, x_PF, num_rows, "sigmoid")


def activated(
    x: Tensor, y_PF: Tensor, num_rows: int, activation: str = "silu", *, is_gated: bool = True
) -> None:
    """act(gate) * up of the first rows, as the ending of `gemm_gated` computes it; without a gate,
    act(x). x holds gate and up side by side; it may be y where there is no gate."""
    gated(x, x[:, y_PF.shape[1] :] if is_gated else None, y_PF, num_rows, activation)
