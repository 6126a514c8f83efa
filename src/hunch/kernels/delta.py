"""The gated delta rule: how such a layer folds a token into a row's state.

Shape letters: C channels of the convolution, I = C + 2N inputs of a token, K key heads, N value
heads, H width of a key, D width of a value, J taps of the convolution.
Paper: arXiv 2412.06464.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.activation import sigmoid
from hunch.kernels.recurrence import Recurrence

NORM_EPS = 1e-6  # of the norm of queries and keys


@dataclass(frozen=True, kw_only=True, slots=True)
class DeltaShape(Recurrence):
    """The sizes of a gated delta net."""

    num_k_heads: int
    num_v_heads: int
    k_dim: int
    v_dim: int
    num_taps: int  # tokens that the convolution sees, its own included
    is_tiled: bool = False  # value head n has key head n % K; else n // (N / K)

    @property
    def key_width(self) -> int:
        return self.num_k_heads * self.k_dim

    @property
    def state(self) -> tuple[int, int, int]:
        return self.num_v_heads, self.k_dim, self.v_dim

    @property
    def num_channels(self) -> int:
        """Channels of the convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width

    @property
    def num_inputs(self) -> int:
        """Inputs per token: the channels, then what beta and decay come from, per value head."""
        return self.num_channels + 2 * self.num_v_heads

    def fold(
        self, weights: DeltaWeights, window_JI: Tensor, state_NHD: Tensor
    ) -> tuple[Tensor, Tensor]:
        return _fold(self, weights, window_JI, state_NHD)


@dataclass(slots=True)
class DeltaWeights:
    """What a layer folds tokens in with; float32."""

    conv_JC: Tensor  # the tap of the token itself is the last
    rate_N: Tensor  # below zero: how fast a head forgets
    bias_N: Tensor  # added to what the decay comes from


def split_inputs(shape: DeltaShape, x_I: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Channels, then what beta and what the decay come from."""
    sizes = (shape.num_channels, shape.num_v_heads, shape.num_v_heads)
    channels, beta, decay = x_I.split_with_sizes(sizes, -1)
    return channels, beta, decay


def _fold(
    shape: DeltaShape, weights: DeltaWeights, window_JI: Tensor, state_NHD: Tensor
) -> tuple[Tensor, Tensor]:
    channels_JC, _, _ = split_inputs(shape, window_JI)
    _, beta_N, decay_N = split_inputs(shape, window_JI[-1])
    mixed_C = channels_JC[0] * weights.conv_JC[0]
    for tap in range(1, shape.num_taps):
        mixed_C = mixed_C + channels_JC[tap] * weights.conv_JC[tap]
    mixed_C = mixed_C * sigmoid(mixed_C)
    q, k, v = mixed_C.split_with_sizes((shape.key_width, shape.key_width, shape.value_width))
    q_KH, k_KH = q.view(-1, shape.k_dim), k.view(-1, shape.k_dim)
    q_KH = q_KH * torch.rsqrt((q_KH * q_KH).sum(-1, keepdim=True) + NORM_EPS)
    k_KH = k_KH * torch.rsqrt((k_KH * k_KH).sum(-1, keepdim=True) + NORM_EPS)
    head_N = torch.arange(shape.num_v_heads, device=q_KH.device)
    group = shape.num_v_heads // shape.num_k_heads
    head_N = head_N % shape.num_k_heads if shape.is_tiled else head_N // group
    q_NH1 = (q_KH * shape.k_dim**-0.5)[head_N][:, :, None]
    k_NH1 = k_KH[head_N][:, :, None]
    v_ND = v.view(-1, shape.v_dim)
    decay_N = torch.exp(weights.rate_N * functional.softplus(decay_N + weights.bias_N))
    state_NHD = state_NHD * decay_N[:, None, None]
    seen_ND = (state_NHD * k_NH1).sum(1)
    new_ND = (v_ND - seen_ND) * sigmoid(beta_N)[:, None]
    state_NHD = state_NHD + k_NH1 * new_ND[:, None]
    return state_NHD, (state_NHD * q_NH1).sum(1)
