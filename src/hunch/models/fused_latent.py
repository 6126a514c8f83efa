"""A layer's latent attention by a GPU's kernels.

Shape letters: see kernels/gpu_latent.py; P rows padded, M the one KV head of the cache.
"""

from __future__ import annotations

from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_attention import attention
from hunch.kernels.gpu_latent import heads_product, narrow
from hunch.kernels.gpu_tiling import Tiling
from hunch.layers.latent import LatentAttention


class FusedLatent:
    """`LatentAttention` over the same weights; the matrices of keys are transposed once, here."""

    def __init__(self, attn: LatentAttention) -> None:
        self.down, self.q, self.heads = attn.down, attn.q, attn.heads
        num_heads, latent = attn.heads.num_heads, attn.k_up.weight_NK.shape[1]
        k_up = attn.k_up.weight_NK.view(num_heads, -1, latent)
        self.k_up_NCP = k_up.transpose(1, 2).contiguous()
        self.v_up_NVC = attn.v_up.weight_NK.view(num_heads, -1, latent)
        norm = attn.q_norm
        self.q_norm = None if norm is None else (norm.weight_D, norm.eps)
        self.kv_norm = attn.kv_norm.weight_D, attn.kv_norm.eps
        self.num_values = num_heads * self.v_up_NVC.shape[1]

    def narrow(
        self, down_SPY: Tensor, h_PD: Tensor, cache_CMH: Tensor, attn: AttnInputs, table_LR: Tensor
    ) -> Tensor | None:
        """Write each token's latent; returns the queries' own, normed, where they have one."""
        num_tokens = len(attn.pos_T)
        q_PQ = None
        if self.q_norm is not None:
            q_PQ = h_PD.new_empty(len(h_PD), len(self.q_norm[0]))
        narrow(
            down_SPY[:, :num_tokens], self.q_norm, self.kv_norm, q_PQ, cache_CMH[:, 0], attn.pos_T,
            attn.slot_T, table_LR, h_PD.dtype,
        )  # fmt: skip
        return q_PQ

    def read(
        self,
        q_PX: Tensor,
        cache_CMH: Tensor,
        attn: AttnInputs,
        table_LR: Tensor,
        tiling: Tiling,
        out_PN: Tensor,
    ) -> None:
        """The values that each head reads."""
        num_tokens, num_heads = len(attn.pos_T), self.heads.num_heads
        latent = self.k_up_NCP.shape[1]
        q_TNX = q_PX[:num_tokens].view(num_tokens, num_heads, -1)
        q_TNH = q_PX.new_empty(num_tokens, num_heads, self.heads.head_dim)
        heads_product(q_TNX, self.k_up_NCP, q_TNH, attn.pos_T, table_LR)
        read_TNC = q_PX.new_empty(num_tokens, num_heads, latent)
        attention(q_TNH, cache_CMH, cache_CMH, attn, self.heads.scale, read_TNC, tiling=tiling)
        out_TNV = out_PN[:num_tokens].view(num_tokens, num_heads, -1)
        heads_product(read_TNC, self.v_up_NVC, out_TNV)
