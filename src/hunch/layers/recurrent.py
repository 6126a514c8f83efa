"""Layers that keep a state per row in attention's place, not keys and values per token.

Shape letters: T packed tokens, E width of the input, I inputs of the recurrence per token, N heads,
D their width, Z = N * D, G groups of a norm, C channels of the convolution, J its taps.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.kernels.activation import sigmoid
from hunch.kernels.delta import ChannelDeltaShape, DeltaShape, DeltaWeights
from hunch.kernels.lightning import LightningShape, LightningWeights
from hunch.kernels.recurrence import Recurrence
from hunch.kernels.selective import SelectiveShape, SelectiveWeights
from hunch.kernels.short_conv import ConvShape, ConvWeights
from hunch.kernels.ssm import SsmShape, SsmWeights
from hunch.layers.attention import Attend, Attention
from hunch.layers.block import Block, PlainBlock
from hunch.layers.experts import Experts
from hunch.layers.linear import Linear
from hunch.layers.mlp import MLP, GatedMLP, PlainMLP
from hunch.layers.norm import RMSNorm
from hunch.layers.part import Part


@runtime_checkable
class Recurs(Protocol):
    """A way to attend that keeps states of rows too."""

    def recur(self, inputs_TI: Tensor, shape: Recurrence, weights: Any, layer: int) -> Tensor:
        """Fold the tokens into their rows' states, in order; what each reads, TND, in float32."""


