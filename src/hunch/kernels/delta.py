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
from hunch.kernels.recurrence import Recurrence, convolved

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
    beta_scale: float = 1.0  # 2: a state may turn against what it was
    read_eps: float | None = None  # of the norm of what is read; None: the model's
    is_apart: bool = False  # files hold queries, keys and values, and their taps, apart

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
        beta_N, decay_N = window_JI[-1, self.num_channels :].chunk(2)
        mixed_C = convolved(window_JI[:, : self.num_channels], weights.conv_JC)
        mixed_C = mixed_C * sigmoid(mixed_C)
        q, k, v = mixed_C.split_with_sizes((self.key_width, self.key_width, self.value_width))
        q_KH, k_KH = _unit(q.view(-1, self.k_dim)), _unit(k.view(-1, self.k_dim))
        head_N = torch.arange(self.num_v_heads, device=q_KH.device)
        group = self.num_v_heads // self.num_k_heads
        head_N = head_N % self.num_k_heads if self.is_tiled else head_N // group
        q_NH1 = (q_KH * self.k_dim**-0.5)[head_N][:, :, None]
        k_NH1 = k_KH[head_N][:, :, None]
        v_ND = v.view(-1, self.v_dim)
        decay_N = torch.exp(weights.rate_N * functional.softplus(decay_N + weights.bias_N))
        beta_N = self.beta_scale * sigmoid(beta_N)
        return _fold(state_NHD * decay_N[:, None, None], q_NH1, k_NH1, v_ND, beta_N)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChannelDeltaShape(Recurrence):
    """The sizes of a gated delta net whose keys forget channel by channel (Kimi's). Its matrices
    of the gates go through fewer numbers than they have.

    Paper: arXiv 2510.26692.
    """

    num_heads: int
    head_dim: int
    num_taps: int

    @property
    def state(self) -> tuple[int, int, int]:
        return self.num_heads, self.head_dim, self.head_dim

    @property
    def num_channels(self) -> int:
        return 3 * self.value_width

    @property
    def num_inputs(self) -> int:
        """Inputs per token: the channels, what beta comes from, what decays come from."""
        return self.num_channels + self.num_heads + self.value_width

    def fold(
        self, weights: DeltaWeights, window_JI: Tensor, state_NHD: Tensor
    ) -> tuple[Tensor, Tensor]:
        sizes = (self.num_channels, self.num_heads, self.value_width)
        channels_JC, beta_JN, decay_JZ = window_JI.split_with_sizes(sizes, dim=-1)
        mixed_C = convolved(channels_JC, weights.conv_JC)
        mixed_C = mixed_C * sigmoid(mixed_C)
        q_NH, k_NH, v_ND = mixed_C.view(3, self.num_heads, self.head_dim).unbind(0)
        q_NH, k_NH = _unit(q_NH) * self.head_dim**-0.5, _unit(k_NH)
        size_NH = functional.softplus(decay_JZ[-1] + weights.bias_N).view(k_NH.shape)
        kept_NH = torch.exp(weights.rate_N[:, None] * size_NH)
        state_NHD = state_NHD * kept_NH[:, :, None]
        return _fold(state_NHD, q_NH[:, :, None], k_NH[:, :, None], v_ND, sigmoid(beta_JN[-1]))


def _unit(x_NH: Tensor) -> Tensor:
    return x_NH * torch.rsqrt((x_NH * x_NH).sum(-1, keepdim=True) + NORM_EPS)


def _fold(
    state_NHD: Tensor, q_NH1: Tensor, k_NH1: Tensor, v_ND: Tensor, beta_N: Tensor
) -> tuple[Tensor, Tensor]:
    """What a state that has forgotten takes of a token, and what the token reads then."""
    seen_ND = (state_NHD * k_NH1).sum(1)
    new_ND = (v_ND - seen_ND) * beta_N[:, None]
    state_NHD = state_NHD + k_NH1 * new_ND[:, None]
    return state_NHD, (state_NHD * q_NH1).sum(1)


@dataclass(slots=True)
class DeltaWeights:
    """What a layer folds tokens in with; float32."""

    conv_JC: Tensor  # the tap of the token itself is the last
    rate_N: Tensor  # below zero: how fast a head forgets
    bias_N: Tensor  # added to what the decay comes from; of each channel, where it has its own
