"""What a table tells layers of tokens, on a GPU: put together once per pass, taken by each layer.

One program owns all numbers of one token for one layer, so they are added in one order.

Shape letters: T packed tokens, P the same padded, L layers, H numbers per layer, V vocabulary,
X = L * H.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.activation import gated_ref
from hunch.kernels.gpu_activation import activate
from hunch.kernels.gpu_launch import let_next_start, next_power_of_2, options, wait_for_inputs


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


@triton.jit
def _make_kernel(
    seen_ptr, table_ptr, ids_ptr, weight_ptr, eps, table_scale, project_scale, scale, X,
    SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, SIZE_PAD)
    is_in = offs < SIZE
    weight = tl.load(weight_ptr + offs, mask=is_in, other=0.0).to(tl.float32)
    wait_for_inputs()
    let_next_start()
    at = layer * SIZE + offs
    token = tl.load(ids_ptr + row).to(tl.int64)
    entry = tl.load(table_ptr + token * X + at, mask=is_in, other=0.0).to(tl.float32)
    seen = tl.load(seen_ptr + row * X + at, mask=is_in, other=0.0).to(tl.float32) * project_scale
    y = seen * tl.math.rsqrt(tl.sum(seen * seen, axis=0) / SIZE + eps) * weight
    y = (y + entry * table_scale) * scale
    tl.store(seen_ptr + row * X + at, y.to(seen_ptr.dtype.element_ty), mask=is_in)


@triton.jit
def _take_kernel(
    asked_ptr,
    input_ptr,
    input_stride,
    SIZE: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    ACT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, SIZE_PAD)
    is_in = offs < SIZE
    wait_for_inputs()
    let_next_start()
    a = tl.load(asked_ptr + row * SIZE + offs, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(input_ptr + row * input_stride + offs, mask=is_in, other=0.0).to(tl.float32)
    y = activate(a, ACT) * b
    tl.store(asked_ptr + row * SIZE + offs, y.to(asked_ptr.dtype.element_ty), mask=is_in)


def make_inputs(
    seen_PX: Tensor, table_VX: Tensor, ids_T: Tensor, weight_H: Tensor, eps: float, *,
    table_scale: float, project_scale: float, scale: float,
) -> None:  # fmt: skip
    """(norm(seen * project_scale) + row of the table * table_scale) * scale, for each layer, in
    place of what the projection of the embedding left there."""
    size, num_all = len(weight_H), seen_PX.shape[1]
    _make_kernel[(len(ids_T), num_all // size)](
        seen_PX, table_VX, ids_T, weight_H, eps, table_scale, project_scale, scale, num_all,
        SIZE=size, SIZE_PAD=next_power_of_2(size), **options(1),
    )  # fmt: skip


def take_inputs(asked_PH: Tensor, input_TH: Tensor, act: str) -> None:
    """act(asked) * input, in place of asked; rows of input may lie apart."""
    size = asked_PH.shape[1]
    assert input_TH.stride(1) == 1
    _take_kernel[(len(input_TH),)](
        asked_PH, input_TH, input_TH.stride(0), SIZE=size, SIZE_PAD=next_power_of_2(size), ACT=act,
        **options(1),
    )  # fmt: skip
