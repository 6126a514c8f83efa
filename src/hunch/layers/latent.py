"""Latent attention: keys and values of all heads come out of one narrow vector per token.

Shape letters: T packed tokens, D width, N heads, P width of a head's part without a position, R
width of the part that is turned, C width of the latent, H = C + R width of what is cached, V width
of a head's values, A = N + 2 heads of q, k and v side by side.
Paper: arXiv 2405.04434, section 2.1. The cache holds the latent, not the heads: the matrices that
would expand it are multiplied into the queries and into what was read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.kernels.linear import linear, linear_in_tiles
from hunch.kernels.rope import Rotation, rope
from hunch.layers.attention import Attend, ExactPaged, Heads, Paged
from hunch.layers.block import PlainBlock
from hunch.layers.linear import Linear
from hunch.layers.norm import RMSNorm
from hunch.layers.part import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentShape:
    """The sizes of latent attention; the spec beside it describes what is cached."""

    flat_dim: int  # of a head's queries and keys, without a position
    rope_dim: int  # the part that is turned
    value_dim: int
    latent_dim: int
    q_latent_dim: int | None  # None: queries come from one matrix
    scale: float
    is_interleaved: bool  # pairs that turn together lie side by side in the file


class TailPaged(Paged):
    """Paged attention whose positions turn the end of q and k alone; keys serve as values."""

    def __init__(self, attn: AttnInputs, kv: KVCache, rotation: Rotation) -> None:
        super().__init__(attn, kv, None)
        self.tail = rotation

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        return super().__call__(turn_tails(qkv_TAH, heads, self.tail), heads, layer, sinks_N)


def turn_tails(qkv_TAH: Tensor, heads: Heads, rotation: Rotation) -> Tensor:
    """q and k with their ends turned, in place; v becomes k."""
    size, num_turned = rotation.cos_T1H.shape[-1], heads.num_heads + heads.num_kv_heads
    tail_TBR = qkv_TAH[:, :num_turned, -size:]
    qkv_TAH[:, :num_turned, -size:] = rope(tail_TBR, rotation.cos_T1H, rotation.sin_T1H)
    qkv_TAH[:, num_turned:] = qkv_TAH[:, heads.num_heads : num_turned]
    return qkv_TAH


class ExactTailPaged(TailPaged, ExactPaged):
    """The same for a target: what a token reads is the same bits whatever tokens are beside it."""


class HeadLinear(Linear):
    """A product per head, [N, outputs, inputs], kept as one matrix of all heads' outputs."""

    is_exact = False  # a row's bits are the same whatever rows are beside it

    def by_head(self, x_TNI: Tensor, *, is_turned: bool = False) -> Tensor:
        """TNO. `is_turned`: the matrices are stored [inputs, outputs]."""
        weight_NAB = self.weight_NK.view(x_TNI.shape[1], -1, self.weight_NK.shape[1])
        weight_NOI = weight_NAB.transpose(1, 2) if is_turned else weight_NAB
        if not self.is_exact:
            return torch.einsum("tni,noi->tno", x_TNI, weight_NOI)
        pairs = zip(x_TNI.unbind(1), weight_NOI.contiguous().unbind(0), strict=True)
        if self.num_tile_rows:
            tile = self.num_tile_rows
            parts = [linear_in_tiles(x, w, None, tile) for x, w in pairs]
        else:
            parts = [linear(x.contiguous(), w) for x, w in pairs]
        return torch.stack(parts, dim=1)


@dataclass(eq=False, repr=False)
class LatentAttention(Part):
    """All heads read the one latent, as the heads of a group read one key."""

    down: Linear  # the queries' latent where q_norm is, the latent, the key's turned part
    q: Linear  # from the queries' latent, or from the stream
    q_norm: RMSNorm | None
    kv_norm: RMSNorm
    k_up: HeadLinear  # a head's key without position from the latent
    v_up: HeadLinear  # a head's value from the latent
    out: Linear
    heads: Heads
    layer: int

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        num_rows, num_latent = self.k_up.weight_NK.shape
        num_heads = self.heads.num_heads
        num_turned = self.heads.head_dim - num_latent
        narrow = self.down(x_TD)
        sizes = (narrow.shape[1] - self.heads.head_dim, num_latent, num_turned)
        q_TQ, latent_TC, turned_TR = narrow.split_with_sizes(sizes, dim=1)
        q = self.q(x_TD if self.q_norm is None else self.q_norm(q_TQ))
        q_TNX = q.view(len(x_TD), num_heads, -1)
        num_flat = num_rows // num_heads
        latent_TC = self.kv_norm(latent_TC)
        qkv_TAH = x_TD.new_zeros(len(x_TD), num_heads + 2, self.heads.head_dim)
        qkv_TAH[:, :num_heads, :num_latent] = self.k_up.by_head(
            q_TNX[..., :num_flat], is_turned=True
        )
        qkv_TAH[:, :num_heads, num_latent:] = q_TNX[..., num_flat:]
        qkv_TAH[:, num_heads, :num_latent] = latent_TC
        qkv_TAH[:, num_heads, num_latent:] = turned_TR
        read_TNC = attend(qkv_TAH, self.heads, self.layer)[..., :num_latent]
        return self.out(self.v_up.by_head(read_TNC).flatten(1))


class LatentBlock(PlainBlock):
    """A decoder layer with latent attention."""

    attn: LatentAttention
