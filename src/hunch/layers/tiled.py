"""Attention by a GPU's kernels: prompts, trees and captured steps, and nothing is read back.

Shape letters: T packed tokens, N heads, M KV heads, H head width, A = N + 2M heads of q, k and v
side by side, C slots of the cache, L positions of the rotary table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_attention import attention
from hunch.kernels.gpu_fused import rope_kv
from hunch.kernels.gpu_tiling import Tiling
from hunch.kernels.kv_store import KVCache
from hunch.layers.attention import Heads


class Tiled:
    """Attend over the paged cache like `Paged`; padding is told by its slot, on the device."""

    def __init__(
        self,
        attn: AttnInputs,
        kv: KVCache,
        table_LH: Tensor,
        tiling: Tiling,
        reads: AttnInputs | None = None,  # what tokens read, where that is not up to themselves
    ) -> None:
        self.attn, self.kv, self.table_LH, self.tiling = attn, kv, table_LH, tiling
        self.reads = reads or attn

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        assert self.table_LH.shape[1] == heads.head_dim, "the kernels turn whole heads"
        attn, k_CMH, v_CMH = self.attn, self.kv.k_LCMH[layer], self.kv.v_LCMH[layer]
        q_TNH = qkv_TAH.new_empty(len(qkv_TAH), heads.num_heads, heads.head_dim)
        where = (k_CMH, v_CMH, attn.pos_T, attn.slot_T, self.table_LH)
        rope_kv(qkv_TAH.flatten(1), q_TNH.flatten(1), *where)
        out_TNH = torch.empty_like(q_TNH)
        attention(
            q_TNH, k_CMH, v_CMH, self.reads, heads.scale, out_TNH,
            window=heads.window, cap=heads.cap, sinks_N=sinks_N, tiling=self.tiling,
        )  # fmt: skip
        return out_TNH

    def keep(self, k_TMH: Tensor, v_TMH: Tensor, layer: int) -> None:
        """Turn keys and write them, and their values, for tokens that read nothing."""
        k_CMH, v_CMH = self.kv.k_LCMH[layer], self.kv.v_LCMH[layer]
        kv_TK = torch.cat((k_TMH, v_TMH), dim=1).flatten(1)
        no_queries = kv_TK.new_empty(len(kv_TK), 0)
        where = (k_CMH, v_CMH, self.attn.pos_T, self.attn.slot_T, self.table_LH)
        rope_kv(kv_TK, no_queries, *where)
