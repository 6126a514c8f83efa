"""Linear layers, whole or split over a group.

Shape letters: T packed tokens, K inputs, N outputs.
"""

from __future__ import annotations

from torch import Tensor

from hunch.kernels.linear import linear, linear_in_tiles
from hunch.kernels.quant import Quantised, Weight
from hunch.layers.part import Part
from hunch.parallel.group import SINGLE, Group


class Linear(Part):
    """y = x W^T + b. Split by outputs it needs no word with the group: each rank has its own."""

    num_tile_rows = 0  # rows of every product; 0: as many as there are
    input_bits = 0  # inputs are rounded to, each row by its largest; 0: they are not

    def __init__(self, weight: Weight, bias_N: Tensor | None = None) -> None:
        """The weight is [N, K], as numbers or in few bits."""
        self.weight = weight
        self.bias_N = bias_N

    @property
    def weight_NK(self) -> Tensor:
        """The numbers themselves: made anew, at some cost, where the layer holds few bits."""
        return self.weight.dense() if isinstance(self.weight, Quantised) else self.weight

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.weight.shape[0], self.weight.shape[1]

    def rows(self, ids_C: Tensor) -> Weight:
        """The weight of some outputs alone."""
        if isinstance(self.weight, Quantised):
            return self.weight.rows(ids_C)
        return self.weight[ids_C.to(self.weight.device)]

    def __call__(self, x_TK: Tensor) -> Tensor:
        return self._multiply(x_TK, self.bias_N)

    def _multiply(self, x_TK: Tensor, bias_N: Tensor | None) -> Tensor:
        if self.input_bits:
            x_TK = rounded(x_TK, self.input_bits)
        if self.num_tile_rows:
            return linear_in_tiles(x_TK, self.weight_NK, bias_N, self.num_tile_rows)
        return linear(x_TK, self.weight_NK, bias_N)


def rounded(x_TK: Tensor, num_bits: int) -> Tensor:
    """Rows as whole numbers of steps, of which a row's largest number has the most."""
    most = (1 << (num_bits - 1)) - 1
    scale_T1 = most / x_TK.float().abs().amax(-1, keepdim=True).clamp(min=1e-5)
    steps_TK = (x_TK.float() * scale_T1).round().clamp(-most - 1, most)
    return (steps_TK / scale_T1).to(x_TK.dtype)


class RowLinear(Linear):
    """Split by inputs: each rank has a part of every output's sum. The bias is added once."""

    def __init__(self, weight: Weight, bias_N: Tensor | None = None, group: Group = SINGLE) -> None:
        super().__init__(weight, bias_N)
        self.group = group

    def __call__(self, x_TK: Tensor) -> Tensor:
        if self.group.size == 1:
            return self._multiply(x_TK, self.bias_N)
        y_TN = self.group.all_reduce(self._multiply(x_TK, None))
        return y_TN if self.bias_N is None else y_TN + self.bias_N
