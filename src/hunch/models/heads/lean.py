"""A draft model's pass over a few tokens in as few launches as it can have.

A layer takes five, or three where attention and MLP read the same norm; `CudaDecoder`, whose order
of sums is a target's, takes seven. Weights are the model's own, not copied.

Shape letters: T packed tokens, D width, N heads' outputs, F units, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_attention import attention
from hunch.kernels.gpu_fused import RowNorm, add_norm
from hunch.kernels.gpu_lean import (
    MAX_ROWS,
    Rows,
    ToHeads,
    ToUnits,
    read_logits,
    read_stream,
    write_stream,
)
from hunch.kernels.gpu_tiling import Tiling
from hunch.kernels.kv_store import KVCache
from hunch.layers.attention import Heads
from hunch.layers.linear import Linear
from hunch.models.cuda import CudaDecoder
from hunch.models.decoder import finish_logits
from hunch.models.fused import FusedLayers
from hunch.models.fused_layer import Layer
from hunch.parallel.group import SINGLE

MAX_WIDTH = 4096  # of wider models a layer's bytes decide


@dataclass(frozen=True, slots=True)
class LeanLayer:
    """One layer's weights."""

    heads: Heads
    attn_norm_D: Tensor
    qkv_ND: Tensor
    bias_N: Tensor | None
    out_DN: Tensor
    mlp_norm_D: Tensor | None  # None: the MLP reads attention's norm
    up_2FD: Tensor
    down_DF: Tensor
    activation: str
    sinks_N: Tensor | None
    number: int  # of the cache's layer

    @staticmethod
    def of(layer: Layer) -> LeanLayer | None:
        """None: it has what is not known here."""
        qkv, out, up, down = map(_plain, (layer.qkv, layer.out, layer.gate_up, layer.down))
        attn_norm_D, mlp_norm_D = map(_weight, (layer.attn_norm, layer.mlp_norm))
        has_norms = (layer.mlp_norm is None) if layer.is_parallel else mlp_norm_D is not None
        others = (
            layer.experts, layer.latent, layer.recurrent, layer.attn_gate, layer.inputs,
            layer.head_norms, layer.attn_out_norm, layer.mlp_out_norm, layer.beside,
        )  # fmt: skip
        is_usual = layer.is_gated and not (layer.is_post_norm or layer.is_half)
        is_usual = is_usual and all(each is None for each in others) and has_norms
        is_usual = is_usual and layer.residual_scale == layer.stream_scale == 1.0
        if not is_usual or layer.heads is None or layer.heads.is_reader:
            return None
        if qkv is None or out is None or up is None or down is None or attn_norm_D is None:
            return None
        if not out[1] is up[1] is down[1] is None:
            return None
        return LeanLayer(
            heads=layer.heads,
            attn_norm_D=attn_norm_D,
            qkv_ND=qkv[0],
            bias_N=qkv[1],
            out_DN=out[0],
            mlp_norm_D=mlp_norm_D,
            up_2FD=up[0],
            down_DF=down[0],
            activation=layer.activation,
            sinks_N=layer.sinks_N,
            number=layer.number,
        )


