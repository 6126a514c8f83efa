"""Self-attention: project, let the caller attend, project back.

Shape letters: T packed tokens, D width (E: width of the input, where it differs), N heads, M KV
heads, H head width, A = N + 2M heads of q, k and v side by side, B = N + M of q and k, L positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hunch.kernels.activation import sigmoid
from hunch.kernels.attention import AttnInputs, attention, attention_by_token, live_tokens
from hunch.kernels.kv_store import KVCache, Scales, kv_store
from hunch.kernels.native_tensors import attend, can_attend
from hunch.kernels.recur import recur
from hunch.kernels.recurrence import Recurrence
from hunch.kernels.rope import Rotation, rope
from hunch.layers.linear import Linear
from hunch.layers.norm import HeadNorm, RMSNorm
from hunch.layers.part import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """The heads of one layer, as far as this device holds them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # what a token sees; see kernels.attention.first_seen
    cap: float = 0.0  # scores s become cap * tanh(s / cap); 0: as they are
    rope: int = 0  # which of the network's rotary tables turns them
    is_reader: bool = False  # there are queries alone: an earlier layer's keys and values are read
    clip: float = 0.0  # q, k and v lie between -clip and clip; 0: as they are
    late_H: Tensor | None = None  # queries are multiplied with it after they were turned
    alibi_NL: Tensor | None = None  # added to scores by the key's position


@dataclass(frozen=True, kw_only=True, slots=True)
class Alibi:
    """Scores fall with the distance of tokens, by another slope for each head."""

    slopes: tuple[float, ...]
    is_rounded: bool = False  # to bfloat16, by position, and then scaled as scores are

    def table(self, heads: slice, scale: float, max_len: int) -> Tensor:
        """What is added to scores, by head and position of the key, float32."""
        slopes_N1 = torch.tensor(self.slopes[heads], dtype=torch.float64)[:, None]
        positions_L = torch.arange(max_len)
        if self.is_rounded:
            return (slopes_N1.bfloat16() * positions_L).float() * scale
        return (slopes_N1 * positions_L).float()


class Attend(Protocol):
    """How tokens see each other: over the paged cache when serving, over a batch when training."""

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        """Turn q and k by their positions and return what the tokens read, TNH.

        A head's sink is one more score in its softmax, whose value is zero.
        """


# The step's tokens, then scale, window, cap, sinks and ALiBi of a layer's heads.
Where = tuple[AttnInputs, float, int | None, float, Tensor | None, Tensor | None]


class Paged:
    """Attend over the paged cache; the step's keys and values are written first."""

    def __init__(self, attn: AttnInputs, kv: KVCache, *rotations: Rotation | None) -> None:
        self.attn = attn
        self.rotations = rotations or (None,)  # None: positions are not in the heads
        self.live_T = live_tokens(attn)
        self.slot_T = attn.slot_T if self.live_T is None else attn.slot_T[self.live_T]
        # One unbind per step is cheaper than two selects per layer.
        self.kv = kv.layers()
        self.scales_of = kv.scales_of
        self.states = kv.states

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        rotation, (k_CMH, v_CMH) = self.rotations[heads.rope], self.kv[layer]
        scales = self.scales_of(layer)
        where = (self.attn, heads.scale, heads.window, heads.cap, sinks_N, heads.alibi_NL)
        if heads.is_reader:
            q_TNH = qkv_TAH
            if rotation is not None:
                q_TNH = rope(q_TNH, rotation.cos_T1H, rotation.sin_T1H)
            return self.read(q_TNH, k_CMH, v_CMH, where, scales)
        q_TNH, k_TMH, v_TMH = split_heads(qkv_TAH, heads, rotation)
        if self.live_T is not None:
            k_TMH, v_TMH = k_TMH[self.live_T], v_TMH[self.live_T]
        kv_store(k_TMH, v_TMH, k_CMH, v_CMH, self.slot_T, scales)
        return self.read(q_TNH, k_CMH, v_CMH, where, scales)

    def read(
        self, q_TNH: Tensor, k_CMH: Tensor, v_CMH: Tensor, where: Where, scales: Scales | None
    ) -> Tensor:
        if where[-1] is not None:  # by token alone is known which position a key has
            return attention_by_token(q_TNH, k_CMH, v_CMH, *where, scales)
        return attention(q_TNH, k_CMH, v_CMH, *where[:-1], scales)

    def recur(self, inputs_TI: Tensor, shape: Recurrence, weights: Any, layer: int) -> Tensor:
        """What tokens read of the states their rows have by then; see layers/recurrent.py."""
        assert self.states is not None
        return recur(inputs_TI, shape, weights, self.states, layer, self.attn)


