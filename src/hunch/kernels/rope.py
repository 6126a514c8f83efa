"""Rotary position embedding: pairs (h, h + H/2) of each head turn by an angle of the position.

Shape letters: T packed tokens, N heads, H head width, L positions of a table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hunch.kernels.activation import is_taught


@dataclass(slots=True)
class Rotation:
    """The angles of one step's tokens, made once and used by every layer."""

    cos_T1H: Tensor  # both halves carry the same cosines
    sin_T1H: Tensor  # the first half with a minus sign
    temper_T11: Tensor | None = None  # what queries are multiplied with; None: nothing


def rotation(table_LH: Tensor, pos_T: Tensor) -> Rotation:
    """Rows of a table whose left half holds cosines and right half sines, H/2 of each."""
    cos, sin = table_LH.index_select(0, pos_T)[:, None].chunk(2, dim=-1)
    return Rotation(torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1))


def rope_ref(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """The specification, in float64; sin_T1H carries its signs as Rotation does."""
    half = x_TNH.shape[-1] // 2
    left, right = x_TNH.double().split(half, dim=-1)
    cos = cos_T1H.double()[..., :half]
    sin = sin_T1H.double()[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_TNH.dtype)


def rope(x_TNH: Tensor, cos_T1H: Tensor, sin_T1H: Tensor) -> Tensor:
    """Three passes over x, in float32 whatever x holds; one where a GPU is taught."""
    if x_TNH.dim() == 3 and is_taught(x_TNH):
        from hunch.kernels.gpu_teach import turn

        return turn(x_TNH, cos_T1H, sin_T1H)
    x = x_TNH.float()
    swapped = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos_T1H, swapped, sin_T1H).to(x_TNH.dtype)
