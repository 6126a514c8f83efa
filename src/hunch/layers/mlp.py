"""The feed-forward half of a layer.

Shape letters: T packed tokens, D width, F inner width.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from hunch.kernels.activation import ACTIVATIONS, XIELU_BETA, gated, xielu
from hunch.layers.linear import Linear
from hunch.layers.norm import RMSNorm
from hunch.layers.part import Part


class GatedMLP(Part):
    """down(act(gate(x)) * up(x)), with gate and up in one product."""

    def __init__(
        self, gate_up: Linear, down: Linear, activation: str, norm: RMSNorm | None = None
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self.norm = norm  # of what `down` takes

    def __call__(self, x_TD: Tensor) -> Tensor:
        inner_TF = gated(self.gate_up(x_TD), self.activation)
        return self.down(inner_TF if self.norm is None else self.norm(inner_TF))


class PlainMLP(Part):
    """down(act(up(x)))."""

    def __init__(self, up: Linear, down: Linear, activation: str) -> None:
        self.up = up
        self.down = down
        self.activation = activation

    def __call__(self, x_TD: Tensor) -> Tensor:
        return self.down(ACTIVATIONS[self.activation](self.up(x_TD)))


class XieluMLP(PlainMLP):
    """The same with an activation that the layer has learned."""

    def __init__(self, up: Linear, down: Linear, rise_1: Tensor, fall_1: Tensor) -> None:
        super().__init__(up, down, "xielu")
        self.rise_1, self.fall_1 = rise_1, fall_1  # float32

    def __call__(self, x_TD: Tensor) -> Tensor:
        rise_1 = functional.softplus(self.rise_1)
        fall_1 = functional.softplus(self.fall_1) + XIELU_BETA
        return self.down(xielu(self.up(x_TD), rise_1, fall_1))


MLP = GatedMLP | PlainMLP
