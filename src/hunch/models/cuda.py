"""A decoder's pass on a GPU: seven kernels per layer, the same bits per row for any batch.

Shape letters: T packed tokens, P the same padded where a library wants it, M rows whose logits are
wanted, D width, V vocabulary, L positions, H head width.
"""

from __future__ import annotations

import logging
from typing import cast

import torch
from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_fused import Places, add_norm
from hunch.kernels.gpu_inputs import make_inputs
from hunch.kernels.gpu_tiling import Tiler
from hunch.kernels.gpu_wide import is_exact
from hunch.kernels.kv_store import KVCache
from hunch.kernels.quant import Quantised, slices_of
from hunch.models.decoder import Decoder, FusableBlock, finish_logits
from hunch.models.fused import FusedLayers, float_logits, unknown_to_kernels
from hunch.models.fused_layer import Layer, row_norm
from hunch.models.target import Backend, Hidden, find_backend
from hunch.parallel.group import Exchange

# For partial results of rows whose positions programs share: so many bytes, or this part of a GPU's
# memory if it is more. A model of 131,072 positions and 64 heads takes 34 MB per token.
SHARED_BYTES, SHARED_PART = 320 * 2**20, 128

log = logging.getLogger("hunch")


class CudaDecoder:
    """The interface of Decoder with fused kernels, over the same weights."""

    is_quantised = False
    activation_bits: int | None = None

    def __init__(self, decoder: Decoder, max_len: int | None = None) -> None:
        """`max_len`: the length of the longest text; None: the model's context."""
        check_supported(decoder)
        self.decoder = decoder
        self.spec = decoder.spec
        self.device, self.dtype, self.kv_dtype = decoder.device, decoder.dtype, decoder.kv_dtype
        self.kv_shapes, self.new_kv = decoder.kv_shapes, decoder.new_kv
        self.states_of = decoder.states_of
        self.embed, self.weight_bytes = decoder.embed, decoder.weight_bytes
        self.tables, self.output_rows = decoder.tables, decoder.output_rows
        self.embedding_VD = decoder.embedding_VD
        tables = [rope.table_LH for rope in decoder.ropes]
        tempers = [rope.temper_L for rope in decoder.ropes]
        layers = cast("list[FusableBlock]", decoder.layers)
        self.fused = FusedLayers(
            layers, tables, decoder.spec.norm_eps, group=decoder.group, tempers=tempers
        )
        self.layers = self.fused.layers
        self.timing = self.fused.timing  # for steps without rows, which are run to time them
        self.fused.is_wide = decoder.device.type == "cuda" and self._check_wide()
        self.final_norm = row_norm(decoder.final_norm)
        self.positions_LD = decoder.positions_LD
        if self.positions_LD is not None:
            self.positions_LD = self.positions_LD[decoder.spec.position_offset :]
        heads, other = decoder.heads, decoder.spec.other_heads
        num_kv, head_dim = heads.num_kv_heads, decoder.spec.value_dim
        if other is not None:  # the most heads that share keys, and the widest, decide for all
            num_kv, head_dim = min(num_kv, decoder.num_other_heads), max(head_dim, other.head_dim)
        self.tiler = Tiler.create(
            heads.num_heads,
            num_kv,
            head_dim,
            min(decoder.spec.max_len, max_len or decoder.spec.max_len),
            decoder.device,
            max_bytes=shared_bytes(decoder.device),
        )
        self.workspace, self.tiling = self.tiler.workspace, self.tiler.tiling

    @property
    def backend(self) -> Backend:
        return find_backend("triton")

    def hold_kv(self, dtype: torch.dtype) -> None:
        self.decoder.hold_kv(dtype)
        self.kv_dtype = dtype

    def _check_wide(self) -> bool:
        """Whether the vendor's products may serve many rows: they have the same bits."""
        if self.spec.width < self.fused.min_width:
            return False
        # One layer of each kind.
        by_shapes = {
            tuple(linear.shape for linear in (*each.plain(), *each.sliced())): each
            for each in self.layers[::-1]
        }
        is_same = all(map(_is_same, by_shapes.values()))
        if not is_same:
            log.warning("cuBLAS rounds in another order here: long prompts use slower kernels")
        return is_same

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        num_tokens, width = len(ids_T), self.spec.width
        size = (self.fused.num_rows(num_tokens), width)
        x_PD = torch.empty(size, dtype=self.dtype, device=self.device)
        h_PD = torch.empty_like(x_PD)
        x_TD, h_TD, first_norm = x_PD[:num_tokens], h_PD[:num_tokens], self.layers[0].attn_norm
        if self.fused.is_bare:
            x_TD, first_norm = h_TD, None
        places = None
        if self.positions_LD is not None:
            places = Places(self.positions_LD, attn.pos_T)
        add_norm(
            self.decoder.embedding_VD, first_norm, self.spec.norm_eps,
            None if first_norm is None else h_TD, sum_TD=x_TD, index_T=ids_T,
            row_scale=self.decoder.embed_scale, places=places,
        )  # fmt: skip
        return self._run(x_TD, h_PD, attn, kv, feature_layers, self._inputs(ids_T, x_PD))

    def forward_stream(
        self, x_TD: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        num_tokens, width = x_TD.shape
        h_PD = x_TD.new_empty(self.fused.num_rows(num_tokens), width)
        h_TD, first_norm = h_PD[:num_tokens], self.layers[0].attn_norm
        if self.fused.is_bare or first_norm is None:
            h_TD.copy_(x_TD)
        else:
            add_norm(x_TD, first_norm, self.spec.norm_eps, h_TD)
        return self._run(x_TD, h_PD, attn, kv, feature_layers)

    def _run(
        self,
        x_TD: Tensor,
        h_PD: Tensor,
        attn: AttnInputs,
        kv: KVCache,
        feature_layers: tuple[int, ...],
        input_TLH: Tensor | None = None,
    ) -> Hidden:
        streams, last_TD = self.fused.run(
            x_TD,
            h_PD,
            attn,
            kv,
            self.tiler.of(attn),
            norm=self.final_norm,
            kept=feature_layers,
            input_TLH=input_TLH,
        )
        return Hidden(
            streams[-1] if last_TD is None else last_TD,
            tuple(streams[index] for index in feature_layers),
        )

    def _inputs(self, ids_T: Tensor, x_PD: Tensor) -> Tensor | None:
        """The table's vectors of the tokens for each layer."""
        table = self.decoder.inputs
        if table is None:
            return None
        input_PX = self.fused.product(x_PD, table.project, len(ids_T))
        weight_H = table.norm.weight_D
        make_inputs(
            input_PX, table.table_VX, ids_T, weight_H, self.spec.norm_eps,
            table_scale=table.table_scale, project_scale=table.project_scale, scale=table.SCALE,
        )  # fmt: skip
        return input_PX[: len(ids_T)].view(len(ids_T), -1, len(weight_H))

    def exchanges(self, num_tokens: int) -> list[Exchange]:
        return self.fused.exchanges(num_tokens)

    def logit_exchange(self, num_rows: int) -> Exchange:
        return Exchange(num_rows * max(self.decoder.head_sizes), torch.float32)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """float32 scores of every token after each given hidden state, never rounded to 16 bits."""
        logits_MV = float_logits(hidden_MD, self.decoder.head.weight, self.decoder.head.bias_N)
        logits_MV = self.decoder.group.gather(logits_MV, self.decoder.head_sizes)
        return finish_logits(logits_MV, self.spec)


def shared_bytes(device: torch.device) -> int:
    """Memory for partial results that programs of attention share."""
    if device.type != "cuda":
        return SHARED_BYTES
    total: int = torch.cuda.get_device_properties(device).total_memory
    return max(SHARED_BYTES, total // SHARED_PART)


def _is_same(layer: Layer) -> bool:
    """Whether the vendor's products have the same bits for this layer's matrices."""
    plain, split, qkv = layer.plain(), layer.sliced(), layer.qkv
    if qkv and isinstance(qkv.weight, Quantised) and slices_of(qkv.weight) > 1:
        plain, split = plain[1:], [qkv, *split]
    return all(is_exact(linear.weight, linear.bias_N, is_split=False) for linear in plain) and all(
        is_exact(linear.weight, linear.bias_N, is_split=True) for linear in split
    )


def check_supported(decoder: Decoder) -> None:
    """Raise for a model that the fused kernels do not support."""
    spec = decoder.spec
    problems = {
        **unknown_to_kernels(spec, decoder.dtype),
        "a norm after the norms after the sums": spec.is_post_norm and spec.has_final_norm,
    }
    found = [name for name, is_there in problems.items() if is_there]
    if found:
        raise UnsupportedModelError(f"the GPU's fused kernels do not know {', '.join(found)}")
