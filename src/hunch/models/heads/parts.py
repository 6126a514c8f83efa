"""Small parts that several drafters' networks are made of.

Shape letters: M packed rows, D width, V vocabulary, C columns of a reduced
vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.kernels.native import FLOAT, INT8, NativeMatrix
from hunch.layers.linear import Linear
from hunch.layers.part import Part


class NativeLinear(Linear):
    """A linear layer on the CPU's own kernels, rounded to 8 bits: a drafter may be a little off."""

    def __init__(
        self, weight_NK: Tensor, bias_N: Tensor | None = None, *, is_rounded: bool = True
    ) -> None:
        super().__init__(weight_NK[:0], bias_N)  # the matrix itself is kept in the kernels' layout
        kind = INT8 if is_rounded else FLOAT
        self.matrix = NativeMatrix.from_floats(weight_NK, kind, torch.get_num_threads())

    @staticmethod
    def fits(weight_NK: Tensor) -> bool:
        return weight_NK.shape[1] % 32 == 0  # a scale belongs to 32 inputs

    def __call__(self, x_TK: Tensor) -> Tensor:
        y_TN = self.matrix(x_TK)
        return y_TN if self.bias_N is None else y_TN.add_(self.bias_N)


class Table(Part):
    """An embedding of a drafter's own."""

    def __init__(self, weight_VD: Tensor) -> None:
        self.weight_VD = weight_VD

    def __call__(self, token_M: Tensor) -> Tensor:
        return self.weight_VD.index_select(0, token_M)


class BiasedNorm(Part):
    """Divide by the root mean square, times a weight, plus a bias."""

    def __init__(self, weight_D: Tensor, bias_D: Tensor, eps: float) -> None:
        self.weight_D, self.bias_D, self.eps = weight_D, bias_D, eps

    def __call__(self, x_MD: Tensor) -> Tensor:
        return F.rms_norm(x_MD, self.weight_D.shape, self.weight_D, self.eps) + self.bias_D


def column_ids(num_columns: int, vocab_size: int) -> Tensor | None:
    """The target's id of each column of logits; None where they are the whole vocabulary."""
    return None if num_columns == vocab_size else torch.arange(num_columns)


def check_map(ids_C: Tensor, vocab_size: int, where: str) -> Tensor:
    """A map from a head's own token numbers to the target's ids."""
    if len(ids_C) and (int(ids_C.min()) < 0 or int(ids_C.max()) >= vocab_size):
        raise ModelFormatError(
            f"{where}: its map of tokens points to ids {int(ids_C.min())}..{int(ids_C.max())}, the "
            f"target has 0..{vocab_size - 1}; the head belongs to another target"
        )
    if len(torch.unique(ids_C)) != len(ids_C):
        raise ModelFormatError(f"{where}: its map of tokens names one id twice; it is damaged")
    return ids_C
