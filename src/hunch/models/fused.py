"""Decoder layers by a GPU's fused kernels: seven per layer, the same bits per row for any batch.

Shape letters: T packed tokens, P the same padded where a library wants it, D width, E width of the
first attention's input, S slices of a product, N heads, H head width, F inner width of the MLP,
C cache slots, M KV heads, L positions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, KVCache
from hunch.kernels.gpu_attention import Tiling, attention
from hunch.kernels.gpu_fused import add_norm, rope_kv
from hunch.kernels.gpu_gemm import gemm, gemm_gated, gemm_parts, gemm_rope, num_parts
from hunch.kernels.gpu_route import Timing
from hunch.kernels.gpu_wide import MIN_ROWS, gated, padded, product, product_parts
from hunch.kernels.slices import split_of
from hunch.layers.attention import Heads
from hunch.layers.block import Block, PostNormBlock
from hunch.layers.experts import Experts
from hunch.layers.linear import Linear
from hunch.layers.mlp import GatedMLP
from hunch.layers.norm import RMSNorm
from hunch.models.fused_experts import FusedExperts
from hunch.models.spec import ModelSpec

MIN_WIDTH = 1024  # of models whose products of many rows are left to the vendor's library
MAX_FUSED = 16, 2048  # rows and width up to which a projection should rotate its own result


@dataclass(slots=True)
class Layer:
    """One layer's weights, as the kernels take them."""

    attn_norm_D: Tensor | None  # None: the first layer's input comes as it is
    qkv: Linear
    heads: Heads
    head_norms: tuple[Tensor, Tensor] | None
    out: Linear
    mlp_norm_D: Tensor
    gate_up: Linear | None  # None, as down: there are experts
    down: Linear | None
    number: int  # of the cache's layer
    experts: FusedExperts | None = None

    def linears(self) -> list[Linear]:
        return [x for x in (self.qkv, self.out, self.gate_up, self.down) if x is not None]


