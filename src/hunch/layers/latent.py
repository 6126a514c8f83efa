"""Latent attention: keys and values of all heads come out of one narrow vector per token.

Shape letters: T packed tokens, D width, N heads, P width of a head's part without a position, R
width of the part that is turned, C width of the latent, H = C + R width of what is cached, V width
of a head's values, A = N + 2 heads of q, k and v side by side.
Paper: arXiv 2405.04434, section 2.1. The cache holds the latent, not the heads: the matrices that
would expand it are multiplied into the queries and into what was read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, KVCache
from hunch.kernels.rope import Rotation, rope
from hunch.layers.attention import Attend, Heads, Paged
from hunch.layers.experts import Experts
from hunch.layers.linear import Linear
from hunch.layers.mlp import GatedMLP
from hunch.layers.norm import RMSNorm
from hunch.layers.part import Part


class TailPaged(Paged):
    """Paged attention whose positions turn the end of q and k alone."""

    def __init__(self, attn: AttnInputs, kv: KVCache, rotation: Rotation) -> None:
        super().__init__(attn, kv, None)
        self.tail = rotation

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        size = self.tail.cos_T1H.shape[-1]
        num_turned = heads.num_heads + heads.num_kv_heads
        tail_TBR = qkv_TAH[:, :num_turned, -size:]
        qkv_TAH[:, :num_turned, -size:] = rope(tail_TBR, self.tail.cos_T1H, self.tail.sin_T1H)
        return super().__call__(qkv_TAH, heads, layer, sinks_N)


class LatentAttention(Part):
    """All heads read the one latent, as the heads of a group read one key."""

    def __init__(
        self,
        q: list[Linear],  # one matrix, or two with q_norm between them
        q_norm: RMSNorm | None,
        kv: Linear,  # the latent, then the key's part that is turned
        kv_norm: RMSNorm,
        k_up_NPC: Tensor,  # a head's key without position from the latent
        v_up_NVC: Tensor,  # a head's value from the latent
        out: Linear,
        heads: Heads,
        layer: int,
    ) -> None:
        self.q, self.q_norm, self.kv, self.kv_norm = q, q_norm, kv, kv_norm
        self.k_up_NPC, self.v_up_NVC, self.out = k_up_NPC, v_up_NVC, out
        self.heads, self.layer = heads, layer

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        num_heads, num_flat, num_latent = self.k_up_NPC.shape
        q = self.q[0](x_TD)
        if self.q_norm is not None:
            q = self.q[1](self.q_norm(q))
        q_TNX = q.view(len(x_TD), num_heads, -1)
        latent_TC, turned_TR = self.kv(x_TD).tensor_split([num_latent], dim=1)
        latent_TC = self.kv_norm(latent_TC)
        qkv_TAH = x_TD.new_zeros(len(x_TD), num_heads + 2, self.heads.head_dim)
        qkv_TAH[:, :num_heads, :num_latent] = torch.einsum(
            "tnp,npc->tnc", q_TNX[..., :num_flat], self.k_up_NPC
        )
        qkv_TAH[:, :num_heads, num_latent:] = q_TNX[..., num_flat:]
        qkv_TAH[:, num_heads, :num_latent] = latent_TC
        qkv_TAH[:, num_heads, num_latent:] = turned_TR
        qkv_TAH[:, num_heads + 1, :num_latent] = latent_TC
        read_TNC = attend(qkv_TAH, self.heads, self.layer)[..., :num_latent]
        return self.out(torch.einsum("tnc,nvc->tnv", read_TNC, self.v_up_NVC).flatten(1))


class LatentBlock(Part):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, attn_norm: RMSNorm, attn: LatentAttention, mlp_norm: RMSNorm, mlp: GatedMLP | Experts
    ) -> None:
        self.attn_norm, self.attn, self.mlp_norm, self.mlp = attn_norm, attn, mlp_norm, mlp

    def __call__(self, x_TD: Tensor, attend: Attend) -> Tensor:
        x_TD = x_TD + self.attn(self.attn_norm(x_TD), attend)
        return x_TD + self.mlp(self.mlp_norm(x_TD))
