"""A decoder's pass on a GPU: seven kernels per layer, the same bits per row for any batch.

Shape letters: T packed tokens, M rows whose logits are wanted, D width, V vocabulary, S slices of
a product, N heads, H head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.kernels.attention import AttnInputs, KVCache
from hunch.kernels.gpu_attention import Tiling, Workspace, attention, programs_for, tiles_of
from hunch.kernels.gpu_fused import add_norm, rope_kv
from hunch.kernels.gpu_gemm import gemm, gemm_gated, gemm_parts, gemm_rope, num_parts
from hunch.layers.block import Block, PostNormBlock
from hunch.layers.mlp import GatedMLP
from hunch.layers.norm import RMSNorm
from hunch.models.decoder import Decoder, Hidden

SHARED_TOKENS = 32  # up to so many packed tokens, programs share a row's positions


class CudaDecoder:
    """`Decoder.forward` and `logits` with fused kernels, over the same weights."""

    def __init__(self, decoder: Decoder) -> None:
        check_supported(decoder)
        self.decoder = decoder
        self.spec = decoder.spec
        self.device, self.dtype, self.kv_dtype = decoder.device, decoder.dtype, decoder.kv_dtype
        self.kv_shape, self.new_kv = decoder.kv_shape, decoder.new_kv
        heads = decoder.heads
        self.workspace = Workspace.create(
            SHARED_TOKENS, heads.num_heads, heads.head_dim, decoder.spec.max_len, decoder.device
        )

    def tiling(self, attn: AttnInputs, num_tiles: int = 0) -> Tiling:
        """How attention shares out a step of these spans; all tokens alone where there are none."""
        num_tokens, num_kv_heads = len(attn.pos_T), self.decoder.heads.num_kv_heads
        group = self.decoder.heads.num_heads // num_kv_heads
        longest = max((span.last - span.first for span in attn.spans), default=1)
        if longest == 1:
            programs = programs_for(num_tokens, num_kv_heads, self.spec.max_len)
            return Tiling(None, 1, programs if num_tokens <= SHARED_TOKENS else 1, self.workspace)
        block = 4 if longest <= 16 else 64 // _next_power_of_2(group)
        tiles = tiles_of(attn.spans, block, num_tiles).to(attn.pos_T.device)
        programs = programs_for(len(tiles), num_kv_heads, self.spec.max_len)
        if num_tokens > SHARED_TOKENS:
            programs = 1
        return Tiling(tiles, block, programs, self.workspace)

    def forward(
        self,
        ids_T: Tensor,
        attn: AttnInputs,
        kv: KVCache,
        feature_layers: tuple[int, ...] = (),
    ) -> Hidden:
        """One pass: writes each token's KV and returns its hidden state."""
        if "tiling" not in attn.memo:
            attn.memo["tiling"] = self.tiling(attn)
        layers = self.decoder.layers
        x_TD = self._stream(len(ids_T))
        h_TD = torch.empty_like(x_TD)
        first, final = layers[0].attn_norm, self.decoder.final_norm
        add_norm(
            self.decoder.embedding_VD, _weight(first), first.eps, h_TD, sum_TD=x_TD, index_T=ids_T
        )
        found = {0: x_TD}
        for layer, block in enumerate(layers):
            parts = self._attend(h_TD, block, layer, attn, kv)
            # A layer whose stream somebody asked for keeps it: the next sum goes elsewhere.
            next_TD = torch.empty_like(x_TD) if layer in feature_layers else x_TD
            norm = block.mlp_norm
            add_norm(x_TD, _weight(norm), norm.eps, h_TD, sum_TD=next_TD, parts_SVD=parts)
            x_TD = next_TD
            parts = self._mlp(h_TD, block)
            norm = layers[layer + 1].attn_norm if layer + 1 < len(layers) else final
            add_norm(x_TD, _weight(norm), norm.eps, h_TD, sum_TD=x_TD, parts_SVD=parts)
            if layer + 1 in feature_layers:
                found[layer + 1] = x_TD
        return Hidden(h_TD, tuple(found[layer] for layer in feature_layers))

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """float32 scores of every token after each given hidden state, never rounded to 16 bits."""
        weight_VD = self.decoder.head.weight_NK
        logits_MV = hidden_MD.new_empty(len(hidden_MD), len(weight_VD), dtype=torch.float32)
        gemm(hidden_MD, weight_VD, logits_MV)
        return logits_MV

    def _stream(self, num_tokens: int) -> Tensor:
        size = (num_tokens, self.spec.width)
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def _attend(
        self, h_TD: Tensor, block: Block, layer: int, attn: AttnInputs, kv: KVCache
    ) -> Tensor:
        """Attention's share of the stream, as slice sums."""
        heads, layer_attn = block.attn.heads, block.attn
        qkv, table_LH = layer_attn.qkv, self.decoder.rope.table_LH
        k_CMH, v_CMH = kv.k_LCMH[layer], kv.v_LCMH[layer]
        q_TN = h_TD.new_empty(len(h_TD), heads.num_heads * heads.head_dim)
        if layer_attn.q_norm is None:
            gemm_rope(
                h_TD, qkv.weight_NK, q_TN, k_CMH, v_CMH, attn.pos_T, attn.slot_T, table_LH,
                qkv.bias_N,
            )  # fmt: skip
        else:
            qkv_TK = h_TD.new_empty(len(h_TD), len(qkv.weight_NK))
            gemm(h_TD, qkv.weight_NK, qkv_TK, qkv.bias_N)
            norms = (layer_attn.q_norm.weight_D, layer_attn.k_norm.weight_D)
            rope_kv(
                qkv_TK, q_TN, k_CMH, v_CMH, attn.pos_T, attn.slot_T, table_LH, norms,
                layer_attn.q_norm.eps,
            )  # fmt: skip
        q_TNH = q_TN.view(-1, heads.num_heads, heads.head_dim)
        out_TNH = torch.empty_like(q_TNH)
        attention(
            q_TNH, k_CMH, v_CMH, attn, heads.scale, out_TNH, window=heads.window,
            tiling=attn.memo["tiling"],
        )  # fmt: skip
        out = layer_attn.out
        return self._parts(out_TNH.flatten(1), out.weight_NK, out.bias_N)

    def _mlp(self, h_TD: Tensor, block: Block) -> Tensor:
        """The MLP's share of the stream, as slice sums."""
        up, down = block.mlp.gate_up, block.mlp.down
        y_TF = h_TD.new_empty(len(h_TD), len(up.weight_NK) // 2)
        gemm_gated(h_TD, up.weight_NK, y_TF, up.bias_N)
        return self._parts(y_TF, down.weight_NK, down.bias_N)

    def _parts(self, x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
        num_slices = num_parts(len(x_TK), *weight_NK.shape)
        size = (num_slices, len(x_TK), len(weight_NK))
        parts_STD = torch.empty(size, dtype=torch.float32, device=self.device)
        gemm_parts(x_TK, weight_NK, parts_STD, bias_N)
        return parts_STD


def check_supported(decoder: Decoder) -> None:
    """Raise for what the fused kernels do not compute."""
    spec = decoder.spec
    problems = {
        f"norm={spec.norm}": spec.norm != "rms" or not spec.has_final_norm,
        "norms after the residual sums": any(isinstance(b, PostNormBlock) for b in decoder.layers),
        "an MLP without a gate": not all(isinstance(b.mlp, GatedMLP) for b in decoder.layers),
        f"activation {spec.activation}": spec.activation != "silu",
        "learned positions": spec.rope is None,
        "a projected embedding": bool(spec.embed_width),
        "float32": decoder.dtype not in (torch.bfloat16, torch.float16),
        "tensor parallelism": decoder.group.size > 1,
    }
    found = [name for name, is_there in problems.items() if is_there]
    if found:
        raise UnsupportedModelError(f"the GPU's fused kernels do not know {', '.join(found)}")


def _weight(norm: object) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return norm.weight_D


def _next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
