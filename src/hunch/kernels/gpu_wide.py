"""Products of many rows by the vendor's library, where it was found to give our kernels' bits.

A library may choose another order of additions for each size. So sizes are few (powers of two from
256; a batch is cut into them, and its last part padded), and when a model is loaded, every size of
every weight is compared with `gpu_gemm`. A weight for which any size differs does not use it.

Shape letters: P rows padded to a multiple of 256, N outputs, K inputs, S slices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.kernels.gpu_gemm import gemm, gemm_parts
from hunch.kernels.gpu_quant import expand
from hunch.kernels.quant import Quantised, Weight, slices_of
from hunch.kernels.slices import slice_of

SMALLEST, LARGEST = 256, 8192
MIN_ROWS = 129  # with fewer, our own kernels are as fast


def padded(num_rows: int) -> int:
    return -(-num_rows // SMALLEST) * SMALLEST


def cuts(num_rows: int) -> list[tuple[int, int]]:
    """[first, last) of the parts, largest first; num_rows is a multiple of the smallest."""
    parts: list[tuple[int, int]] = []
    first, size = 0, LARGEST
    while first < num_rows:
        while size > num_rows - first:
            size //= 2
        parts.append((first, first + size))
        first += size
    return parts


def _numbers(x_PK: Tensor, w: Weight) -> tuple[Tensor, Tensor]:
    """Inputs and weights for the library, which takes numbers of 16 bits alone."""
    if not isinstance(w, Quantised):
        return x_PK, w
    return x_PK if w.order_K is None else x_PK.index_select(1, w.order_K), expand(w)


def product(x_PK: Tensor, w_NK: Weight, y_PN: Tensor, bias_N: Tensor | None = None) -> None:
    """y = x W^T + bias, rounded once."""
    x_PK, w_NK = _numbers(x_PK, w_NK)
    for first, last in cuts(len(x_PK)):
        x, y = x_PK[first:last], y_PN[first:last]
        if bias_N is None:
            torch.mm(x, w_NK.T, out=y)
        else:
            torch.addmm(bias_N, x, w_NK.T, out=y)


def product_parts(
    x_PK: Tensor, w_NK: Weight, parts_SPN: Tensor, bias_N: Tensor | None = None
) -> None:
    """The slices' sums in float32, as `gemm_parts` leaves them: with the bias in the first."""
    x_PK, w_NK = _numbers(x_PK, w_NK)
    k = x_PK.shape[1]
    size = slice_of(k, len(parts_SPN))
    for index, part_PN in enumerate(parts_SPN):
        here = slice(index * size, min((index + 1) * size, k))
        for first, last in cuts(len(x_PK)):
            torch.mm(
                x_PK[first:last, here], w_NK[:, here].T, torch.float32, out=part_PN[first:last]
            )
    if bias_N is not None:
        parts_SPN[0] += bias_N.float()


def is_exact(w_NK: Weight, bias_N: Tensor | None = None, *, is_split: bool) -> bool:
    """Whether every size gives the bits of our own kernels for this weight."""
    (n, k), device = w_NK.shape, w_NK.device
    split = slices_of(w_NK) if is_split else 1
    noise = torch.Generator(device).manual_seed(0)
    size = SMALLEST
    while size <= LARGEST:
        x_PK = torch.randn(size, k, generator=noise, device=device).to(w_NK.dtype)
        dtype = torch.float32 if is_split else w_NK.dtype
        ours, theirs = (torch.empty(split, size, n, dtype=dtype, device=device) for _ in range(2))
        if is_split:
            gemm_parts(x_PK, w_NK, ours, bias_N)
            product_parts(x_PK, w_NK, theirs, bias_N)
        else:
            gemm(x_PK, w_NK, ours[0], bias_N)
            product(x_PK, w_NK, theirs[0], bias_N)
        if not torch.equal(ours, theirs):
            return False
        size *= 2
    return True
