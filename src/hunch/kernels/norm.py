"""Normalisation over the last dimension: by root mean square, or by mean and variance.

Shape letters: T packed tokens, D width (any leading shape works).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm_ref(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    """The specification, in float64."""
    x = x_TD.double()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * scale * w_D.double()).to(x_TD.dtype)


def rms_norm(x_TD: Tensor, w_D: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(x_TD, w_D.shape, w_D, eps)


def row_moments_ref(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """The specification, in float64."""
    x = x_TD.double()
    mean_T1 = x.mean(-1, keepdim=True)
    deviation_T1 = (x - mean_T1).square().mean(-1, keepdim=True).sqrt()
    return mean_T1.float(), deviation_T1.float()


def row_moments(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each row and its standard deviation, in float32.

    They are those of a layer norm: torch's own mean adds in another order for other numbers of
    rows, on a GPU.
    """
    x_TD = x_TD.float().contiguous()
    _, mean_T1, inverse_T1 = torch.native_layer_norm(x_TD, x_TD.shape[-1:], None, None, 0.0)
    return mean_T1, inverse_T1.reciprocal()


def layer_norm_ref(x_TD: Tensor, w_D: Tensor, b_D: Tensor | None, eps: float) -> Tensor:
    """The specification, in float64."""
    x = x_TD.double()
    centred = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = centred * scale * w_D.double()
    return (y if b_D is None else y + b_D.double()).to(x_TD.dtype)


def layer_norm(x_TD: Tensor, w_D: Tensor, b_D: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x_TD, w_D.shape, w_D, b_D, eps)
