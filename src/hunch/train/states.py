"""What the target thinks of a batch of texts: the one pass that every recipe learns from.

Shape letters: B texts, L their padded length, T = B * L tokens in a row, D width, M positions that
teach, C columns of the draft vocabulary, K the likeliest of them, V the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.activation import rounded_once
from hunch.layers.attention import split_heads
from hunch.models.decoder import Decoder, finish_logits
from hunch.models.spec import ModelSpec
from hunch.train.attend import Dense, Packed, Split
from hunch.train.batches import Batch, put
from hunch.train.packs import Pack, PackInputs
from hunch.train.vocab import Columns

TOP = 64  # columns of an opinion that are kept


@dataclass(frozen=True, slots=True)
class TopOpinions:
    """The target's distribution at M positions, as its likeliest columns; the rest is none."""

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

    def first(self, num_columns: int) -> TopOpinions:
        """Over the most frequent columns alone."""
        if num_columns >= self.num_columns:
            return self
        is_in = self.column_MK < num_columns
        p_MK = torch.where(is_in, self.p_MK.float(), 0.0)
        p_MK = p_MK / p_MK.sum(-1, keepdim=True).clamp(min=1e-6)
        column_MK = torch.where(is_in, self.column_MK, 0)
        return TopOpinions(column_MK, p_MK.to(self.p_MK.dtype), num_columns)

    def toward(self, label_M: Tensor, share: float) -> TopOpinions:
        """The distributions with this share moved to the column `label_M` of each position."""
        if not share:
            return self
        is_own_MK = self.column_MK == label_M[:, None]
        p_MK = self.p_MK * (1 - share) + share * is_own_MK.to(self.p_MK.dtype)
        more_M1 = share * (~is_own_MK.any(-1, keepdim=True)).to(p_MK.dtype)
        column_MK = torch.cat((self.column_MK, label_M[:, None].to(self.column_MK)), dim=1)
        return TopOpinions(column_MK, torch.cat((p_MK, more_M1), dim=1), self.num_columns)

    def dense(self) -> Tensor:
        """All columns, float32."""
        p_MC = torch.zeros(len(self), self.num_columns, device=self.device)
        return p_MC.scatter_add_(1, self.column_MK.long(), self.p_MK.float())


@dataclass(slots=True)
class TargetOutputs:
    """The target's states on a batch, and its opinion where an answer's next token is decided."""

    batch: Batch
    split: Split
    hidden_TD: Tensor  # after the final norm
    features: tuple[Tensor, ...]  # the stream after each layer asked for
    row_M: Tensor  # which of the T positions teach: the token after each belongs to an answer
    p_MC: Tensor | TopOpinions  # the target's distribution there, over the columns alone
    label_M: Tensor  # the column of the token that follows in the text
    seed: int = 0  # of what is chosen by chance
    late: float = 1.0  # how far a loss that changes has gone: from 0 to 1
    known_M: Tensor | None = None  # row_M where the batch was made

    @property
    def host_M(self) -> Tensor:
        """row_M on the host; it waits for the device where nobody kept it."""
        return self.row_M.cpu() if self.known_M is None else self.known_M

    @property
    def ids_BL(self) -> Tensor:
        return self.batch.ids_BL

    def ids_after(self, ahead: int) -> Tensor:
        """The token `ahead` positions after each, T of them; past the end, the text's first."""
        return self.ids_BL.roll(-ahead, dims=1).flatten()


