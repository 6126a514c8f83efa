"""A decoder's pass on a GPU: seven kernels per layer, the same bits per row for any batch.

Shape letters: T packed tokens, M rows whose logits are wanted, D width, V vocabulary, S slices of
a product, N heads, H head width.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.kernels.attention import AttnInputs, KVCache
from hunch.kernels.gpu_attention import attention
from hunch.kernels.gpu_fused import add_norm, rope_kv
from hunch.kernels.gpu_gemm import gemm, gemm_gated, gemm_parts, gemm_rope, num_parts, split_of
from hunch.kernels.gpu_tiling import Tiler
from hunch.kernels.gpu_wide import MIN_ROWS, gated, is_exact, padded, product, product_parts
from hunch.layers.attention import Heads
from hunch.layers.block import Block, PostNormBlock
from hunch.layers.linear import Linear
from hunch.layers.mlp import GatedMLP
from hunch.layers.norm import RMSNorm
from hunch.models.decoder import Decoder, Hidden

SHARED_BYTES = 320 * 2**20  # for partial results of rows whose positions programs share
MIN_WIDTH = 1024  # of models whose products of many rows are left to the vendor's library
MAX_FUSED = 16, 2048  # rows and width up to which a projection should rotate its own result

log = logging.getLogger("hunch")


@dataclass(slots=True)
class Layer:
    """One layer's weights, as the kernels take them."""

    attn_norm_D: Tensor
    qkv: Linear
    heads: Heads
    head_norms: tuple[Tensor, Tensor] | None
    out: Linear
    mlp_norm_D: Tensor
    gate_up: Linear
    down: Linear


