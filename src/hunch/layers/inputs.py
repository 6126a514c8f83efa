"""What a table says of each token to each layer, which takes of it what its stream asks for.

Shape letters: T packed tokens, D width, L layers, P numbers per layer, V vocabulary, X = L * P.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from hunch.kernels.activation import ACTIVATIONS
from hunch.layers.linear import Linear
from hunch.layers.norm import RMSNorm
from hunch.layers.part import Part


@dataclass(eq=False, repr=False)
class TokenTable(Part):
    """(norm(project(embedding)) + row of the table) / sqrt(2): for all layers at once."""

    SCALE = 2.0**-0.5

    table_VX: Tensor
    project: Linear
    norm: RMSNorm
    table_scale: float
    project_scale: float

    def __call__(self, ids_T: Tensor, x_TD: Tensor) -> Tensor:
        """The inputs of every layer, TLP; x_TD is the stream before the first."""
        width, num_rows = self.norm.weight_D.shape[0], len(self.table_VX)
        ids_T = ids_T.masked_fill(ids_T >= num_rows, 0)  # of pictures and sound, which have no row
        row_TLP = functional.embedding(ids_T, self.table_VX).view(len(ids_T), -1, width)
        seen_TLP = (self.project(x_TD) * self.project_scale).view(len(ids_T), -1, width)
        return (self.norm(seen_TLP) + row_TLP * self.table_scale) * self.SCALE


class InputGate(Part):
    """x + norm(project(act(gate(x)) * input)): a layer's use of its inputs."""

    def __init__(self, gate: Linear, project: Linear, norm: RMSNorm, activation: str) -> None:
        self.gate, self.project, self.norm, self.activation = gate, project, norm, activation

    def __call__(self, x_TD: Tensor, input_TP: Tensor) -> Tensor:
        return x_TD + self.branch(x_TD, input_TP)

    def branch(self, x_TD: Tensor, input_TP: Tensor) -> Tensor:
        """What is added."""
        asked_TP = ACTIVATIONS[self.activation](self.gate(x_TD))
        return self.norm(self.project(asked_TP * input_TP))
