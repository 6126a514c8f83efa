"""Matrix products with a weight: y = x W^T + b.

Shape letters: T packed tokens, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MAX_SKINNY = 64  # rows up to which the product is turned around on a CPU


def linear_ref(x_TK: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """The specification, in float64."""
    y_TN = x_TK.double() @ w_NK.double().t()
    if b_N is not None:
        y_TN = y_TN + b_N.double()
    return y_TN.to(x_TK.dtype)


def linear(x_TK: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """torch's product, in the form that is fastest for few rows.

    On a CPU one row runs at memory speed, but BLAS handles a few rows badly (several times the
    price of one) unless the weight stands on the left.
    """
    num_rows = x_TK.shape[0]
    if 1 < num_rows <= MAX_SKINNY and x_TK.device.type == "cpu":
        y_TN = torch.mm(w_NK, x_TK.t()).t().contiguous()
        return y_TN if b_N is None else y_TN.add_(b_N)
    return functional.linear(x_TK, w_NK, b_N)
