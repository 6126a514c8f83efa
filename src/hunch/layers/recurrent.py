"""A gated delta net in attention's place: a state per row instead of keys and values per token.

Shape letters: T packed tokens, E width of the input, I inputs of the recurrence per token, N value
heads, D their width, Z = N * D.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.kernels.activation import sigmoid
from hunch.kernels.delta import DeltaShape, DeltaWeights
from hunch.layers.attention import Attend
from hunch.layers.block import PlainBlock
from hunch.layers.linear import Linear
from hunch.layers.part import Part


@runtime_checkable
class Recurs(Protocol):
    """A way to attend that keeps states of rows too."""

    def recur(
        self, inputs_TI: Tensor, shape: DeltaShape, weights: DeltaWeights, layer: int
    ) -> Tensor:
        """Fold the tokens into their rows' states, in order; what each reads, TND, in float32."""


class GatedDelta(Part):
    """All projections in one product; `layer` is the place of its states among the model's."""

    def __init__(
        self,
        inputs: Linear,  # to the recurrence's inputs, then to the gate of what is read
        conv_JC: Tensor,
        rate_N: Tensor,
        bias_N: Tensor,
        norm_D: Tensor,  # float32
        eps: float,
        out: Linear,
        shape: DeltaShape,
        layer: int,
    ) -> None:
        self.inputs, self.out, self.shape, self.layer = inputs, out, shape, layer
        self.conv_JC, self.rate_N, self.bias_N = conv_JC, rate_N, bias_N
        self.norm_D, self.eps = norm_D, eps

    @property
    def weights(self) -> DeltaWeights:
        return DeltaWeights(self.conv_JC, self.rate_N, self.bias_N)

    def __call__(self, x_TE: Tensor, attend: Attend) -> Tensor:
        if not isinstance(attend, Recurs):
            raise UnsupportedModelError("this recipe reads texts in a way recurrent layers cannot")
        sizes = (self.shape.num_inputs, self.shape.value_width)
        inputs_TI, gate_TZ = self.inputs(x_TE).split_with_sizes(sizes, dim=-1)
        read_TND = attend.recur(inputs_TI, self.shape, self.weights, self.layer)
        return self.out(self.gated(read_TND, gate_TZ).to(x_TE.dtype))

    def gated(self, read_TND: Tensor, gate_TZ: Tensor) -> Tensor:
        """Each head normed, then times silu of the gate; float32."""
        square_TN1 = read_TND.square().mean(-1, keepdim=True)
        normed_TND = read_TND * torch.rsqrt(square_TN1 + self.eps) * self.norm_D
        gate_TZ = gate_TZ.float()
        return normed_TND.flatten(1) * (gate_TZ * sigmoid(gate_TZ))


class DeltaBlock(PlainBlock):
    """A decoder layer whose first half is a gated delta net."""

    attn: GatedDelta
