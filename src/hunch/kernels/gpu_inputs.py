"""Further inputs of a layer's stream on a GPU: what a table holds of each token for each layer,
made once per pass; and the answers of experts beside an MLP.

One program has all numbers of one token for one layer, so that they are added in one order.

Shape letters: T packed tokens, P the same padded, L layers, H numbers per layer, V vocabulary,
X = L * H, D width, R and S slices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.activation import gated_ref
from hunch.kernels.gpu_activation import gated
from hunch.kernels.gpu_fused import norm_ref
from hunch.kernels.gpu_launch import next_power_of_2, options, slice_at, take_turns


def make_inputs_ref(
    seen_TX: Tensor, table_VX: Tensor, ids_T: Tensor, weight_H: Tensor, eps: float, *,
    table_scale: float, project_scale: float, scale: float,
) -> Tensor:  # fmt: skip
    """(norm(seen) + row of the table) * scale, in float64, TX; see `make_inputs`."""
    size = len(weight_H)
    seen = seen_TX.double().unflatten(1, (-1, size)) * project_scale
    normed = seen * (seen.square().mean(-1, keepdim=True) + eps).rsqrt() * weight_H.double()
    entry = table_VX[ids_T].double().unflatten(1, (-1, size)) * table_scale
    return ((normed + entry) * scale).flatten(1)


def take_inputs_ref(asked_TH: Tensor, input_TH: Tensor, act: str) -> Tensor:
    """act(asked) * input, in float64; see `take_inputs`."""
    return gated_ref(torch.cat((asked_TH.double(), input_TH.double()), dim=-1), act)


def add_branches_ref(
    mlp_RTD: Tensor, answer_STD: Tensor, norms: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """norm(sum of one's slices) + norm(sum of the other's), in float64; see `add_branches`."""
    sums = (some.double().sum(0) for some in (mlp_RTD, answer_STD))
    return sum(norm_ref(x, weight, eps) for x, weight in zip(sums, norms, strict=True))


@triton.jit
def _make_kernel(
    seen_ptr, table_ptr, ids_ptr, weight_ptr, eps, table_scale, project_scale, scale, X,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, SIZE_PAD)
    is_in = offs < SIZE
    weight = tl.load(weight_ptr + offs, mask=is_in, other=0.0).to(tl.float32)
    take_turns()
    at = layer * SIZE + offs
    token = tl.load(ids_ptr + row).to(tl.int64)
    entry = tl.load(table_ptr + token * X + at, mask=is_in, other=0.0).to(tl.float32)
    seen = tl.load(seen_ptr + row * X + at, mask=is_in, other=0.0).to(tl.float32) * project_scale
    y = seen * tl.math.rsqrt(tl.sum(seen * seen, axis=0) / SIZE + eps) * weight
    y = (y + entry * table_scale) * scale
    tl.store(seen_ptr + row * X + at, y.to(seen_ptr.dtype.element_ty), mask=is_in)


def make_inputs(
    seen_PX: Tensor, table_VX: Tensor, ids_T: Tensor, weight_H: Tensor, eps: float, *,
    table_scale: float, project_scale: float, scale: float,
) -> None:  # fmt: skip
    """(norm(seen * project_scale) + row of the table * table_scale) * scale, for each layer, in
    place of `seen`, the projected embedding."""
    size, num_all = len(weight_H), seen_PX.shape[1]
    _make_kernel[(len(ids_T), num_all // size)](
        seen_PX, table_VX, ids_T, weight_H, eps, table_scale, project_scale, scale, num_all,
        SIZE=size, SIZE_PAD=next_power_of_2(size), **options(1),
    )  # fmt: skip


def take_inputs(asked_PH: Tensor, input_TH: Tensor, act: str) -> None:
    """act(asked) * input, in place of asked; input need not be contiguous."""
    assert input_TH.stride(1) == 1
    block = next_power_of_2(asked_PH.shape[1])
    gated(asked_PH, input_TH, asked_PH, len(input_TH), act, block, num_warps=1)


@triton.jit
def _normed_sum(ptrs, stride, weight_ptr, offs, is_in, D, eps, NUM: tl.constexpr):
    """Slices added in order, then normed."""
    x = tl.load(ptrs, mask=is_in, other=0.0)
    for s in tl.static_range(1, NUM):
        x += tl.load(ptrs + slice_at(s, stride), mask=is_in, other=0.0)
    weight = tl.load(weight_ptr + offs, mask=is_in, other=0.0).to(tl.float32)
    return x * tl.math.rsqrt(tl.sum(x * x, axis=0) / D + eps) * weight


@triton.jit
def _branches_kernel(
    mlp_ptr, answer_ptr, mlp_norm_ptr, answer_norm_ptr, out_ptr, mlp_stride, answer_stride, D, eps,
    NUM_MLP: tl.constexpr, NUM_ANSWERS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK_D)
    is_in = offs < D
    take_turns()
    at = row * D + offs
    y = _normed_sum(mlp_ptr + at, mlp_stride, mlp_norm_ptr, offs, is_in, D, eps, NUM_MLP)
    y += _normed_sum(answer_ptr + at, answer_stride, answer_norm_ptr, offs, is_in, D, eps,
                     NUM_ANSWERS)  # fmt: skip
    tl.store(out_ptr + at, y, mask=is_in)


def add_branches(
    mlp_RTD: Tensor, answer_STD: Tensor, norms: tuple[Tensor, Tensor], eps: float
) -> Tensor:
    """An MLP's and the experts' results, each normed, added: one slice, [1, T, D] in float32."""
    _, num_rows, width = answer_STD.shape
    out_1TD = torch.empty(1, num_rows, width, dtype=torch.float32, device=answer_STD.device)
    block = next_power_of_2(width)
    _branches_kernel[(num_rows,)](
        mlp_RTD, answer_STD, *norms, out_1TD, mlp_RTD.stride(0), answer_STD.stride(0), width, eps,
        NUM_MLP=len(mlp_RTD), NUM_ANSWERS=len(answer_STD), BLOCK_D=block,
        **options(max(1, min(8, block // 512))),
    )  # fmt: skip
    return out_1TD