class LeanDraft:
    """Scores after a pass over at most `MAX_ROWS` tokens."""

    def __init__(
        self, model: CudaDecoder, layers: list[LeanLayer], norm_D: Tensor, head_CD: Tensor
    ) -> None:
        self.model, self.layers, self.eps = model, layers, model.spec.norm_eps
        self.table_LH = model.fused.tables[0]
        self.head_CD, self.bias_C = head_CD, model.decoder.head.bias_N
        # What the next product of the stream norms by, after each layer.
        self.norms = [*(layer.attn_norm_D for layer in layers[1:]), norm_D]

    @staticmethod
    def of(model: CudaDecoder, kv: KVCache) -> LeanDraft | None:
        """None: a part of the model is not known here."""
        fused = vars(model).get("fused")  # what stands before a model has no layers of its own
        if not isinstance(fused, FusedLayers) or kv.scales is not None:
            return None
        decoder, head_CD = model.decoder, model.decoder.head.weight
        is_known = decoder.group is SINGLE and decoder.embed_scale == 1.0
        is_known = is_known and model.positions_LD is None and decoder.inputs is None
        is_known = is_known and len(fused.tables) == 1 and list(fused.tempers) == [None]
        is_known = is_known and model.spec.width <= MAX_WIDTH
        found, norm_D = [LeanLayer.of(layer) for layer in model.layers], _weight(model.final_norm)
        layers = [layer for layer in found if layer is not None]
        if not is_known or len(layers) < len(found):
            return None
        if norm_D is None or not isinstance(head_CD, Tensor):
            return None
        return LeanDraft(model, layers, norm_D, head_CD)

    def fits(self, num_tokens: int) -> bool:
        return num_tokens <= MAX_ROWS

    def scores(self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, every: int = 1) -> Tensor:
        """Scores of all columns after every so many tokens; writes each token's KV."""
        model, tiling = self.model, self.model.tiler.of(attn)
        x_TD = model.embedding_VD.new_empty(len(ids_T), model.spec.width)
        rows = Rows(x_TD.new_empty(x_TD.shape), None)
        first_D = self.layers[0].attn_norm_D
        add_norm(model.embedding_VD, first_D, self.eps, rows.scaled_TD, sum_TD=x_TD, index_T=ids_T)
        for layer, norm_D in zip(self.layers, self.norms, strict=True):
            x_TD, rows = self._run(layer, x_TD, rows, attn, kv, tiling, norm_D)
        if every > 1:
            scaled_TD, squares_IT = rows
            assert squares_IT is not None
            rows = Rows(scaled_TD[every - 1 :: every], squares_IT[:, every - 1 :: every])
        return finish_logits(read_logits(rows, self.eps, self.head_CD, self.bias_C), model.spec)

    def _run(
        self,
        layer: LeanLayer,
        x_TD: Tensor,
        rows: Rows,
        attn: AttnInputs,
        kv: KVCache,
        tiling: Tiling,
        norm_D: Tensor,
    ) -> tuple[Tensor, Rows]:
        heads, (k_CMH, v_CMH) = layer.heads, kv.layer(layer.number)
        q_TN = x_TD.new_empty(len(x_TD), heads.num_heads * heads.head_dim)
        y_TF = x_TD.new_empty(len(x_TD), layer.down_DF.shape[1])
        where = (q_TN, k_CMH, v_CMH, attn.pos_T, attn.slot_T, self.table_LH)
        to_heads = ToHeads(layer.qkv_ND, layer.bias_N, *where)
        to_units = ToUnits(layer.up_2FD, y_TF, layer.activation)
        read_stream(rows, self.eps, to_heads, to_units if layer.mlp_norm_D is None else None)
        q_TNH = q_TN.view(-1, heads.num_heads, heads.head_dim)
        out_TNH = q_TNH.new_empty(q_TNH.shape)
        attention(
            q_TNH, k_CMH, v_CMH, attn, heads.scale, out_TNH, window=heads.window, cap=heads.cap,
            sinks_N=layer.sinks_N, tiling=tiling,
        )  # fmt: skip
        attended, added = (out_TNH.flatten(1), layer.out_DN), (y_TF, layer.down_DF)
        if layer.mlp_norm_D is None:
            return write_stream(x_TD, attended, added, norm_D)
        x_TD, rows = write_stream(x_TD, attended, None, layer.mlp_norm_D)
        read_stream(rows, self.eps, None, to_units)
        return write_stream(x_TD, added, None, norm_D)


def _plain(linear: Linear | None) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias, if they are there and in plain numbers."""
    if linear is None or not isinstance(linear.weight, Tensor):
        return None
    return linear.weight, linear.bias_N


def _weight(norm: RowNorm | None) -> Tensor | None:
    """A norm by root mean square alone; None: there is none, or another."""
    is_plain = norm is not None and norm.bias_D is None and not norm.is_centred
    return norm.weight_D if norm is not None and is_plain else None
