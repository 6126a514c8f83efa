"""Mamba 1: how such a layer folds a token into a row's state.

Every channel has a state of its own, whose numbers fade at rates of their own. The size of a step
and both keys come from the convolved channels of the token itself.

Shape letters: D channels, H width of a key, R numbers that sizes of steps come from, J taps of the
convolution, X = R + 2H.
Paper: arXiv 2312.00752.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.activation import sigmoid
from hunch.kernels.recurrence import Recurrence, convolved


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectiveShape(Recurrence):
    """The sizes of a Mamba 1 layer."""

    width: int  # channels
    k_dim: int
    rank: int  # numbers that sizes of steps come from
    num_taps: int  # tokens that the convolution sees, its own included
    has_conv_bias: bool = True
    has_bias: bool = False  # of the first product and of the last
    part_eps: float | None = None  # of norms of what the channels give; None: there are none
    has_part_weights: bool = False  # these norms have weights

    @property
    def state(self) -> tuple[int, int, int]:
        return 1, self.k_dim, self.width

    @property
    def num_inputs(self) -> int:
        return self.width

    def fold(
        self, weights: SelectiveWeights, window_JI: Tensor, state_NHD: Tensor
    ) -> tuple[Tensor, Tensor]:
        mixed_D = convolved(window_JI, weights.conv_JD) + weights.conv_bias_D
        mixed_D = mixed_D * sigmoid(mixed_D)
        sizes = (self.rank, self.k_dim, self.k_dim)
        parts = (weights.project_XD @ mixed_D).split_with_sizes(sizes)
        if self.part_eps is not None:
            by = weights.part_norm_X.split_with_sizes(sizes)
            parts = tuple(_normed(x, self.part_eps) * w for x, w in zip(parts, by, strict=True))
        from_R, written_H, read_H = parts
        size_D = functional.softplus(weights.step_DR @ from_R + weights.step_bias_D)
        state_HD = state_NHD[0] * torch.exp(weights.rate_HD * size_D)
        state_HD = state_HD + written_H[:, None] * (size_D * mixed_D)
        read_D = (state_HD * read_H[:, None]).sum(0) + weights.skip_D * mixed_D
        return state_HD[None], read_D[None]


def _normed(part: Tensor, eps: float) -> Tensor:
    return part * torch.rsqrt(part.square().mean() + eps)


@dataclass(slots=True)
class SelectiveWeights:
    """What a layer folds tokens in with; float32."""

    conv_JD: Tensor  # the tap of the token itself is the last
    conv_bias_D: Tensor
    project_XD: Tensor  # to what sizes come from, the key that writes, the key that reads
    step_DR: Tensor
    step_bias_D: Tensor
    rate_HD: Tensor  # below zero: how fast a number fades
    skip_D: Tensor  # how much of its own channels a token reads
    part_norm_X: Tensor  # of norms of what project_XD gives; ones where they have no weights
