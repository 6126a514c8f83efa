"""The decoder every family shares: embedding, layers, final norm, output matrix.

Shape letters: T packed tokens, M rows whose logits are wanted, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from hunch.errors import UnsupportedModelError
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache, zero_kv
from hunch.kernels.quant import Weight
from hunch.kernels.recurrence import RecurrentStates, StatesShape
from hunch.layers.attention import Attend, ExactPaged, Paged
from hunch.layers.block import Block
from hunch.layers.experts import Experts
from hunch.layers.latent import LatentBlock
from hunch.layers.linear import Linear, RowLinear
from hunch.layers.part import Part
from hunch.layers.recurrent import CarriedBlock, HalfBlock, RecurrentBlock
from hunch.layers.rope import Rope
from hunch.layers.streams import StreamsBlock
from hunch.models.build import LLAMA_NAMES, Names, build_block, build_norm, build_table, local_heads
from hunch.models.keys import Keys, read_common, read_sizes
from hunch.models.reading import FROM_GGUF, Config, without_pictures
from hunch.models.recurrent import (
    build_carried_block,
    build_half,
    build_recurrent_block,
    local_recurrence,
)
from hunch.models.source import Source
from hunch.models.spec import MAX_NODES, ModelSpec
from hunch.models.streams import build_streams, build_streams_block
from hunch.models.target import Backend, Hidden, find_backend
from hunch.parallel.group import Exchange, span, spans

TILE_ROWS = 64  # rows of every product on a GPU without kernels of ours: they cost as much as one

FusableBlock = Block | LatentBlock | RecurrentBlock | HalfBlock
AnyBlock = FusableBlock | StreamsBlock | CarriedBlock
Progress = Callable[[Iterable[str]], Iterable[str]]


def finish_logits(logits_MV: Tensor, spec: ModelSpec) -> Tensor:
    """Turn products with the output matrix, in float32, into the model's scores, in place."""
    if spec.logits_scale != 1.0:
        logits_MV.mul_(spec.logits_scale)
    if spec.logits_cap:
        logits_MV.div_(spec.logits_cap).tanh_().mul_(spec.logits_cap)
    return logits_MV


