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
        q_KH, k_KH = q.view(-1, self.k_dim), k.view(-1, self.k_dim)
        q_KH = q_KH * torch.rsqrt((q_KH * q_KH).sum(-1, keepdim=True) + NORM_EPS)
        k_KH = k_KH * torch.rsqrt((k_KH * k_KH).sum(-1, keepdim=True) + NORM_EPS)
        head_N = torch.arange(self.num_v_heads, device=q_KH.device)
        group = self.num_v_heads // self.num_k_heads
        head_N = head_N % self.num_k_heads if self.is_tiled else head_N // group
        q_NH1 = (q_KH * self.k_dim**-0.5)[head_N][:, :, None]
        k_NH1 = k_KH[head_N][:, :, None]
        v_ND = v.view(-1, self.v_dim)
        decay_N = torch.exp(weights.rate_N * functional.softplus(decay_N + weights.bias_N))
        state_NHD = state_NHD * decay_N[:, None, None]
        seen_ND = (state_NHD * k_NH1).sum(1)
        new_ND = (v_ND - seen_ND) * (self.beta_scale * sigmoid(beta_N))[:, None]
        state_NHD = state_NHD + k_NH1 * new_ND[:, None]
        return state_NHD, (state_NHD * q_NH1).sum(1)


@dataclass(slots=True)
class DeltaWeights:
    """What a layer folds tokens in with; float32."""

    conv_JC: Tensor  # the tap of the token itself is the last
    rate_N: Tensor  # below zero: how fast a head forgets
    bias_N: Tensor  # added to what the decay comes from
