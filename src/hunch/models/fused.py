"""Decoder layers by a GPU's fused kernels: seven per layer, the same bits per row for any batch.

Shape letters: T packed tokens, P the same padded where products want it, D width, E width of the
first attention's input, S slices of a product, N heads, H head width, F inner width of the MLP,
C cache slots, M KV heads, L positions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from hunch.kernels.activation import KERNEL_NAMES
from hunch.kernels.attention import AttnInputs
from hunch.kernels.delta import ChannelDeltaShape, DeltaShape
from hunch.kernels.gpu_activation import activated, gated_by
from hunch.kernels.gpu_attention import attention
from hunch.kernels.gpu_fused import RowNorm, add_norm, rope_kv
from hunch.kernels.gpu_gemm import gemm, gemm_gated, gemm_parts, gemm_rope, num_parts, rows_for
from hunch.kernels.gpu_inputs import add_branches, take_inputs
from hunch.kernels.gpu_recurrence import MAX_TAPS
from hunch.kernels.gpu_route import Timing
from hunch.kernels.gpu_tiling import Tiling
from hunch.kernels.gpu_wide import MIN_ROWS, padded, product, product_parts
from hunch.kernels.kv_store import KVCache
from hunch.kernels.lightning import LightningShape
from hunch.kernels.quant import Quantised, Weight, slices_of
from hunch.kernels.selective import SelectiveShape
from hunch.layers.block import Block
from hunch.layers.inputs import InputGate
from hunch.layers.latent import LatentBlock
from hunch.layers.linear import Linear
from hunch.layers.recurrent import HalfBlock, RecurrentBlock
from hunch.models.fused_latent import FusedLatent
from hunch.models.fused_layer import Layer, layer_of
from hunch.models.fused_recurrent import FusedRecurrent
from hunch.models.spec import ModelSpec
from hunch.parallel.group import SINGLE, Exchange, Group

# From this width on, products of many rows are left to the vendor's library. Narrower models take
# longer with it, as what is fused into a product is launched separately then.
MIN_WIDTH = 3072
# The same for weights in few bits; for fewer rows, expanding them takes longer than it saves.
MIN_QUANTISED_WIDTH, MIN_QUANTISED_ROWS = 1024, 769
READS = "reads"  # in a step's memo: up to where its tokens read, if not up to themselves
EAGER_ROWS = range(2, 9)  # with small weights the next kernel should start at once
MAX_FUSED = 16, 2048  # rows and width up to which a projection should rotate its own result


class FusedLayers:
    """Blocks over a residual stream. With `is_wide` the vendor's library has the products of many
    rows."""

    def __init__(
        self,
        blocks: Sequence[Block | LatentBlock | RecurrentBlock | HalfBlock],
        tables: Sequence[Tensor],
        eps: float,
        group: Group = SINGLE,  # whose other ranks hold the rest of every layer
        tempers: Sequence[Tensor | None] = (),  # factors of queries by position, for each table
    ) -> None:
        self.group = group
        self.timing = Timing(next(blocks[0].named_tensors())[1].device)
        self.layers = [layer_of(block, self.timing) for block in blocks]
        first = self.layers[0]
        is_unnormed = first.attn_norm is None and first.mlp_norm is None
        # Branches read the stream as it is; else, and but for the first, a norm of it.
        self.is_bare = first.is_post_norm or is_unnormed
        assert self.is_bare or all(layer.attn_norm is not None for layer in self.layers[1:])
        self.tables = tables  # rotary, LH each; none: positions are not in the heads
        self.tempers = tempers or [None] * len(tables)
        self.eps, self.is_wide = eps, False
        is_small = any(isinstance(layer.out.weight, Quantised) for layer in self.layers)
        self.min_width = MIN_QUANTISED_WIDTH if is_small else MIN_WIDTH
        self.min_rows = MIN_QUANTISED_ROWS if is_small else MIN_ROWS
        self.eager_rows = EAGER_ROWS if is_small else ()

    def exchanges(self, num_tokens: int) -> list[Exchange]:
        """The exchanges of a pass over so many tokens with other ranks, in order."""
        width = self.layers[0].out.shape[0]
        padded_rows = Exchange(self.num_rows(num_tokens) * width, torch.float32)
        rows = Exchange(num_tokens * width, torch.float32)
        found: list[Exchange] = []
        for layer in self.layers:
            found.append(padded_rows)
            if layer.experts is None or layer.beside is not None:
                found.append(padded_rows)
            if layer.experts is not None:
                found.append(rows)
        return found

    def num_rows(self, num_tokens: int) -> int:
        """Rows that inputs of `run` should have; those past the tokens are never read."""
        if self._is_for_many(num_tokens):
            return padded(num_tokens)
        return rows_for(num_tokens, self.layers[0].out.weight)

    def run(
        self,
        x_TD: Tensor,
        input_PE: Tensor,
        attn: AttnInputs,
        kv: KVCache,
        tiling: Tiling,
        *,
        norm: RowNorm | Tensor | None,
        kept: Collection[int] = (),
        input_TLH: Tensor | None = None,
    ) -> tuple[list[Tensor], Tensor | None]:
        """All layers over the stream `x_TD`, the first of which attends with `input_PE`.

        `input_TLH`: the table's vectors of the tokens for each layer.

        Returns the stream after 0, 1, ... layers and, where a norm is given, the last one's norm.
        Only the last stream and the `kept` ones are valid: others are overwritten.
        """
        if self.is_bare:
            return self._run_bare(input_PE, attn, kv, tiling, norm=norm, kept=kept)
        eps, (num_tokens, width) = self.eps, x_TD.shape
        is_eager = num_tokens in self.eager_rows
        h_PD = x_TD.new_empty(len(input_PE), width)
        h_TD, streams = h_PD[:num_tokens], [x_TD]
        norms = [layer.attn_norm for layer in self.layers[1:]] + [norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, norms, strict=True)):
            input_PE = input_PE if index == 0 else h_PD
            y_TD = torch.empty_like(x_TD) if index in kept else x_TD
            if layer.is_half:
                if layer.experts is not None:
                    parts_SPD = self._answer(x_TD, input_PE, layer, attn)
                elif layer.gate_up is None:
                    parts_SPD = self._attend(input_PE, layer, attn, kv, tiling)
                else:
                    parts_SPD = self._mlp(input_PE, layer, num_tokens)
                add_norm(
                    x_TD, next_norm, eps, None if next_norm is None else h_TD, sum_TD=y_TD,
                    parts_SVD=parts_SPD, is_eager=is_eager,
                )  # fmt: skip
                x_TD = y_TD
                streams.append(x_TD)
                continue
            parts_SPD = self._attend(input_PE, layer, attn, kv, tiling)
            mlp_PD, mlp_norm = h_PD, layer.mlp_norm
            if layer.is_parallel:
                if mlp_norm is None:
                    mlp_PD = input_PE
                else:
                    add_norm(x_TD, mlp_norm, eps, h_TD, is_eager=is_eager)
                mlp_norm = None
            add_norm(
                x_TD, mlp_norm, eps, None if mlp_norm is None else h_TD, sum_TD=y_TD,
                parts_SVD=parts_SPD, branch=layer.attn_out_norm, part_scale=layer.residual_scale,
                is_eager=is_eager,
            )  # fmt: skip
            x_TD = y_TD
            parts_SPD = self._answer(x_TD, mlp_PD, layer, attn)
            branch, from_TD = layer.mlp_out_norm, x_TD
            if layer.inputs is not None:
                assert input_TLH is not None
                add_norm(x_TD, None, eps, None, sum_TD=h_TD, parts_SVD=parts_SPD, branch=branch)
                parts_SPD = self._take_inputs(h_PD, layer, layer.inputs, input_TLH[:, index])
                branch, from_TD = RowNorm(layer.inputs.norm.weight_D), h_TD
            add_norm(
                from_TD, next_norm, eps, None if next_norm is None else h_TD, sum_TD=x_TD,
                parts_SVD=parts_SPD, branch=branch, part_scale=layer.residual_scale,
                sum_scale=layer.stream_scale, is_eager=is_eager,
            )  # fmt: skip
            streams.append(x_TD)
        return streams, None if norm is None else h_TD

    def _run_bare(
        self,
        x_PD: Tensor,
        attn: AttnInputs,
        kv: KVCache,
        tiling: Tiling,
        *,
        norm: RowNorm | Tensor | None,
        kept: Collection[int],
    ) -> tuple[list[Tensor], Tensor | None]:
        """`run` for branches that read the stream itself: their output is normed before it is
        added, or the sum is normed."""
        num_tokens = len(attn.pos_T)
        streams = [x_PD[:num_tokens]]
        for index, layer in enumerate(self.layers):
            parts_SPD = self._attend(x_PD, layer, attn, kv, tiling)
            y_PD = torch.empty_like(x_PD) if index in kept else x_PD
            x_TD, y_TD = x_PD[:num_tokens], y_PD[:num_tokens]
            self._add_bare(x_TD, y_TD, parts_SPD, layer, layer.attn_norm, layer.attn_out_norm)
            parts_SPD = self._answer(y_TD, y_PD, layer, attn)
            self._add_bare(y_TD, y_TD, parts_SPD, layer, layer.mlp_norm, layer.mlp_out_norm)
            streams.append(y_TD)
            x_PD = y_PD
        if norm is None:
            return streams, None
        h_TD = torch.empty_like(streams[-1])
        add_norm(streams[-1], norm, self.eps, h_TD)
        return streams, h_TD

    def _add_bare(
        self, x_TD: Tensor, y_TD: Tensor, parts_SPD: Tensor, layer: Layer, after: RowNorm | None,
        branch: RowNorm | None,
    ) -> None:  # fmt: skip
        if layer.is_post_norm:
            add_norm(x_TD, after, self.eps, y_TD, parts_SVD=parts_SPD)
            return
        add_norm(
            x_TD, None, self.eps, None, sum_TD=y_TD, parts_SVD=parts_SPD, branch=branch,
            part_scale=layer.residual_scale,
        )  # fmt: skip

    def _attend(
        self, h_PE: Tensor, layer: Layer, attn: AttnInputs, kv: KVCache, tiling: Tiling
    ) -> Tensor:
        """Attention's share of the stream, as slice sums."""
        heads, qkv, num_tokens = layer.heads, layer.qkv, len(attn.pos_T)
        if layer.latent is not None:
            return self._attend_latent(h_PE, layer, layer.latent, attn, kv, tiling)
        if layer.recurrent is not None and qkv is None:
            return self._recur(h_PE, layer.recurrent, layer.out, attn, kv)
        assert qkv is not None
        assert heads is not None
        k_CMH, v_CMH = kv.layer(layer.number)
        width = heads.num_heads * heads.head_dim
        q_TN = h_PE.new_empty(num_tokens, width)
        table_LH = self.tables[heads.rope] if self.tables else None
        temper_L = self.tempers[heads.rope] if self.tables else None
        where, scales = (q_TN, k_CMH, v_CMH, attn.pos_T, attn.slot_T), kv.scales_of(layer.number)
        is_sliced = isinstance(qkv.weight, Quantised) and slices_of(qkv.weight) > 1
        is_small = num_tokens <= MAX_FUSED[0] and h_PE.shape[1] < MAX_FUSED[1]
        is_plain = layer.head_norms is None and scales is None and temper_L is None
        if table_LH is not None and is_small and is_plain and not is_sliced:
            gemm_rope(h_PE, qkv.weight, *where, table_LH, qkv.bias_N)
        else:
            if is_sliced:
                qkv_TK = self._parts(h_PE, qkv, num_tokens, is_split=False)[:, :num_tokens]
            else:
                qkv_TK = self.product(h_PE, qkv, num_tokens)[:num_tokens]
            rope_kv(
                qkv_TK, *where, table_LH, layer.head_norms, self.eps, scales, layer.is_v_normed,
                heads.is_reader, temper_L=temper_L, is_eager=num_tokens in self.eager_rows,
            )  # fmt: skip
        out_PN = h_PE.new_empty(len(h_PE), width)
        q_TNH = q_TN.view(-1, heads.num_heads, heads.head_dim)
        out_TNH = out_PN[:num_tokens].view_as(q_TNH)
        attention(
            q_TNH, k_CMH, v_CMH, attn.memo.get(READS, attn), heads.scale, out_TNH,
            window=heads.window, cap=heads.cap, sinks_N=layer.sinks_N, tiling=tiling,
            scales=scales,
        )  # fmt: skip
        if layer.attn_gate is not None:
            gated_by(out_PN, self.product(h_PE, layer.attn_gate, num_tokens), num_tokens)
        parts_SPD = self._parts(out_PN, layer.out, num_tokens)
        if layer.recurrent is None or layer.recurrent_out is None:
            return parts_SPD
        more_SPD = self._recur(h_PE, layer.recurrent, layer.recurrent_out, attn, kv)
        return torch.cat((parts_SPD, more_SPD))

    def _recur(
        self, h_PE: Tensor, layer: FusedRecurrent, out: Linear, attn: AttnInputs, kv: KVCache
    ) -> Tensor:
        """A recurrent layer's share of the stream, as slice sums."""
        num_tokens = len(attn.pos_T)
        y_PW = self.product(h_PE, layer.inputs, num_tokens)
        return self._parts(layer.read(y_PW, attn, kv), out, num_tokens)

    def _answer(self, x_TD: Tensor, h_PD: Tensor, layer: Layer, attn: AttnInputs) -> Tensor:
        """The share of the stream of MLP, of experts, or of both, as slice sums."""
        experts, beside, num_tokens = layer.experts, layer.beside, len(x_TD)
        if experts is not None and beside is None:
            return self.group.all_slices(experts.parts(h_PD, num_tokens, attn.slot_T))
        mlp_SPD = self._mlp(h_PD, layer, num_tokens)
        if experts is None or beside is None:
            return mlp_SPD
        read_TD, routed_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
        add_norm(x_TD, beside.norm.weight_D, self.eps, read_TD)
        add_norm(x_TD, beside.router_norm.weight_D, self.eps, routed_TD)
        answer_STD = experts.parts(read_TD, num_tokens, attn.slot_T, routed_TD)
        answer_STD = self.group.all_slices(answer_STD)
        norms = beside.mlp_out_norm.weight_D, beside.out_norm.weight_D
        return add_branches(mlp_SPD[:, :num_tokens], answer_STD, norms, self.eps)

    def _take_inputs(
        self, x_PD: Tensor, layer: Layer, inputs: InputGate, input_TH: Tensor
    ) -> Tensor:
        """The layer's share of its stream from the table, as slice sums."""
        asked_PH = self.product(x_PD, inputs.gate, len(input_TH))
        take_inputs(asked_PH, input_TH, layer.activation)
        return self._parts(asked_PH, inputs.project, len(input_TH), is_split=False)

    def _attend_latent(
        self,
        h_PD: Tensor,
        layer: Layer,
        latent: FusedLatent,
        attn: AttnInputs,
        kv: KVCache,
        tiling: Tiling,
    ) -> Tensor:
        num_tokens, cache_CMH = len(attn.pos_T), kv.k_LCMH[layer.number]
        q_PQ = latent.narrow(
            self._parts(h_PD, latent.down, num_tokens, is_split=False),
            h_PD,
            cache_CMH,
            attn,
            self.tables[0],
        )
        q_PX = self.product(h_PD if q_PQ is None else q_PQ, latent.q, num_tokens)
        out_PN = h_PD.new_empty(len(h_PD), latent.num_values)
        latent.read(q_PX, cache_CMH, attn, self.tables[0], tiling, out_PN)
        return self._parts(out_PN, layer.out, num_tokens)

    def product(self, x_PK: Tensor, linear: Linear, num_tokens: int) -> Tensor:
        """Rounded once; rows past the tokens are never read."""
        y_PN = x_PK.new_empty(len(x_PK), linear.shape[0])
        if self._is_for_many(num_tokens):
            product(x_PK, linear.weight, y_PN, linear.bias_N)
        else:
            gemm(x_PK, linear.weight, y_PN, linear.bias_N)
        return y_PN

    def _mlp(self, h_PD: Tensor, layer: Layer, num_tokens: int) -> Tensor:
        """The MLP's share of the stream, as slice sums."""
        up, down, act = layer.gate_up, layer.down, layer.activation
        assert up is not None
        assert down is not None
        if layer.is_gated:
            y_PF = h_PD.new_empty(len(h_PD), up.shape[0] // 2)
            if not self._is_for_many(num_tokens):
                gemm_gated(h_PD, up.weight, y_PF, up.bias_N, activation=act)
                return self._parts(y_PF, down, num_tokens)
        up_PN = self.product(h_PD, up, num_tokens)
        y_PF = y_PF if layer.is_gated else up_PN  # in place
        activated(up_PN, y_PF, num_tokens, act, is_gated=layer.is_gated)
        return self._parts(y_PF, down, num_tokens)

    def _parts(
        self, x_PK: Tensor, linear: Linear, num_tokens: int, *, is_split: bool = True
    ) -> Tensor:
        """A product's slices; those of all ranks, where each has a part of it."""
        is_wide = self._is_for_many(num_tokens)
        weight = linear.weight
        count = slices_of(weight) if is_wide else num_parts(len(x_PK), weight)
        size = (count, len(x_PK), weight.shape[0])
        parts_SPD = torch.empty(size, dtype=torch.float32, device=x_PK.device)
        is_first = self.group.rank == 0 or not is_split  # the bias is added once
        multiply = product_parts if is_wide else gemm_parts
        multiply(x_PK, weight, parts_SPD, linear.bias_N if is_first else None)
        return self.group.all_slices(parts_SPD) if is_split else parts_SPD

    def _is_for_many(self, num_tokens: int) -> bool:
        return self.is_wide and num_tokens >= self.min_rows


def float_logits(hidden_MD: Tensor, weight_VD: Weight, bias_V: Tensor | None = None) -> Tensor:
    """Scores in float32, never rounded to 16 bits."""
    size = (len(hidden_MD), len(weight_VD))
    logits_MV = torch.empty(size, dtype=torch.float32, device=hidden_MD.device)
    gemm(hidden_MD, weight_VD, logits_MV, bias_V)
    return logits_MV


def unknown_to_kernels(spec: ModelSpec, dtype: torch.dtype) -> dict[str, bool]:
    """The features that the fused layers do not support, and whether the model has them."""
    shape = spec.recurrence
    return {
        "norms of heads that were turned": spec.is_qk_norm_late,
        "layer norms of heads": spec.is_qk_norm_centred,
        "scores that fall with the distance": spec.alibi is not None,
        "a norm of the embedding": spec.has_embed_norm,
        "q, k and v within limits": bool(spec.qkv_clip),
        f"the activation {spec.activation}": spec.activation not in KERNEL_NAMES,
        "Mamba 1 layers": isinstance(shape, SelectiveShape),
        "lightning attention": isinstance(shape, LightningShape),
        "delta nets of OLMo's form": isinstance(shape, DeltaShape) and shape.is_apart,
        "delta nets of Kimi's form": isinstance(shape, ChannelDeltaShape),
        "norms inside attention and MLPs": spec.has_inner_norms,
        "products that round their inputs": spec.input_bits > 0,
        "several streams side by side": spec.streams is not None,
        "experts that read narrower vectors": spec.experts is not None
        and spec.experts.narrow_width > 0,
        "convolutions this long": shape is not None and shape.num_taps > MAX_TAPS,
        f"{dtype}": dtype not in (torch.bfloat16, torch.float16),
    }
