"""Matrix products with a weight: y = x W^T + b.

Shape letters: T packed tokens, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.native_tensors import can_multiply, multiply_rows


def linear_ref(x_TK: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """The specification, in float64."""
    y_TN = x_TK.double() @ w_NK.double().t()
    if b_N is not None:
        y_TN = y_TN + b_N.double()
    return y_TN.to(x_TK.dtype)


def linear(x_TK: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """On a CPU a row's bits are the same whatever rows are beside it; elsewhere torch's product.

    torch adds in another order for every number of rows. That changes the text of a model in 16
    bits, and now and then of one in 32. What is trained goes through torch, as gradients do.
    """
    tensors = (x_TK, w_NK) if b_N is None else (x_TK, w_NK, b_N)
    is_trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if x_TK.device.type != "cpu" or is_trained:
        return functional.linear(x_TK, w_NK, b_N)
    rows_TK = x_TK if x_TK.dim() == 2 else x_TK.flatten(0, -2)
    if can_multiply(w_NK):
        y_TN = multiply_rows(rows_TK, w_NK)
        if b_N is not None:
            y_TN += b_N
        y_TN = y_TN.to(x_TK.dtype)
    else:
        y_TN = linear_in_tiles(rows_TK, w_NK, b_N, num_rows=1)
    return y_TN if x_TK.dim() == 2 else y_TN.view(*x_TK.shape[:-1], -1)


def linear_in_tiles(x_TK: Tensor, w_NK: Tensor, b_N: Tensor | None, num_rows: int) -> Tensor:
    """torch's product of `num_rows` rows at a time, the last ones filled up with zeros.

    A product of one shape is always computed in one way. On a CPU a tile is one row; on a GPU,
    where one row would waste the machine, all rows of a tile take the same steps.
    """
    num_all, size = x_TK.shape
    tiles = []
    for first in range(0, num_all, num_rows):
        # A copy: where a row begins in memory can decide how it is summed.
        tile_RK = x_TK.new_zeros(num_rows, size)
        part = x_TK[first : first + num_rows]
        tile_RK[: len(part)] = part
        tiles.append(functional.linear(tile_RK, w_NK, b_N))
    if not tiles:
        return functional.linear(x_TK, w_NK, b_N)
    return torch.cat(tiles)[:num_all]
