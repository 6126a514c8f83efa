"""Mamba 2: how such a layer folds a token into a row's state.

Every head forgets at a rate of its own, and takes up a value times a key. All heads of a group read
and write by one key.

Shape letters: C channels of the convolution, I = C + N inputs of a token, K groups, N heads,
H width of a key, D width of a value, J taps of the convolution.
Paper: arXiv 2405.21060.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.activation import sigmoid
from hunch.kernels.recurrence import Recurrence, convolved


@dataclass(frozen=True, kw_only=True, slots=True)
class SsmShape(Recurrence):
    """The sizes of a Mamba 2 layer."""

    num_groups: int
    num_heads: int
    k_dim: int
    v_dim: int
    num_taps: int  # tokens that the convolution sees, its own included
    has_conv_bias: bool = True
    has_norm: bool = True  # of what is read, a group at a time
    is_norm_first: bool = False  # before the gate

    @property
    def key_width(self) -> int:
        return self.num_groups * self.k_dim

    @property
    def state(self) -> tuple[int, int, int]:
        return self.num_heads, self.k_dim, self.v_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: values, keys that write, keys that read."""
        return self.value_width + 2 * self.key_width

    @property
    def num_inputs(self) -> int:
        """Inputs per token: the channels, then what the size of its step comes from, per head."""
        return self.num_channels + self.num_heads

    def fold(
        self, weights: SsmWeights, window_JI: Tensor, state_NHD: Tensor
    ) -> tuple[Tensor, Tensor]:
        size_N = functional.softplus(window_JI[-1, self.num_channels :] + weights.bias_N)
        mixed_C = convolved(window_JI[:, : self.num_channels], weights.conv_JC)
        mixed_C = mixed_C + weights.conv_bias_C
        mixed_C = mixed_C * sigmoid(mixed_C)
        v, written, read = mixed_C.split_with_sizes(
            (self.value_width, self.key_width, self.key_width)
        )
        each = self.num_heads // self.num_groups
        v_ND = v.view(-1, self.v_dim)
        written_NH, read_NH = (
            key.view(-1, 1, self.k_dim).expand(-1, each, -1).reshape(-1, self.k_dim)
            for key in (written, read)
        )
        state_NHD = state_NHD * torch.exp(weights.rate_N * size_N)[:, None, None]
        state_NHD = state_NHD + written_NH[:, :, None] * (v_ND * size_N[:, None])[:, None]
        read_ND = (state_NHD * read_NH[:, :, None]).sum(1)
        return state_NHD, read_ND + weights.skip_N[:, None] * v_ND


@dataclass(slots=True)
class SsmWeights:
    """What a layer folds tokens in with; float32."""

    conv_JC: Tensor  # the tap of the token itself is the last
    conv_bias_C: Tensor
    rate_N: Tensor  # below zero: how fast a head forgets
    bias_N: Tensor  # added to what the size of a step comes from
    skip_N: Tensor  # how much of its own value a token reads
