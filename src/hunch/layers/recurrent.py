"""Layers that keep a state per row in attention's place, not keys and values per token.

Shape letters: T packed tokens, E width of the input, I inputs of the recurrence per token, N heads,
D their width, Z = N * D, G groups of a norm, C channels of the convolution, J its taps.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.kernels.activation import sigmoid
from hunch.kernels.delta import ChannelDeltaShape, DeltaShape, DeltaWeights
from hunch.kernels.recurrence import Recurrence
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


@dataclass(eq=False, repr=False)
class Recurrent(Part):
    """All projections in one product; `layer` is the place of its states among the model's."""

    inputs: Linear  # to the recurrence's inputs, then to the gate of what is read
    weights: Any  # what the recurrence folds tokens in with
    out: Linear
    shape: Recurrence
    layer: int

    def named_tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        yield from super().named_tensors(prefix)
        for field in fields(self.weights):
            yield f"{prefix}{field.name}", getattr(self.weights, field.name)

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


@dataclass(eq=False, repr=False)
class GatedDelta(Recurrent):
    """A gated delta net."""

    weights: DeltaWeights
    shape: DeltaShape
    norm_D: Tensor  # float32
    eps: float

    @property
    def conv_JC(self) -> Tensor:
        return self.weights.conv_JC

    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        """Each head normed, then times silu of the gate."""
        return _normed(read_TND, self.eps, self.norm_D).flatten(1) * _silu(gate_TZ.float())


@dataclass(eq=False, repr=False)
class ChannelDelta(Recurrent):
    """A gated delta net that forgets channel by channel. Its first product gives, after the
    channels and what beta comes from, what two further products make decays and the gate of."""

    weights: DeltaWeights
    shape: ChannelDeltaShape
    decay: Linear
    gate: Linear
    norm_D: Tensor  # float32
    eps: float

    def projected(self, x_TE: Tensor) -> tuple[Tensor, Tensor]:
        rank = self.shape.head_dim
        first = self.shape.num_channels + self.shape.num_heads
        own_TI, decay_TR, gate_TR = self.inputs(x_TE).split_with_sizes((first, rank, rank), dim=-1)
        return torch.cat((own_TI, self.decay(decay_TR)), dim=-1), self.gate(gate_TR)

    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        """Each head normed, then times the sigmoid of the gate."""
        return _normed(read_TND, self.eps, self.norm_D).flatten(1) * sigmoid(gate_TZ.float())


@dataclass(eq=False, repr=False)
class Mamba(Recurrent):
    """Mamba 2. What is read is gated and then normed, the other way round, or not normed."""

    weights: SsmWeights
    shape: SsmShape
    norm_Z: Tensor | None  # float32
    eps: float

    @property
    def conv_JC(self) -> Tensor:
        return self.weights.conv_JC

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

    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        return read_TND.flatten(1) * _silu(gate_TZ.float())


class ShortConv(Recurrent):
    """A gated convolution over the last few tokens; what is read is multiplied by the gate."""

    weights: ConvWeights
    shape: ConvShape

    @property
    def conv_JD(self) -> Tensor:
        return self.weights.conv_JD

    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        return read_TND.flatten(1) * gate_TZ.float()


@dataclass(eq=False, repr=False)
class Lightning(Recurrent):
    """Lightning attention: all heads that were read are normed at once, then gated."""

    norm_Z: Tensor  # float32

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
