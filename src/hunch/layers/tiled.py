"""Attention by a GPU's kernels: prompts, trees and captured steps, and nothing is read back.

Shape letters: T packed tokens, N heads, M KV heads, H head width, A = N + 2M heads of q, k and v
side by side, C slots of the cache, L positions of the rotary table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, KVCache
from hunch.kernels.gpu_attention import Tiling, attention
from hunch.kernels.gpu_fused import rope_kv
from hunch.layers.attention import Heads


class Tiled:
    """Attend over the paged cache like `Paged`; padding is told by its slot, on the device."""

    def __init__(self, attn: AttnInputs, kv: KVCache, table_LH: Tensor, tiling: Tiling) -> None:
        self.attn, self.kv, self.table_LH, self.tiling = attn, kv, table_LH, tiling

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
            q_TNH, k_CMH, v_CMH, attn, heads.scale, out_TNH,
            window=heads.window, cap=heads.cap, sinks_N=sinks_N, tiling=self.tiling,
        )  # fmt: skip
        return out_TNH