@torch.no_grad()
def run_target(
    target: Decoder,
    batch: Batch,
    columns: Columns,
    feature_layers: tuple[int, ...] = (),
    *,
    is_complete: bool = False,
    greedy_share: float = 0.0,
    whole: float = 0.0,
    split: Split = split_heads,
    seed: int = 0,
    late: float = 1.0,
) -> TargetOutputs:
    """One pass of the target over the texts.

    Positions whose next token has no column teach nothing and are left out, unless `is_complete`
    asks for all (to measure): their label is -1. `greedy_share` is the share of the distribution
    that is moved to an answer's own token, `whole` the share of texts whose prompts teach too.
    """
    ids_BL = batch.ids_BL
    attend = Dense(ids_BL, target.ropes, split, has_readers=bool(target.spec.kv_of))
    ids_T = ids_BL.flatten()
    pos_T = torch.arange(ids_BL.shape[1], device=ids_BL.device).repeat(len(ids_BL))
    hidden = target.read(ids_T, pos_T, attend, feature_layers)
    label_T = columns.column_V[ids_BL.roll(-1, dims=1).flatten()]
    is_answer_T = batch.is_taught_BL().flatten()
    is_taught_T = is_answer_T | _prompts_of(batch, whole, seed).flatten()
    if not is_complete:
        is_taught_T = is_taught_T & (label_T >= 0)
    row_M = is_taught_T.nonzero().squeeze(1)
    label_M = label_T[row_M]
    p_MC = _opinions(target, columns, hidden.last_TD[row_M])
    if greedy_share and not is_complete:
        share_M1 = greedy_share * is_answer_T[row_M, None].to(p_MC.dtype)
        p_MC *= 1 - share_M1
        p_MC.scatter_add_(1, label_M[:, None], share_M1)
    states = hidden.last_TD, hidden.features
    return TargetOutputs(batch, split, *states, row_M, p_MC, label_M, seed, late)


@dataclass(slots=True)
class PackRead:
    """The target's states on a pack, and its opinion where an answer's next token is decided."""

    hidden_TD: Tensor
    features: tuple[Tensor, ...]
    p_MC: Tensor


@torch.no_grad()
def read_pack(
    target: Decoder, pack: Pack, columns: Columns, feature_layers: tuple[int, ...] = ()
) -> PackRead:
    """As `run_target`, over texts without padding and with kernels of training."""
    flat = put(torch.from_numpy(pack.flat(pack.shape)), target.device)
    inputs = PackInputs(flat, pack.shape)
    with rounded_once():
        attend = Packed(inputs, target.ropes)
        hidden = target.read(inputs.ids_T, inputs.pos_T, attend, feature_layers)
    p_MC = _opinions(target, columns, hidden.last_TD.index_select(0, inputs.row_M))
    return PackRead(hidden.last_TD, hidden.features, p_MC)


def _opinions(target: Decoder, columns: Columns, hidden_MD: Tensor) -> Tensor:
    """What it says after these states."""
    bias_V = target.head.bias_N
    bias_C = None if bias_V is None else bias_V[columns.ids_C]
    return softmax_of(hidden_MD, target.head.weight_NK[columns.ids_C], target.spec, bias_C)


def _prompts_of(batch: Batch, share: float, seed: int) -> Tensor:
    """Positions of prompts in a share of the texts, drawn by the seed."""
    num_texts, length = batch.ids_BL.shape
    device = batch.ids_BL.device
    if not share:
        return torch.zeros(num_texts, length, dtype=torch.bool, device=device)
    drawn_B = torch.rand(num_texts, generator=torch.Generator().manual_seed(seed)) < share
    pos_L = torch.arange(length, device=device)
    return drawn_B.to(device)[:, None] & (pos_L < batch.prompt_len_B[:, None] - 1)


def softmax_of(
    hidden_MD: Tensor,
    head_CD: Tensor,
    spec: ModelSpec,
    bias_C: Tensor | None = None,
    num_rows: int = 8192,
) -> Tensor:
    """Probabilities in the model's precision, computed in float32 a part at a time."""
    p_MC = hidden_MD.new_empty(len(hidden_MD), len(head_CD))
    for first in range(0, len(hidden_MD), num_rows):
        part = slice(first, first + num_rows)
        logits = functional.linear(hidden_MD[part], head_CD, bias_C).float()
        p_MC[part] = finish_logits(logits, spec).softmax(-1)
    return p_MC
