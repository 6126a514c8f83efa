"""The target's opinions and states on texts: the one pass that every recipe learns from.

Shape letters: T tokens in a row, D width, M positions that teach, C columns of the draft
vocabulary, K the likeliest of them, V the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.activation import rounded_once
from hunch.models.decoder import Decoder, finish_logits
from hunch.train.attend import Packed
from hunch.train.packs import PackInputs
from hunch.train.vocab import Columns

TOP = 64  # columns of an opinion that are kept
_NUM_ROWS = 8192  # positions whose logits exist at a time


@dataclass(frozen=True, slots=True)
class TopOpinions:
    """The target's distribution at M positions, as its likeliest columns; others have chance 0."""

    column_MK: Tensor
    p_MK: Tensor
    num_columns: int

    @staticmethod
    def of(p_MC: Tensor, count: int = TOP) -> TopOpinions:
        """The likeliest columns, made to sum to one."""
        p_MK, column_MK = p_MC.topk(min(count, p_MC.shape[1]), dim=-1)
        p_MK = p_MK / p_MK.sum(-1, keepdim=True, dtype=torch.float32).clamp(min=1e-6)
        return TopOpinions(column_MK.int(), p_MK.to(p_MC.dtype), p_MC.shape[1])

    def __len__(self) -> int:
        return len(self.column_MK)

    @property
    def device(self) -> torch.device:
        return self.p_MK.device

    def __getitem__(self, rows: Tensor | slice) -> TopOpinions:
        return TopOpinions(self.column_MK[rows], self.p_MK[rows], self.num_columns)

    def toward(self, label_M: Tensor, share_M: Tensor) -> TopOpinions:
        """The distributions with these shares moved to the column `label_M` of each position."""
        is_own_MK, share_M1 = self.column_MK == label_M[:, None], share_M[:, None]
        p_MK = self.p_MK * (1 - share_M1) + share_M1 * is_own_MK
        more_M1 = share_M1 * ~is_own_MK.any(-1, keepdim=True)
        column_MK = torch.cat((self.column_MK, label_M[:, None].to(self.column_MK)), dim=1)
        return TopOpinions(column_MK, torch.cat((p_MK, more_M1), dim=1), self.num_columns)


@dataclass(slots=True)
class States:
    """The target's states on a pack."""

    hidden_TD: Tensor  # after the final norm; empty if not asked for
    features: tuple[Tensor, ...]  # the stream after each layer asked for


@torch.no_grad()
def read_pack(target: Decoder, pack: PackInputs, feature_layers: tuple[int, ...] = ()) -> States:
    """One pass of the target over the texts."""
    with rounded_once():
        attend = Packed(pack, target.ropes, has_readers=bool(target.spec.kv_of))
        hidden = target.read(pack.ids_T, pack.pos_T, attend, feature_layers)
    return States(hidden.last_TD, hidden.features)


@torch.no_grad()
def opinions_of(target: Decoder, columns: Columns, pack: PackInputs, states: States) -> Tensor:
    """The target's distributions where tokens teach, MC: in the model's precision, computed in
    float32 a part at a time."""
    head_CD, bias_C = target.head.weight_NK[columns.ids_C], target.head.bias_N
    bias_C = None if bias_C is None else bias_C[columns.ids_C]
    p_MC = head_CD.new_empty(len(pack.row_M), len(head_CD))
    for first in range(0, len(p_MC), _NUM_ROWS):
        part = slice(first, first + _NUM_ROWS)
        hidden_MD = states.hidden_TD.index_select(0, pack.row_M[part])
        logits = functional.linear(hidden_MD, head_CD, bias_C).float()
        p_MC[part] = finish_logits(logits, target.spec).softmax(-1)
    return p_MC
