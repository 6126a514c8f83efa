"""Normalisation layers.

Shape letters: T packed tokens, D width, N heads, H head width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from hunch.kernels.norm import layer_norm, rms_norm
from hunch.layers.part import Part


class RMSNorm(Part):
    """Divide by the root mean square, times a weight, which may be of more bits than x."""

    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self.weight_D = weight_D
        self.eps = eps

    def __call__(self, x_TD: Tensor) -> Tensor:
        if self.weight_D.dtype != x_TD.dtype:
            return rms_norm(x_TD.float(), self.weight_D, self.eps).to(x_TD.dtype)
        return rms_norm(x_TD, self.weight_D, self.eps)


class LayerNorm(Part):
    """Subtract the mean, divide by the deviation, times a weight, plus a bias if there is one."""

    def __init__(self, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> None:
        self.weight_D = weight_D
        self.bias_D = bias_D
        self.eps = eps

    def __call__(self, x_TD: Tensor) -> Tensor:
        return layer_norm(x_TD, self.weight_D, self.bias_D, self.eps)


class HeadNorm(Part):
    """A layer norm of each head, whose weights are its own or those of all (N = 1)."""

    def __init__(self, weight_NH: Tensor, bias_NH: Tensor | None, eps: float) -> None:
        self.weight_NH, self.bias_NH, self.eps = weight_NH, bias_NH, eps

    def __call__(self, x_TNH: Tensor) -> Tensor:
        y_TNH = functional.layer_norm(x_TNH.float(), x_TNH.shape[-1:], eps=self.eps)
        y_TNH = y_TNH * self.weight_NH.float()
        if self.bias_NH is not None:
            y_TNH = y_TNH + self.bias_NH.float()
        return y_TNH.to(x_TNH.dtype)


Norm = RMSNorm | LayerNorm