class ExactPaged(Paged):
    """The same for a target: what a token reads is the same bits whatever tokens are beside it."""

    def read(
        self, q_TNH: Tensor, k_CMH: Tensor, v_CMH: Tensor, where: Where, scales: Scales | None
    ) -> Tensor:
        is_cpu = q_TNH.device.type == "cpu"
        if is_cpu and can_attend(q_TNH.shape[2], has_scales=scales is not None):
            return attend(q_TNH, k_CMH, v_CMH, *where, scales).to(q_TNH.dtype)
        return attention_by_token(q_TNH, k_CMH, v_CMH, *where, scales)


def split_heads(
    qkv_TAH: Tensor, heads: Heads, rotation: Rotation | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v; q and k turned together, as one tensor costs half the calls of two."""
    num_turned = heads.num_heads + heads.num_kv_heads
    qk_TBH, v_TMH = qkv_TAH.split_with_sizes((num_turned, heads.num_kv_heads), 1)
    if rotation is not None:
        qk_TBH = rope(qk_TBH, rotation.cos_T1H, rotation.sin_T1H)
    q_TNH, k_TMH = qk_TBH.split_with_sizes((heads.num_heads, heads.num_kv_heads), 1)
    if rotation is not None and rotation.temper_T11 is not None:
        q_TNH = (q_TNH * rotation.temper_T11).to(q_TNH.dtype)
    if heads.late_H is not None:
        q_TNH = (q_TNH * heads.late_H).to(q_TNH.dtype)
    return q_TNH, k_TMH, v_TMH


@dataclass(eq=False, repr=False)
class Attention(Part):
    """q, k and v in one product; `layer` is the cache layer they are kept in."""

    qkv: Linear
    out: Linear
    heads: Heads
    layer: int
    q_norm: RMSNorm | None = None
    k_norm: RMSNorm | None = None
    v_norm: RMSNorm | None = None
    sinks_N: Tensor | None = None  # float32
    gate: Linear | None = None  # how much of what is read goes on, for each number of a head
    layer_norms: tuple[HeadNorm, HeadNorm] | None = None  # of q and k, in place of the others
    read_norm: RMSNorm | None = None  # of what all heads have read

    def __call__(self, x_TE: Tensor, attend: Attend) -> Tensor:
        heads = self.heads
        qkv_TAH = self.qkv(x_TE).view(len(x_TE), -1, heads.head_dim)
        if heads.clip:
            qkv_TAH = qkv_TAH.clamp(-heads.clip, heads.clip)
        if self.q_norm is not None:
            qkv_TAH = self._normed(qkv_TAH, self.q_norm)
        if self.layer_norms is not None:
            sizes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
            q, k, v = qkv_TAH.split_with_sizes(sizes, 1)
            qkv_TAH = torch.cat((self.layer_norms[0](q), self.layer_norms[1](k), v), dim=1)
        read_TN = attend(qkv_TAH, heads, self.layer, self.sinks_N).flatten(1)
        if self.gate is not None:
            read_TN = read_TN * sigmoid(self.gate(x_TE))
        if self.read_norm is not None:
            read_TN = self.read_norm(read_TN)
        return self.out(read_TN)

    def _normed(self, qkv_TAH: Tensor, q_norm: RMSNorm) -> Tensor:
        heads, k_norm = self.heads, self.k_norm
        if k_norm is None:
            assert heads.is_reader
            return q_norm(qkv_TAH)
        sizes = (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
        q, k, v = qkv_TAH.split_with_sizes(sizes, 1)
        if len(q_norm.weight_D) > heads.head_dim:  # over all heads at once
            q, k = (
                norm(some.flatten(1)).view_as(some) for norm, some in ((q_norm, q), (k_norm, k))
            )
            return torch.cat((q, k, v), dim=1)
        v = v if self.v_norm is None else self.v_norm(v)
        return torch.cat((q_norm(q), k_norm(k), v), dim=1)