class FusedLayers:
    """Blocks over a residual stream. With `is_wide` the vendor's library has the products of many
    rows."""

    def __init__(
        self, blocks: Sequence[Block], table_LH: Tensor, eps: float, is_wide: bool = False
    ) -> None:
        self.timing = Timing(table_LH.device)
        self.layers = [_layer(block, self.timing) for block in blocks]
        assert all(layer.attn_norm_D is not None for layer in self.layers[1:])
        self.table_LH, self.eps, self.is_wide = table_LH, eps, is_wide

    def num_rows(self, num_tokens: int) -> int:
        """Rows that inputs of `run` should have; those past the tokens are never read."""
        return padded(num_tokens) if self._is_for_many(num_tokens) else num_tokens

    def run(
        self,
        x_TD: Tensor,
        input_PE: Tensor,
        attn: AttnInputs,
        kv: KVCache,
        tiling: Tiling,
        *,
        norm_D: Tensor | None,
        kept: Collection[int] = (),
    ) -> tuple[list[Tensor], Tensor | None]:
        """All layers over the stream `x_TD`, the first of which attends with `input_PE`.

        Returns the stream after 0, 1, ... layers and, where norm_D is given, the last one's norm.
        Only the last stream and the `kept` ones are sure to be whole: others are written over.
        """
        eps, (num_tokens, width) = self.eps, x_TD.shape
        h_PD = x_TD.new_empty(len(input_PE), width)
        h_TD, streams = h_PD[:num_tokens], [x_TD]
        norms = [layer.attn_norm_D for layer in self.layers[1:]] + [norm_D]
        for index, (layer, next_norm_D) in enumerate(zip(self.layers, norms, strict=True)):
            input_PE = input_PE if index == 0 else h_PD
            parts_SPD = self._attend(input_PE, layer, attn, kv, tiling)
            y_TD = torch.empty_like(x_TD) if index in kept else x_TD
            add_norm(x_TD, layer.mlp_norm_D, eps, h_TD, sum_TD=y_TD, parts_SVD=parts_SPD)
            x_TD = y_TD
            if layer.experts is not None:
                parts_SPD = layer.experts.parts(h_PD, num_tokens, attn.slot_T)
            else:
                parts_SPD = self._mlp(h_PD, layer, num_tokens)
            out_TD = None if next_norm_D is None else h_TD
            add_norm(x_TD, next_norm_D, eps, out_TD, sum_TD=x_TD, parts_SVD=parts_SPD)
            streams.append(x_TD)
        return streams, None if norm_D is None else h_TD

    def _attend(
        self, h_PE: Tensor, layer: Layer, attn: AttnInputs, kv: KVCache, tiling: Tiling
    ) -> Tensor:
        """Attention's share of the stream, as slice sums."""
        heads, qkv, num_tokens = layer.heads, layer.qkv, len(attn.pos_T)
        k_CMH, v_CMH = kv.k_LCMH[layer.number], kv.v_LCMH[layer.number]
        width = heads.num_heads * heads.head_dim
        q_TN = h_PE.new_empty(num_tokens, width)
        where = (q_TN, k_CMH, v_CMH, attn.pos_T, attn.slot_T, self.table_LH)
        is_small = num_tokens <= MAX_FUSED[0] and h_PE.shape[1] < MAX_FUSED[1]
        if layer.head_norms is None and is_small:
            gemm_rope(h_PE, qkv.weight_NK, *where, qkv.bias_N)
        else:
            qkv_PK = h_PE.new_empty(len(h_PE), len(qkv.weight_NK))
            if self._is_for_many(num_tokens):
                product(h_PE, qkv.weight_NK, qkv_PK)
            else:
                gemm(h_PE, qkv.weight_NK, qkv_PK, qkv.bias_N)
            rope_kv(qkv_PK[:num_tokens], *where, layer.head_norms, self.eps)
        out_PN = h_PE.new_empty(len(h_PE), width)
        q_TNH = q_TN.view(-1, heads.num_heads, heads.head_dim)
        out_TNH = out_PN[:num_tokens].view_as(q_TNH)
        attention(
            q_TNH, k_CMH, v_CMH, attn, heads.scale, out_TNH, window=heads.window, tiling=tiling
        )
        return self._parts(out_PN, layer.out, num_tokens)

    def _mlp(self, h_PD: Tensor, layer: Layer, num_tokens: int) -> Tensor:
        """The MLP's share of the stream, as slice sums."""
        up, down = layer.gate_up, layer.down
        assert up is not None
        assert down is not None
        y_PF = h_PD.new_empty(len(h_PD), len(up.weight_NK) // 2)
        if self._is_for_many(num_tokens):
            both_P2F = h_PD.new_empty(len(h_PD), len(up.weight_NK))
            product(h_PD, up.weight_NK, both_P2F)
            gated(both_P2F, y_PF, num_tokens)
        else:
            gemm_gated(h_PD, up.weight_NK, y_PF, up.bias_N)
        return self._parts(y_PF, down, num_tokens)

    def _parts(self, x_PK: Tensor, linear: Linear, num_tokens: int) -> Tensor:
        num_outputs, k = linear.weight_NK.shape
        is_wide = self._is_for_many(num_tokens)
        count = split_of(num_outputs, k) if is_wide else num_parts(len(x_PK), num_outputs, k)
        size = (count, len(x_PK), num_outputs)
        parts_SPD = torch.empty(size, dtype=torch.float32, device=x_PK.device)
        if is_wide:
            product_parts(x_PK, linear.weight_NK, parts_SPD)
        else:
            gemm_parts(x_PK, linear.weight_NK, parts_SPD, linear.bias_N)
        return parts_SPD

    def _is_for_many(self, num_tokens: int) -> bool:
        return self.is_wide and num_tokens >= MIN_ROWS


def float_logits(hidden_MD: Tensor, weight_VD: Tensor) -> Tensor:
    """Scores in float32, never rounded to 16 bits."""
    size = (len(hidden_MD), len(weight_VD))
    logits_MV = torch.empty(size, dtype=torch.float32, device=hidden_MD.device)
    gemm(hidden_MD, weight_VD, logits_MV)
    return logits_MV


def unknown_to_kernels(
    spec: ModelSpec, blocks: Sequence[Block], dtype: torch.dtype
) -> dict[str, bool]:
    """What the fused layers do not compute, by name, and whether it is there."""
    return {
        f"norm={spec.norm}": spec.norm != "rms",
        "norms after the residual sums": any(isinstance(b, PostNormBlock) for b in blocks),
        "an MLP without a gate": not spec.is_gated,
        f"activation {spec.activation}": spec.activation != "silu",
        "learned positions": spec.rope is None,
        "norms of the branches": spec.has_branch_norms,
        "attention beside the MLP": spec.is_parallel,
        "attention sinks": spec.has_sinks,
        "two rotary tables": bool(spec.more_ropes),
        "scales": (spec.embed_scale, spec.residual_scale, spec.logits_scale) != (1.0, 1.0, 1.0),
        "capped scores": spec.attn_cap != 0 or spec.logits_cap != 0,
        f"{dtype}": dtype not in (torch.bfloat16, torch.float16),
    }


def has_bias(layers: Sequence[Layer]) -> bool:
    return any(linear.bias_N is not None for layer in layers for linear in layer.linears())


def _layer(block: Block, timing: Timing) -> Layer:
    attn, mlp = block.attn, block.mlp
    experts = mlp if isinstance(mlp, Experts) else None
    assert experts is not None or isinstance(mlp, GatedMLP)
    head_norms = None
    if attn.q_norm is not None and attn.k_norm is not None:
        head_norms = (attn.q_norm.weight_D, attn.k_norm.weight_D)
    return Layer(
        attn_norm_D=None if block.attn_norm is None else weight_of(block.attn_norm),
        qkv=attn.qkv,
        heads=attn.heads,
        head_norms=head_norms,
        out=attn.out,
        mlp_norm_D=weight_of(block.mlp_norm),
        gate_up=mlp.gate_up if isinstance(mlp, GatedMLP) else None,
        down=mlp.down if isinstance(mlp, GatedMLP) else None,
        number=attn.layer,
        experts=None if experts is None else FusedExperts(experts, timing),
    )


def weight_of(norm: object) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return norm.weight_D