class CudaDecoder:
    """`Decoder.forward` and `logits` with fused kernels, over the same weights."""

    kernels = "triton"  # what computes a pass, for reports

    def __init__(self, decoder: Decoder) -> None:
        check_supported(decoder)
        assert decoder.rope is not None
        self.decoder = decoder
        self.spec = decoder.spec
        self.device, self.dtype, self.kv_dtype = decoder.device, decoder.dtype, decoder.kv_dtype
        self.kv_shape, self.new_kv = decoder.kv_shape, decoder.new_kv
        self.embed, self.weight_bytes = decoder.embed, decoder.weight_bytes
        self.layers = [_layer(block) for block in decoder.layers]
        self.final_norm_D = _weight(decoder.final_norm)
        self.table_LH = decoder.rope.table_LH
        heads = decoder.heads
        self.tiler = Tiler.create(
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            decoder.spec.max_len,
            decoder.device,
            max_bytes=SHARED_BYTES,
        )
        self.workspace, self.tiling = self.tiler.workspace, self.tiler.tiling
        self.is_wide = decoder.device.type == "cuda" and self._check_wide()

    def _check_wide(self) -> bool:
        """Whether the vendor's products may serve many rows: no bias, and the same bits."""
        if self.spec.width < MIN_WIDTH:
            return False  # there, launching takes longer than computing, and ours are fewer
        layer = self.layers[0]
        plain, split = (layer.qkv, layer.gate_up), (layer.out, layer.down)
        if any(linear.bias_N is not None for linear in plain + split):
            return False
        is_same = all(is_exact(linear.weight_NK, is_split=False) for linear in plain)
        is_same = is_same and all(is_exact(linear.weight_NK, is_split=True) for linear in split)
        if not is_same:
            log.warning("cuBLAS rounds in another order here: long prompts use slower kernels")
        return is_same

    def forward(
        self,
        ids_T: Tensor,
        attn: AttnInputs,
        kv: KVCache,
        feature_layers: tuple[int, ...] = (),
    ) -> Hidden:
        """One pass: writes each token's KV and returns its hidden state."""
        eps, num_tokens = self.spec.norm_eps, len(ids_T)
        is_wide = self._is_for_many(num_tokens)
        num_rows = padded(num_tokens) if is_wide else num_tokens  # rows past T are never read
        x_TD = torch.empty(num_tokens, self.spec.width, dtype=self.dtype, device=self.device)
        h_PD = x_TD.new_empty(num_rows, self.spec.width)
        h_TD = h_PD[:num_tokens]
        table_VD = self.decoder.embedding_VD
        add_norm(table_VD, self.layers[0].attn_norm_D, eps, h_TD, sum_TD=x_TD, index_T=ids_T)
        norms = [layer.attn_norm_D for layer in self.layers[1:]] + [self.final_norm_D]
        found = {0: x_TD}
        for index, (layer, next_norm_D) in enumerate(zip(self.layers, norms, strict=True)):
            parts_STD = self._attend(h_PD, layer, index, attn, kv)
            # A stream somebody asked for is kept: the next sum goes elsewhere.
            y_TD = torch.empty_like(x_TD) if index in feature_layers else x_TD
            add_norm(x_TD, layer.mlp_norm_D, eps, h_TD, sum_TD=y_TD, parts_SVD=parts_STD)
            x_TD = y_TD
            parts_STD = self._mlp(h_PD, layer, num_tokens)
            add_norm(x_TD, next_norm_D, eps, h_TD, sum_TD=x_TD, parts_SVD=parts_STD)
            found[index + 1] = x_TD
        return Hidden(h_TD, tuple(found[index] for index in feature_layers))

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """float32 scores of every token after each given hidden state, never rounded to 16 bits."""
        weight_VD = self.decoder.head.weight_NK
        size = (len(hidden_MD), len(weight_VD))
        logits_MV = torch.empty(size, dtype=torch.float32, device=self.device)
        gemm(hidden_MD, weight_VD, logits_MV)
        return logits_MV

    def _attend(
        self, h_PD: Tensor, layer: Layer, index: int, attn: AttnInputs, kv: KVCache
    ) -> Tensor:
        """Attention's share of the stream, as slice sums."""
        heads, qkv, num_tokens = layer.heads, layer.qkv, len(attn.pos_T)
        k_CMH, v_CMH = kv.k_LCMH[index], kv.v_LCMH[index]
        width = heads.num_heads * heads.head_dim
        q_TN = h_PD.new_empty(num_tokens, width)
        where = (q_TN, k_CMH, v_CMH, attn.pos_T, attn.slot_T, self.table_LH)
        is_wide = self._is_for_many(num_tokens)
        is_small = num_tokens <= MAX_FUSED[0] and h_PD.shape[1] < MAX_FUSED[1]
        if layer.head_norms is None and is_small:
            gemm_rope(h_PD, qkv.weight_NK, *where, qkv.bias_N)
        else:
            qkv_PK = h_PD.new_empty(len(h_PD), len(qkv.weight_NK))
            if is_wide:
                product(h_PD, qkv.weight_NK, qkv_PK)
            else:
                gemm(h_PD, qkv.weight_NK, qkv_PK, qkv.bias_N)
            rope_kv(qkv_PK[:num_tokens], *where, layer.head_norms, self.spec.norm_eps)
        out_PN = h_PD.new_empty(len(h_PD), width)
        q_TNH = q_TN.view(-1, heads.num_heads, heads.head_dim)
        out_TNH = out_PN[:num_tokens].view_as(q_TNH)
        tiling = self.tiler.of(attn)
        attention(
            q_TNH, k_CMH, v_CMH, attn, heads.scale, out_TNH, window=heads.window, tiling=tiling
        )
        return self._parts(out_PN, layer.out, num_tokens)

    def _is_for_many(self, num_tokens: int) -> bool:
        return self.is_wide and num_tokens >= MIN_ROWS

    def _mlp(self, h_PD: Tensor, layer: Layer, num_tokens: int) -> Tensor:
        """The MLP's share of the stream, as slice sums."""
        up = layer.gate_up
        y_PF = h_PD.new_empty(len(h_PD), len(up.weight_NK) // 2)
        if self._is_for_many(num_tokens):
            both_P2F = h_PD.new_empty(len(h_PD), len(up.weight_NK))
            product(h_PD, up.weight_NK, both_P2F)
            gated(both_P2F, y_PF, num_tokens)
        else:
            gemm_gated(h_PD, up.weight_NK, y_PF, up.bias_N)
        return self._parts(y_PF, layer.down, num_tokens)

    def _parts(self, x_PK: Tensor, linear: Linear, num_tokens: int) -> Tensor:
        num_outputs, k = linear.weight_NK.shape
        is_wide = self._is_for_many(num_tokens)
        count = split_of(num_outputs, k) if is_wide else num_parts(len(x_PK), num_outputs, k)
        size = (count, len(x_PK), num_outputs)
        parts_SPD = torch.empty(size, dtype=torch.float32, device=self.device)
        if is_wide:
            product_parts(x_PK, linear.weight_NK, parts_SPD)
        else:
            gemm_parts(x_PK, linear.weight_NK, parts_SPD, linear.bias_N)
        return parts_SPD


def check_supported(decoder: Decoder) -> None:
    """Raise for what the fused kernels do not compute."""
    spec = decoder.spec
    problems = {
        f"norm={spec.norm}": spec.norm != "rms" or not spec.has_final_norm,
        "norms after the residual sums": any(isinstance(b, PostNormBlock) for b in decoder.layers),
        "an MLP without a gate": not spec.is_gated,
        f"activation {spec.activation}": spec.activation != "silu",
        "learned positions": spec.rope is None,
        "a projected embedding": bool(spec.embed_width),
        f"{decoder.dtype}": decoder.dtype not in (torch.bfloat16, torch.float16),
        "tensor parallelism": decoder.group.size > 1,
    }
    found = [name for name, is_there in problems.items() if is_there]
    if found:
        raise UnsupportedModelError(f"the GPU's fused kernels do not know {', '.join(found)}")


def _layer(block: Block) -> Layer:
    attn, mlp = block.attn, block.mlp
    assert isinstance(mlp, GatedMLP)
    head_norms = None
    if attn.q_norm is not None and attn.k_norm is not None:
        head_norms = (attn.q_norm.weight_D, attn.k_norm.weight_D)
    return Layer(
        attn_norm_D=_weight(block.attn_norm),
        qkv=attn.qkv,
        heads=attn.heads,
        head_norms=head_norms,
        out=attn.out,
        mlp_norm_D=_weight(block.mlp_norm),
        gate_up=mlp.gate_up,
        down=mlp.down,
    )


def _weight(norm: object) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return norm.weight_D
