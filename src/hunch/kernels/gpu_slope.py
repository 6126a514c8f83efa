"""The softmax of logits in two kernels: sums first, then values weighted by row.

Plain torch reads or writes the logits eight times, and they are the largest tensor in training. The
work between the two kernels, on a few columns of each row, is left to torch.
Shape letters: M rows, C columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _sum_kernel(z_ptr, log_sum_ptr, best_ptr, num_columns, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    highest = -float("inf")
    total = 0.0
    best = 0
    for first in range(0, num_columns, BLOCK):
        is_in = first + at < num_columns
        z = tl.load(z_ptr + row * stride + first + at, mask=is_in, other=-float("inf"))
        z = z.to(tl.float32)
        top = tl.max(z, axis=0)
        where = tl.argmax(z, axis=0)
        best = tl.where(top > highest, first + where, best)
        new = tl.maximum(highest, top)
        total = total * tl.exp(highest - new) + tl.sum(tl.exp(z - new), axis=0)
        highest = new
    tl.store(log_sum_ptr + row, highest + tl.log(total))
    tl.store(best_ptr + row, best.to(tl.int64))


@triton.jit
def _value_kernel(
    z_ptr, log_sum_ptr, weight_ptr, out_ptr, num_columns, stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < num_columns
    z = tl.load(z_ptr + row * stride + column, mask=is_in, other=-float("inf"))
    value = tl.exp(z.to(tl.float32) - tl.load(log_sum_ptr + row)) * tl.load(weight_ptr + row)
    tl.store(out_ptr + row * stride + column, value, mask=is_in)


def log_sums(z_MC: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of each row's sum of exponentials, and its best column."""
    num_rows, num_columns = z_MC.shape
    log_sum_M = torch.empty(num_rows, dtype=torch.float32, device=z_MC.device)
    best_M = torch.empty(num_rows, dtype=torch.int64, device=z_MC.device)
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(num_columns))
        _sum_kernel[(num_rows,)](z_MC, log_sum_M, best_M, num_columns, z_MC.stride(0), BLOCK=block)
    return log_sum_M, best_M


def weighted_softmax(z_MC: Tensor, log_sum_M: Tensor, weight_M: Tensor) -> Tensor:
    """exp(z - log_sum) * weight, in z's precision and in its place."""
    num_rows, num_columns = z_MC.shape
    if num_rows:
        block = min(_BLOCK, triton.next_power_of_2(num_columns))
        grid = (num_rows, triton.cdiv(num_columns, block))
        _value_kernel[grid](
            z_MC, log_sum_M, weight_M, z_MC, num_columns, z_MC.stride(0), BLOCK=block
        )
    return z_MC
