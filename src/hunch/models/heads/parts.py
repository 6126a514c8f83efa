"""Small parts that several drafters' networks are made of.

Shape letters: M packed rows, D width, V vocabulary, C columns of a reduced vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.layers.part import Part


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


def fit_rows(weight_VD: Tensor, vocab_size: int) -> Tensor:
    """An output matrix without rows for padding ids that the target does not have."""
    return weight_VD[:vocab_size].contiguous() if len(weight_VD) > vocab_size else weight_VD


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
