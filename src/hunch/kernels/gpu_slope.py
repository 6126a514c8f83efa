"""The softmax of logits, weighted by row, as training's gradient starts from it: one kernel.

Plain torch goes over the logits eight times, and they are the largest thing in training.
Shape letters: M rows, C columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _slope_kernel(
    z_ptr, weight_ptr, out_ptr, log_sum_ptr, best_ptr, num_columns, stride, BLOCK: tl.constexpr
):
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
    log_sum = highest + tl.log(total)
    weight = tl.load(weight_ptr + row)
    for first in range(0, num_columns, BLOCK):
        is_in = first + at < num_columns
        z = tl.load(z_ptr + row * stride + first + at, mask=is_in, other=-float("inf"))
        slope = tl.exp(z.to(tl.float32) - log_sum) * weight
        tl.store(out_ptr + row * stride + first + at, slope, mask=is_in)
    tl.store(log_sum_ptr + row, log_sum)
    tl.store(best_ptr + row, best.to(tl.int64))


def softmax_slope(z_MC: Tensor, weight_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(z) * weight in z's precision, the logarithms of the sums, and the best columns."""
    z_MC = z_MC.contiguous()
    num_rows, num_columns = z_MC.shape
    out_MC = torch.empty_like(z_MC)
    log_sum_M = torch.empty(num_rows, dtype=torch.float32, device=z_MC.device)
    best_M = torch.empty(num_rows, dtype=torch.int64, device=z_MC.device)
    if num_rows:
        _slope_kernel[(num_rows,)](
            z_MC, weight_M.float(), out_MC, log_sum_M, best_M, num_columns, z_MC.stride(0),
            BLOCK=min(_BLOCK, triton.next_power_of_2(num_columns)),
        )  # fmt: skip
    return out_MC, log_sum_M, best_M
