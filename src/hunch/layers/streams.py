"""Layers over several residual streams: one is computed, the others are predicted and corrected.

Shape letters: T packed tokens, D width, S streams, P inputs of a layer, F inner width of an MLP,
R rank of a layer's short cut.
Papers: AltUp, arXiv 2301.13310; LAuReL, arXiv 2411.07501.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.activation import ACTIVATIONS, sigmoid
from hunch.kernels.norm import row_moments
from hunch.layers.attention import Attend, Attention
from hunch.layers.inputs import InputGate
from hunch.layers.linear import Linear
from hunch.layers.mlp import GatedMLP
from hunch.layers.norm import Norm, RMSNorm
from hunch.layers.part import Part

_LEAST_SQUARE = 1e-5  # of a stream that is brought to another's size


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamsShape:
    """Several streams side by side, and what else their layers have."""

    count: int
    active: int  # the one that attention and MLP compute
    has_scale: bool  # of the active stream, before it asks for a layer's inputs
    short_rank: int  # of the short cut beside attention
    sparsity: tuple[float, ...]  # per layer: the share of an MLP's gates that are shut; 0: none is


class Streams(Part):
    """The embedding as several streams, and the streams as one vector."""

    def __init__(self, spread: list[Linear], join: list[Linear]) -> None:
        self.spread, self.join = spread, join

    def split(self, x_TD: Tensor) -> Tensor:
        """All streams, STD: x itself, and its products at the size that x has."""
        size_T1 = _square(x_TD).sqrt()
        return torch.stack((x_TD, *(_sized(each(x_TD), size_T1) for each in self.spread)))

    def merge(self, x_STD: Tensor) -> Tensor:
        """Their mean, the others multiplied and brought to the size of the first."""
        first_TD, size_T1 = x_STD[0], _square(x_STD[0]).sqrt()
        sum_TD = first_TD.float()
        for each, x_TD in zip(self.join, x_STD[1:], strict=True):
            sum_TD = sum_TD + _sized(each(x_TD), size_T1).float()
        return (sum_TD / len(x_STD)).to(x_STD.dtype)


def _square(x_TD: Tensor) -> Tensor:
    """The mean square of each row."""
    mean_T1, deviation_T1 = row_moments(x_TD)
    return mean_T1.square() + deviation_T1.square()


def _sized(x_TD: Tensor, size_T1: Tensor) -> Tensor:
    """Rows whose root mean square is `size_T1`."""
    own_T1 = _square(x_TD).clamp(min=_LEAST_SQUARE).sqrt()
    return (x_TD.float() * size_T1 / own_T1).to(x_TD.dtype)


class Mixer(Part):
    """How a layer's streams follow from each other: by factors that the computed one asks for."""

    def __init__(self, norm: RMSNorm, router: Linear, predict_XS: Tensor, correct_SS: Tensor):
        """`predict_XS` has S * S rows; both are float32."""
        self.norm, self.router = norm, router
        self.predict_XS, self.correct_SS = predict_XS, correct_SS

    def predict(self, x_STD: Tensor, active: int) -> Tensor:
        """Each stream plus a sum of all of them."""
        num_streams, num_tokens, _ = x_STD.shape
        factor_TX = _sum_of(self._asked(x_STD[active]), self.predict_XS)
        factor_STS = factor_TX.view(num_tokens, num_streams, num_streams).transpose(0, 1)
        wide_STD = x_STD.float()
        sum_STD = wide_STD
        for other in range(num_streams):
            sum_STD = sum_STD + factor_STS[:, :, other, None] * wide_STD[other]
        return sum_STD.to(x_STD.dtype)

    def correct(self, x_STD: Tensor, computed_TD: Tensor, active: int) -> Tensor:
        """Each stream plus a share of what the computed one differs by from its prediction."""
        factor_TS = _sum_of(self._asked(computed_TD), self.correct_SS) + 1.0
        new_TD = computed_TD.float() - x_STD[active].float()
        return (x_STD.float() + factor_TS.t()[..., None] * new_TD).to(x_STD.dtype)

    def _asked(self, x_TD: Tensor) -> Tensor:
        """A number between -1 and 1 for each stream, TS."""
        routed_TS = self.router(self.norm(x_TD) * (1.0 / x_TD.shape[-1])).float()
        return 2 * sigmoid(2 * routed_TS) - 1  # tanh, by a sigmoid of the same bits everywhere


def _sum_of(asked_TS: Tensor, weight_XS: Tensor) -> Tensor:
    """A product of so few numbers that they are added one by one, in the same order always."""
    sum_TX = asked_TS[:, :1] * weight_XS[:, 0]
    for stream in range(1, weight_XS.shape[1]):
        sum_TX = sum_TX + asked_TS[:, stream, None] * weight_XS[:, stream]
    return sum_TX


class SparseMLP(GatedMLP):
    """down(act(gates above a limit, less the limit) * up(x)).

    As if gates were normally distributed, the limit has the given share of them below it.
    """

    def __init__(self, gate_up: Linear, down: Linear, activation: str, share: float) -> None:
        super().__init__(gate_up, down, activation)
        self.num_deviations = NormalDist().inv_cdf(share)

    def __call__(self, x_TD: Tensor) -> Tensor:
        gate_TF, up_TF = self.gate_up(x_TD).chunk(2, dim=-1)
        mean_T1, deviation_T1 = row_moments(gate_TF)
        limit_T1 = mean_T1 + deviation_T1 * self.num_deviations
        open_TF = functional.relu(gate_TF.float() - limit_T1).to(x_TD.dtype)
        return self.down(ACTIVATIONS[self.activation](open_TF) * up_TF)


class ShortCut(Part):
    """x + norm(right(left(x))): what stands beside attention."""

    def __init__(self, left: Linear, right: Linear, norm: RMSNorm) -> None:
        self.left, self.right, self.norm = left, right, norm

    def __call__(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.norm(self.right(self.left(x_TD)))


@dataclass(eq=False, repr=False)
class StreamsBlock(Part):
    """Predict all streams, compute one of them, correct all by it, and let the table speak to all
    but the first."""

    SCALE = 2.0**-0.5  # of the stream after attention, to which the short cut is added

    mixer: Mixer
    active: int
    attn_norm: Norm
    attn: Attention
    attn_out_norm: Norm
    short: ShortCut
    mlp_norm: Norm
    mlp: GatedMLP
    mlp_out_norm: Norm
    inputs: InputGate
    scale_D: Tensor | None

    def __call__(self, x_STD: Tensor, attend: Attend, input_TP: Tensor | None = None) -> Tensor:
        """`input_TP`: what a table says of the tokens."""
        assert input_TP is not None
        x_STD = self.mixer.predict(x_STD, self.active)
        computed_TD = self._compute(x_STD[self.active], attend)
        x_STD = self.mixer.correct(x_STD, computed_TD, self.active)
        asking_TD = x_STD[self.active]
        if self.scale_D is not None:
            asking_TD = asking_TD * self.scale_D
        told_TD = self.inputs.branch(asking_TD, input_TP)
        return torch.cat((x_STD[:1], x_STD[1:] + told_TD))

    def _compute(self, x_TD: Tensor, attend: Attend) -> Tensor:
        h_TD = self.attn_norm(x_TD)
        x_TD = x_TD + self.attn_out_norm(self.attn(h_TD, attend))
        x_TD = (x_TD + self.short(h_TD)) * self.SCALE
        return x_TD + self.mlp_out_norm(self.mlp(self.mlp_norm(x_TD)))