class Recurrent(Part):
    """All projections in one product; `layer` is the place of its states among the model's."""

    shape: Recurrence

    def __init__(self, inputs: Linear, out: Linear, layer: int) -> None:
        # `inputs`: to the recurrence's inputs, then to the gate of what is read.
        self.inputs, self.out, self.layer = inputs, out, layer

    @property
    @abstractmethod
    def weights(self) -> Any:
        """What the recurrence folds tokens in with."""

    def projected(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the recurrence, TI, and the gate of what is read, TZ."""
        sizes = (self.shape.num_inputs, self.shape.value_width)
        inputs_TI, gate_TZ = self.inputs(x_TE).split_with_sizes(sizes, dim=-1)
        return inputs_TI, gate_TZ

    @abstractmethod
    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        """What the last product takes, TZ; float32."""

    def __call__(self, x_TE: Tensor, attend: Attend) -> Tensor:
        if not isinstance(attend, Recurs):
            raise UnsupportedModelError("this recipe reads texts in a way recurrent layers cannot")
        inputs_TI, gate_TZ = self.projected(x_TE)
        read_TND = attend.recur(inputs_TI, self.shape, self.weights, self.layer)
        return self.out(self.gated(read_TND, gate_TZ).to(x_TE.dtype))


class GatedDelta(Recurrent):
    """A gated delta net."""

    def __init__(
        self,
        inputs: Linear,
        conv_JC: Tensor,
        rate_N: Tensor,
        bias_N: Tensor,
        norm_D: Tensor,  # float32
        eps: float,
        out: Linear,
        shape: DeltaShape,
        layer: int,
    ) -> None:
        super().__init__(inputs, out, layer)
        self.shape: DeltaShape = shape
        self.conv_JC, self.rate_N, self.bias_N = conv_JC, rate_N, bias_N
        self.norm_D, self.eps = norm_D, eps

    @property
    def weights(self) -> DeltaWeights:
        return DeltaWeights(self.conv_JC, self.rate_N, self.bias_N)

    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        """Each head normed, then times silu of the gate."""
        return _normed(read_TND, self.eps, self.norm_D).flatten(1) * _silu(gate_TZ.float())


class ChannelDelta(Recurrent):
    """A gated delta net that forgets channel by channel. Its first product gives, after the
    channels and what beta comes from, what two further products make decays and the gate of."""

    def __init__(
        self,
        inputs: Linear,
        decay: Linear,
        gate: Linear,
        weights: DeltaWeights,
        norm_D: Tensor,  # float32
        eps: float,
        out: Linear,
        shape: ChannelDeltaShape,
        layer: int,
    ) -> None:
        super().__init__(inputs, out, layer)
        self.shape: ChannelDeltaShape = shape
        self.decay, self.gate = decay, gate
        self.conv_JC, self.rate_N, self.bias_Z = weights.conv_JC, weights.rate_N, weights.bias_N
        self.norm_D, self.eps = norm_D, eps

    @property
    def weights(self) -> DeltaWeights:
        return DeltaWeights(self.conv_JC, self.rate_N, self.bias_Z)

    def projected(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        rank = self.shape.head_dim
        first = self.shape.num_channels + self.shape.num_heads
        own_TI, decay_TR, gate_TR = self.inputs(x_TE).split_with_sizes((first, rank, rank), dim=-1)
        return torch.cat((own_TI, self.decay(decay_TR)), dim=-1), self.gate(gate_TR)

    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        """Each head normed, then times the sigmoid of the gate."""
        return _normed(read_TND, self.eps, self.norm_D).flatten(1) * sigmoid(gate_TZ.float())


class Mamba(Recurrent):
    """Mamba 2. What is read is gated and then normed, the other way round, or not normed."""

    def __init__(
        self,
        inputs: Linear,
        weights: SsmWeights,
        norm_Z: Tensor | None,  # float32
        eps: float,
        out: Linear,
        shape: SsmShape,
        layer: int,
    ) -> None:
        super().__init__(inputs, out, layer)
        self.shape: SsmShape = shape
        self.conv_JC, self.conv_bias_C = weights.conv_JC, weights.conv_bias_C
        self.rate_N, self.bias_N, self.skip_N = weights.rate_N, weights.bias_N, weights.skip_N
        self.norm_Z, self.eps = norm_Z, eps

    @property
    def weights(self) -> SsmWeights:
        return SsmWeights(self.conv_JC, self.conv_bias_C, self.rate_N, self.bias_N, self.skip_N)

    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        read_TZ, gate_TZ = read_TND.flatten(1), _silu(gate_TZ.float())
        if self.norm_Z is None:
            return read_TZ * gate_TZ
        read_TZ = read_TZ if self.shape.is_norm_first else read_TZ * gate_TZ
        read_TGZ = read_TZ.view(len(read_TZ), self.shape.num_groups, -1)
        square_TG1 = read_TGZ.square().mean(-1, keepdim=True)
        read_TZ = (read_TGZ * torch.rsqrt(square_TG1 + self.eps)).flatten(1) * self.norm_Z
        return read_TZ * gate_TZ if self.shape.is_norm_first else read_TZ


class Selective(Recurrent):
    """Mamba 1."""

    def __init__(
        self,
        inputs: Linear,
        weights: SelectiveWeights,
        out: Linear,
        shape: SelectiveShape,
        layer: int,
    ) -> None:
        super().__init__(inputs, out, layer)
        self.shape: SelectiveShape = shape
        self.conv_JD, self.conv_bias_D = weights.conv_JD, weights.conv_bias_D
        self.project_XD, self.step_DR = weights.project_XD, weights.step_DR
        self.step_bias_D, self.rate_HD = weights.step_bias_D, weights.rate_HD
        self.skip_D, self.part_norm_X = weights.skip_D, weights.part_norm_X

    @property
    def weights(self) -> SelectiveWeights:
        return SelectiveWeights(
            *(self.conv_JD, self.conv_bias_D, self.project_XD, self.step_DR),
            *(self.step_bias_D, self.rate_HD, self.skip_D, self.part_norm_X),
        )

    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        return read_TND.flatten(1) * _silu(gate_TZ.float())


class ShortConv(Recurrent):
    """A gated convolution over the last few tokens; what is read is multiplied by the gate."""

    def __init__(
        self, inputs: Linear, conv_JD: Tensor, out: Linear, shape: ConvShape, layer: int
    ) -> None:
        super().__init__(inputs, out, layer)
        self.shape: ConvShape = shape
        self.conv_JD = conv_JD

    @property
    def weights(self) -> ConvWeights:
        return ConvWeights(self.conv_JD)

    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        return read_TND.flatten(1) * gate_TZ.float()


class Lightning(Recurrent):
    """Lightning attention: all heads that were read are normed at once, then gated."""

    def __init__(
        self,
        inputs: Linear,
        kept_N: Tensor,
        norm_Z: Tensor,  # float32
        out: Linear,
        shape: LightningShape,
        layer: int,
    ) -> None:
        super().__init__(inputs, out, layer)
        self.shape: LightningShape = shape
        self.kept_N, self.norm_Z = kept_N, norm_Z

    @property
    def weights(self) -> LightningWeights:
        return LightningWeights(self.kept_N)

    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        read_TZ = _normed(read_TND.flatten(1), _LIGHTNING_EPS, self.norm_Z)
        return read_TZ * sigmoid(gate_TZ.float())


_LIGHTNING_EPS = 1e-6  # whatever the model's other norms have


def _normed(x: Tensor, eps: float, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


class RecurrentBlock(PlainBlock):
    """A decoder layer whose first half is recurrent."""

    attn: Recurrent


@dataclass(frozen=True, kw_only=True, slots=True)
class CarriedScales:
    """Of layers that carry on what their halves read: a pair is how much of that, and how much of
    what the half gives."""

    attn: tuple[float, float]
    recurrent: tuple[float, float]
    mlp: tuple[float, float]


@dataclass(eq=False, repr=False)
class CarriedBlock(PlainBlock):
    """A layer that carries on what its halves read, normed, in place of the stream before it."""

    attn_scales: tuple[float, float] = (1.0, 1.0)
    mlp_scales: tuple[float, float] = (1.0, 1.0)

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        x_TD = self.attn_norm(x_TD)
        x_TD = _sum(x_TD, self.attn(x_TD, attend), self.attn_scales)
        x_TD = self.mlp_norm(x_TD)
        return _sum(x_TD, self.mlp(x_TD), self.mlp_scales)


def _sum(carried_TD: Tensor, given_TD: Tensor, scales: tuple[float, float]) -> Tensor:
    return carried_TD * scales[0] + given_TD * scales[1]


class BothBlock(Block):
    """A layer whose first half attends and recurs: both read one norm, and both are added."""

    recurrent: Recurrent  # set by whoever builds it

    def mix(self, residual_TD: Tensor, input_TE: Tensor, attend: Attend) -> Tensor:
        residual_TD = residual_TD + self.recurrent(input_TE, attend)
        return super().mix(residual_TD, input_TE, attend)


class HalfBlock(Part):
    """x + half(norm(x)): a layer that attends, recurs, or is an MLP or experts, alone."""

    def __init__(self, norm: RMSNorm, half: Attention | Recurrent | MLP | Experts) -> None:
        self.norm, self.half = norm, half

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        h_TD = self.norm(x_TD)
        if isinstance(self.half, GatedMLP | PlainMLP | Experts):
            return x_TD + self.half(h_TD)
        return x_TD + self.half(h_TD, attend)