def output_of(weight_VD: Weight, spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    """Scores by this output matrix, of a target like `spec`."""
    output = Linear(weight_VD)
    return lambda state_MD: finish_logits(output(state_MD).float(), spec)


class KeepsKV(Protocol):
    """A model that says what it keeps of the tokens it has processed."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype

    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]: ...

    def states_of(self, num_rows: int, max_nodes: int = MAX_NODES) -> StatesShape | None: ...


def new_kv(model: KeepsKV, num_slots: int, num_rows: int) -> KVCache:
    """An empty cache of this many slots, with states of this many rows."""
    is_shared = model.spec.latent is not None
    kv = zero_kv(model.kv_shapes(), num_slots, model.kv_dtype, model.device, is_shared)
    kv.states = RecurrentStates.create(model.states_of(num_rows), model.dtype, model.device)
    return kv


class Decoder(Part):
    """A target or a draft model. It keeps no state between passes: KV and positions come in."""

    names: ClassVar[Names] = LLAMA_NAMES
    keys: ClassVar[Keys] = Keys()
    turns_part: ClassVar[bool] = False  # a config may have only a part of each head rotated
    is_quantised = False
    activation_bits: int | None = None

    def __init__(
        self, spec: ModelSpec, source: Source, progress: Progress = lambda names: names
    ) -> None:
        self.spec = spec
        self.device = source.device
        self.dtype = source.dtype
        self.kv_dtype = source.dtype
        self.group = source.group
        # A row's bits are the same whatever rows are beside it: on a CPU, or after make_exact.
        self.is_exact = source.device.type == "cpu"
        if spec.input_bits and (source.group.size > 1 or spec.experts is not None):
            raise UnsupportedModelError(
                f"{spec.architecture} rounds what goes into its products: not with experts, nor "
                "over several processes"
            )
        self.heads = local_heads(spec, source.group)
        self.ropes = [
            Rope(rope, spec.turned_dim, spec.max_len, source.device) for rope in spec.ropes
        ]
        self.positions_LD = None
        if not self.ropes and not spec.takes_stream:
            num_positions = spec.max_len + spec.position_offset
            self.positions_LD = source.take(self.names.positions, num_positions, spec.width)
        self.embedding_VD = torch.empty(0, spec.width, dtype=source.dtype, device=source.device)
        if spec.has_embedding:
            self.embedding_VD = source.take(self.names.embed, spec.vocab_size, spec.width)
        self.embed_norm = None
        if spec.has_embed_norm and not spec.takes_stream:
            self.embed_norm = build_norm(spec, source, self.names.embed_norm)
        # In the model's precision, as in the family's own code.
        self.embed_scale = float(torch.tensor(spec.embed_scale).to(source.dtype))
        layers = progress([self.names.layer.format(layer) for layer in range(spec.num_layers)])
        self.layers = [
            self.build_layer(source, prefix, layer) for layer, prefix in enumerate(layers)
        ]
        for part in (part for layer in self.layers for part in layer.parts()):
            if spec.input_bits and isinstance(part, Linear):
                part.input_bits = spec.input_bits
        self.inputs = build_table(spec, source, self.names)
        self.streams = build_streams(spec, source)
        self.final_norm = None
        if spec.has_final_norm:
            self.final_norm = build_norm(spec, source, self.names.final_norm)
        self.head = self._build_head(source)

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        """The spec of a config.json: by the family's keys, and what its `read_more` adds."""
        config = cls.keys.over(without_pictures(config) if cls.keys.reads_pictures else config)
        read = read_common if cls.keys.has_rope else read_sizes
        common = read(config, architecture, cls.keys.ffn_share)
        spec = cls.read_more(ModelSpec(**{**common, **cls.keys.read(config)}), config)
        if config.get(FROM_GGUF):  # tensors are stored in the decoder's form
            spec = replace(spec, is_norm_shifted=False, is_transposed=False, num_qkv_groups=1)
        return spec

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        """What does not follow from the family's keys alone. The config has defaults filled in."""
        return spec

    @property
    def backend(self) -> Backend:
        return find_backend("torch")

    def build_layer(self, source: Source, prefix: str, layer: int) -> AnyBlock:
        """One layer, whose tensors are named `prefix` + the family's names."""
        if self.spec.is_mlp:
            return build_half(self.spec, source, prefix, layer, self.names)
        if self.spec.carried is not None:
            return build_carried_block(self.spec, source, prefix, layer, self.names)
        if self.spec.recurs(layer):
            return build_recurrent_block(self.spec, source, prefix, layer, self.names)
        if self.spec.streams is not None:
            return build_streams_block(self.spec, source, prefix, layer, self.names)
        return build_block(self.spec, source, prefix, layer, names=self.names)

    def reach(self, max_len: int) -> None:
        """Extend learned positions to `max_len`: the last one is repeated."""
        more = max_len - self.spec.max_len
        if self.positions_LD is not None and more > 0:
            last_ND = self.positions_LD[-1:].expand(more, -1)
            self.positions_LD = torch.cat((self.positions_LD, last_ND))
            self.spec = replace(self.spec, max_len=max_len)

    @property
    def rope(self) -> Rope | None:
        """The rope of most layers."""
        return self.ropes[0] if self.ropes else None

    def _build_head(self, source: Source) -> Linear:
        """The output matrix, each rank with a part of the vocabulary."""
        vocab_size = self.spec.vocab_size
        self.head_sizes = spans(vocab_size, self.group.size)
        if not self.spec.has_head:
            return Linear(self.embedding_VD[:0])
        if not self.spec.is_tied:
            has_bias = self.spec.has_head_bias
            return source.head(self.names.head, vocab_size, self.spec.width, has_bias=has_bias)
        if self.group.size == 1:
            return source.tied_head(self.names.embed, self.embedding_VD)
        first, last = span(vocab_size, self.group)
        return Linear(self.embedding_VD[first:last])

    def embed(self, ids_T: Tensor) -> Tensor:
        """Token embeddings."""
        return functional.embedding(ids_T, self.embedding_VD)

    def start(self, ids_T: Tensor, pos_T: Tensor) -> Tensor:
        """The residual stream before the first layer."""
        x_TD = self.embed(ids_T)
        if self.embed_norm is not None:
            x_TD = self.embed_norm(x_TD)
        if self.embed_scale != 1.0:
            x_TD = x_TD * self.embed_scale
        if self.positions_LD is not None:
            x_TD = x_TD + self.positions_LD.index_select(0, pos_T + self.spec.position_offset)
        return x_TD

    def read(
        self, ids_T: Tensor, pos_T: Tensor, attend: Attend, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        """Run all layers over tokens; the caller decides how they attend."""
        x_TD = self.start(ids_T, pos_T)
        inputs_TLP = None if self.inputs is None else self.inputs(ids_T, x_TD)
        return self.run(x_TD, attend, feature_layers, inputs_TLP)

    def run(
        self,
        x_TD: Tensor,
        attend: Attend,
        feature_layers: tuple[int, ...] = (),
        inputs_TLP: Tensor | None = None,
    ) -> Hidden:
        """Run all layers over a residual stream, and over other inputs from the tokens."""
        assert (inputs_TLP is None) == (self.inputs is None)
        found = {0: x_TD}
        streams = self.streams
        x = x_TD if streams is None else streams.split(x_TD)  # TD or STD
        for num_done, layer in enumerate(self.layers, start=1):
            if inputs_TLP is not None and isinstance(layer, Block | StreamsBlock):
                x = layer(x, attend, inputs_TLP[:, num_done - 1])
            else:
                x = layer(x, attend)
            if num_done in feature_layers:
                found[num_done] = x if streams is None else x[0]
        features = tuple(found[layer] for layer in feature_layers)
        x_TD = x if streams is None else streams.merge(x)
        return Hidden(x_TD if self.final_norm is None else self.final_norm(x_TD), features)

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        """One pass: writes each token's KV and returns its hidden state.

        `feature_layers` asks for the stream after this many layers; 0 is what enters the first.
        """
        return self.read(ids_T, attn.pos_T, self.attend(attn, kv), feature_layers)

    def forward_stream(
        self, x_TD: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        """`forward` over the residual stream that earlier layers left."""
        return self.run(x_TD, self.attend(attn, kv), feature_layers)

    def attend(self, attn: AttnInputs, kv: KVCache) -> Attend:
        """How the tokens of a pass see each other."""
        rotations = [rope(attn.pos_T) for rope in self.ropes]
        return (ExactPaged if self.is_exact else Paged)(attn, kv, *rotations)

    def hold_kv(self, dtype: torch.dtype) -> None:
        """Keys and values in another precision than the model's."""
        self.kv_dtype = dtype

    def make_exact(self) -> None:
        """Compute each row in the same way on a GPU too, where torch's products depend on the
        number of rows."""
        self.is_exact = True
        for part in self.parts():
            if isinstance(part, Linear):
                part.num_tile_rows = TILE_ROWS

    def expand(self) -> None:
        """Expand every matrix to numbers, as torch would do it again for each product."""
        for part in self.parts():
            if isinstance(part, Linear):
                part.weight = part.weight_NK

    def exchanges(self, num_tokens: int) -> list[Exchange]:
        """The exchanges of a pass over so many tokens with other ranks, in order."""
        count = sum(isinstance(part, RowLinear | Experts) for part in self.parts())
        return [Exchange(num_tokens * self.spec.width, self.dtype)] * count

    def logit_exchange(self, num_rows: int) -> Exchange:
        """The same of `logits` of so many states."""
        return Exchange(num_rows * max(self.head_sizes), self.dtype)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """float32 scores of every token after each given hidden state; on rank 0 of a group."""
        logits_MV = self.head(hidden_MD)
        logits_MV = self.group.gather(logits_MV, self.head_sizes)
        return finish_logits(logits_MV.float(), self.spec)

    @property
    def tables(self) -> tuple[Tensor, Weight]:
        return self.embedding_VD, self.head.weight

    def output_rows(self, ids_C: Tensor) -> Tensor:
        return Linear(self.head.rows(ids_C)).weight_NK

    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Layers, KV heads and head width of the cache on this device, for each shape of heads."""
        return self.spec.kv_shapes(self.heads.num_kv_heads, self.num_other_heads)

    @property
    def num_other_heads(self) -> int:
        """KV heads on this device of layers whose heads have another shape; 0: there are none."""
        other = self.spec.other_heads
        if other is None:
            return 0
        return local_heads(self.spec, self.group, other.layers.index(True)).num_kv_heads

    def new_kv(self, num_slots: int, num_rows: int = 1) -> KVCache:
        return new_kv(self, num_slots, num_rows)

    def states_of(self, num_rows: int, max_nodes: int = MAX_NODES) -> StatesShape | None:
        """What recurrent layers keep on this device; None: the model has none."""
        shape = self.spec.states_of(num_rows, max_nodes)
        if shape is None:
            return None
        return replace(shape, recurrence=local_recurrence(shape.recurrence, self.group))
