"""What the target thinks of a batch of texts: the one pass that every recipe learns from.

Shape letters: B texts, L their padded length, T = B * L tokens in a row, D width, M positions that
teach, C columns of the draft vocabulary, K the likeliest of them, V the target's; N heads, M KV
heads, H head width, A all heads side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hunch.kernels.attention import first_seen
from hunch.kernels.recurrence import Recurrence, recur_texts
from hunch.kernels.rope import Rotation, rope
from hunch.layers.attention import Heads, split_heads
from hunch.layers.latent import turn_tails
from hunch.layers.rope import Rope
from hunch.models.decoder import Decoder, finish_logits
from hunch.models.spec import ModelSpec
from hunch.train.batches import Batch
from hunch.train.vocab import Columns

TOP = 64  # columns of an opinion that are kept

Split = Callable[[Tensor, Heads, Rotation | None], tuple[Tensor, Tensor, Tensor]]


class Dense:
    """Texts side by side, each token reading its own text up to itself.

    Texts are padded at the end, where nothing looks.
    """

    def __init__(
        self,
        ids_BL: Tensor,
        ropes: Sequence[Rope],
        split: Split = split_heads,
        *,
        has_readers: bool = False,  # layers that read the keys and values of others
    ) -> None:
        self.shape = ids_BL.shape
        self.split, self.has_readers = split, has_readers
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values, by layer
        pos_T = torch.arange(self.shape[1], device=ids_BL.device).repeat(self.shape[0])
        self.rotations: list[Rotation | None] = [rope(pos_T) for rope in ropes]
        self.rotations = self.rotations or [None]

    def heads(self, qkv_TAH: Tensor, heads: Heads) -> list[Tensor]:
        """q, k and v as attention takes them: text, head, position, width."""
        rotation = self.rotations[heads.rope]
        if rotation is not None and rotation.cos_T1H.shape[-1] < heads.head_dim:
            qkv_TAH, rotation = turn_tails(qkv_TAH, heads, rotation), None
        parts = self.split(qkv_TAH, heads, rotation)
        return [part.view(*self.shape, *part.shape[1:]).transpose(1, 2) for part in parts]

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        if heads.is_reader:
            rotation = self.rotations[heads.rope]
            if rotation is not None:
                qkv_TAH = rope(qkv_TAH, rotation.cos_T1H, rotation.sin_T1H)
            q = qkv_TAH.view(*self.shape, *qkv_TAH.shape[1:]).transpose(1, 2)
            k, v = self.kept[layer]
        else:
            q, k, v = self.heads(qkv_TAH, heads)
        if self.has_readers:
            self.kept[layer] = k, v
        if heads.cap or sinks_N is not None or heads.alibi_NL is not None:
            return _attend_plainly(q, k, v, heads, sinks_N).transpose(1, 2).flatten(0, 1)
        mask_LL = None
        if heads.window is not None and abs(heads.window) < self.shape[1]:
            mask_LL = _seen(self.shape[1], heads.window, q.device)
        out = functional.scaled_dot_product_attention(
            q, k, v, mask_LL, is_causal=mask_LL is None, scale=heads.scale, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(0, 1)

    def recur(self, inputs_TI: Tensor, shape: Recurrence, weights: Any, layer: int) -> Tensor:
        """What recurrent layers remember of each text by then."""
        return recur_texts(inputs_TI.view(*self.shape, -1), shape, weights).flatten(0, 1)


def _seen(length: int, window: int | None, device: torch.device) -> Tensor:
    """Which positions each of a text's tokens sees, LL."""
    pos_L = torch.arange(length, device=device)
    first_L: Tensor = first_seen(pos_L, window)
    return (pos_L <= pos_L[:, None]) & (pos_L >= first_L[:, None])


def _attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, heads: Heads, sinks_N: Tensor | None
) -> Tensor:
    """Attention whose scores are capped, fall with the distance, or compete with a sink's.

    No kernel of torch has these.
    """
    group, length = heads.num_heads // heads.num_kv_heads, q.shape[2]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)).float() * heads.scale
    if heads.cap:
        scores = heads.cap * torch.tanh(scores / heads.cap)
    if heads.alibi_NL is not None:
        by_key_NL = heads.alibi_NL[:, :length]
        scores = scores + (by_key_NL[:, None] - by_key_NL[:, :, None])
    scores = scores.masked_fill(~_seen(length, heads.window, q.device), -torch.inf)
    if sinks_N is not None:
        sink = sinks_N.float()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sink), dim=3)
    return scores.softmax(-1)[..., :length].to(v.dtype) @ v


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
    head_CD = target.head.weight_NK[columns.ids_C]
    bias_V = target.head.bias_N
    bias_C = None if bias_V is None else bias_V[columns.ids_C]
    p_MC = softmax_of(hidden.last_TD[row_M], head_CD, target.spec, bias_C)
    if greedy_share and not is_complete:
        share_M1 = greedy_share * is_answer_T[row_M, None].to(p_MC.dtype)
        p_MC *= 1 - share_M1
        p_MC.scatter_add_(1, label_M[:, None], share_M1)
    states = hidden.last_TD, hidden.features
    return TargetOutputs(batch, split, *states, row_M, p_MC, label_M, seed, late)


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
