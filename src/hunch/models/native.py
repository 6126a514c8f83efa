"""A decoder on the CPU's own kernels: quantised weights stay as the file holds them.

Shape letters: T packed tokens, M rows whose logits are wanted, D width, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.errors import ConfigError
from hunch.kernels.activation import KERNEL_NAMES
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.kernels.native import NativeNetwork
from hunch.kernels.native_library import is_available, new_team
from hunch.kernels.native_matrix import FLOAT, NativeMatrix
from hunch.kernels.native_structs import activation_number
from hunch.kernels.recurrence import StatesShape
from hunch.layers.attention import Heads
from hunch.layers.rope import Rope
from hunch.models.arrange import Arranged
from hunch.models.build import local_heads
from hunch.models.decoder import Decoder, new_kv
from hunch.models.load import check_tensors, spec_of
from hunch.models.native_layers import build_native_layer, build_native_table, has_norm_bias
from hunch.models.native_reader import Reader
from hunch.models.native_recurrent import knows
from hunch.models.share import HEAD_SHARE, SharedWeights, local_spec
from hunch.models.source import FileSource, bias_of
from hunch.models.spec import MAX_NODES, ModelSpec
from hunch.models.stage import WHOLE, Stage, StageWeights, stage_spec
from hunch.models.target import Backend, Hidden, find_backend
from hunch.models.weights.base import Weights, iterate, read_ahead
from hunch.parallel.group import SINGLE, Exchange, Group, span, spans
from hunch.registry import MODELS, resolve

DTYPES = ("auto", "int8", "int4", "float32")
ID_MAP = "d2t"  # a cut model's map: column c of its logits is token c + d2t[c]
# Up to this width activations in 8 bits change more than a tenth of simple answers: decision 023.
SMALL_WIDTH = 768
_LANES = 16  # widths and heads are whole vectors on every CPU
MAX_HEAD_DIM = 1024


class NativeDecoder:
    """The interface of Decoder; hidden states and logits are float32, on the CPU.

    KV is stored as float16 beside quantised weights (half the memory, rounded once, when it is
    written) and as float32 beside float32 weights; after `hold_kv` in 8 bits.
    """

    tables = None

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        dtype: str = "auto",
        num_threads: int | None = None,
        tables: tuple[NativeMatrix, NativeMatrix] | None = None,  # of the model it was cut from
        is_fine: bool = False,
        group: Group = SINGLE,
        stage: Stage = WHOLE,
    ) -> None:
        family: type[Decoder] = resolve(MODELS, spec.architecture)
        arranged: Weights = Arranged(weights, spec, family.names)
        if stage.count > 1:
            arranged = StageWeights(arranged, spec, family.names, stage)
            spec = stage_spec(spec, stage)
        self.spec, self.names = spec, family.names
        self.device, self.dtype, self.group = torch.device("cpu"), torch.float32, group
        self.heads: Heads = local_heads(spec, group)
        source = FileSource(arranged, torch.float32)
        check_tensors(spec, source, (self.names.embed, self.names.head, ID_MAP) if tables else ())
        local = local_spec(spec, group)
        self.head_sizes = spans(spec.vocab_size, group.size)
        reader = Reader(source, dtype, num_threads)
        self._whole = reader if group.size > 1 else None
        if group.size > 1:  # each process has a share of every matrix
            shared = SharedWeights(source.weights, spec, self.names, group)
            reader = Reader(FileSource(shared, torch.float32), dtype, num_threads)
        # Tables for a context of 32,768 take tens of megabytes; few requests get that long.
        ropes = [Rope(r, spec.turned_dim, spec.max_len, is_whole=False) for r in spec.ropes]
        prefixes = iterate([self.names.layer.format(layer) for layer in range(spec.num_layers)])
        layers = [
            build_native_layer(local, reader, prefix, self.names, i, ropes)
            for i, prefix in enumerate(prefixes)
        ]
        table = build_native_table(spec, reader, self.names)
        self.embedding, self.head = tables or self._tables(reader)
        held = [self.head] if tables else [self.embedding, self.head]
        held += [matrix for layer in layers for matrix in layer.matrices()]
        held += [value for value in table.values() if isinstance(value, NativeMatrix)]
        self.weight_bytes = sum({id(matrix): matrix.nbytes for matrix in held}.values())
        is_float = all(matrix.format == FLOAT for matrix in held)
        self.is_quantised = not is_float
        self.kv_dtype = torch.float32 if is_float else torch.float16
        self.activation_bits = None if is_float else 14 if is_fine else 8
        norm_D, norm_bias_D, positions_LD, head_bias_V = self._vectors(reader)
        self.network = NativeNetwork(
            layers,
            **numbers_of(local, self.heads),
            **table,
            embedding=self.embedding,
            head=self.head,
            final_norm=norm_D,
            final_norm_bias=norm_bias_D,
            positions=positions_LD,
            rope=ropes[0].table_LH if ropes else None,
            reach=[rope.reach for rope in ropes],
            kv_dtype=self.kv_dtype,
            num_threads=num_threads,
            is_fine=is_fine,
            reduce=group.all_reduce if group.size > 1 else None,
            head_bias=head_bias_V,
        )

    def _vectors(self, reader: Reader) -> tuple[Tensor | None, ...]:
        """The last norm's weight and bias, learned positions, and the bias of this process's part
        of the output matrix; None for those that it lacks."""
        spec, norm = self.spec, self.names.final_norm
        has_bias = spec.has_final_norm and has_norm_bias(spec)
        positions_LD = None
        if spec.rope is None and not spec.takes_stream:
            positions_LD = reader.tensor(self.names.positions)[spec.position_offset :]
        norm_D = reader.norm(norm, spec) if spec.has_final_norm else None
        norm_bias_D = reader.tensor(f"{norm}.bias") if has_bias else None
        head_bias_V = None
        if spec.has_head_bias and spec.has_head:
            head_bias_V = reader.tensor(bias_of(self.names.head))
            head_bias_V = head_bias_V[slice(*span(spec.vocab_size, self.group))].clone()
        return norm_D, norm_bias_D, positions_LD, head_bias_V

    def _tables(self, reader: Reader) -> tuple[NativeMatrix, NativeMatrix]:
        """Embedding and output matrix, as far as this process has them."""
        spec = self.spec
        nothing = NativeMatrix.from_floats(torch.zeros(_LANES, spec.width), FLOAT, 1)
        embedding = nothing
        if spec.has_embedding:
            embedding = reader.matrix(self.names.embed, is_table=True)
        if not spec.has_head:
            return embedding, nothing
        if self.group.size == 1 and spec.is_tied:
            return embedding, embedding
        name = HEAD_SHARE if self.group.size > 1 else self.names.head
        return embedding, reader.matrix(name, is_table=True)

    @property
    def backend(self) -> Backend:
        return find_backend("native")

    def hold_kv(self, dtype: torch.dtype) -> None:
        """Hold keys and values in another precision than the weights' usual one."""
        self.kv_dtype = self.network.kv_dtype = dtype

    def use_own_threads(self, num_threads: int) -> None:
        """Compute at the same time as other networks of this process, not after them."""
        self.network.team = new_team(num_threads)

    @property
    def whole_head(self) -> NativeMatrix:
        """The whole output matrix, with other ranks' shares."""
        if self._whole is None or self.spec.is_tied:
            return self.embedding if self.spec.is_tied else self.head
        return self._whole.matrix(self.names.head, is_table=True)

    def output_rows(self, ids_C: Tensor) -> Tensor:
        return self.head.rows(ids_C)

    def embed(self, ids_T: Tensor) -> Tensor:
        return self.embedding.rows(ids_T)

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        return Hidden(*self.network.forward(ids_T.contiguous(), attn, kv, feature_layers))

    def forward_stream(
        self, x_TD: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        return Hidden(*self.network.forward(None, attn, kv, feature_layers, x_TD.contiguous()))

    def exchanges(self, num_tokens: int) -> list[Exchange]:
        sum_of_rows = Exchange(num_tokens * self.spec.width, torch.float32)
        return [sum_of_rows] * (2 * len(self.network.layers))

    def logit_exchange(self, num_rows: int) -> Exchange:
        return Exchange(num_rows * max(self.head_sizes), torch.float32)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        return self.group.gather(self.network.logits(hidden_MD), self.head_sizes)

    def kv_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Layers, KV heads and head width of the cache, as far as this process holds them."""
        return self.spec.kv_shapes(self.heads.num_kv_heads)

    def states_of(self, num_rows: int, max_nodes: int = MAX_NODES) -> StatesShape | None:
        return self.spec.states_of(num_rows, max_nodes)

    def new_kv(self, num_slots: int, num_rows: int = 1) -> KVCache:
        return new_kv(self, num_slots, num_rows)


def load_native(
    weights: Weights,
    *,
    dtype: str = "auto",
    num_threads: int | None = None,
    bits: int = 8,
    group: Group = SINGLE,
    stage: Stage = WHOLE,
) -> NativeDecoder | None:
    """The model of `weights` on native kernels; None if they do not support it or this machine.

    For products with quantised weights, activations are rounded to 8 bits, or to 14: slower, but a
    small model then answers as in float32.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of the native kernels': {', '.join(DTYPES)}")
    spec = spec_of(weights)
    # Parts that the native pass does not split.
    parts = (spec.experts, spec.recurrence, spec.latent, spec.other_heads)
    is_whole = any(part is not None for part in parts) or spec.is_qk_norm_whole
    if not is_supported(spec) or (is_whole and group.size > 1) or not is_available():
        return None
    read_ahead(weights.path)
    return NativeDecoder(
        spec, weights, dtype, num_threads, is_fine=bits == 14, group=group, stage=stage
    )


def activation_bits(spec: ModelSpec, asked: int | str) -> int:
    """8 or 14, for products with quantised weights: as a user asked, or the choice of "auto"."""
    if isinstance(asked, int):
        return asked
    return 14 if spec.width <= SMALL_WIDTH else 8


def is_supported(spec: ModelSpec) -> bool:
    """Whether the native pass supports this model."""
    return not not_native(spec)


def not_native(spec: ModelSpec) -> list[str]:
    """Why the native kernels do not support a model, in words."""
    sizes = [spec.head_dim, *([spec.other_heads.head_dim] if spec.other_heads else [])]
    latent, experts = spec.latent, spec.experts
    parts = sizes  # widths of heads' parts that the kernels read as whole vectors
    if latent is not None:
        parts = [latent.flat_dim, latent.rope_dim, latent.value_dim, latent.latent_dim]
        parts.append(latent.q_latent_dim or 0)
    problems = {
        "these widths of latent attention": latent is not None and not _are_whole(*parts),
        "these recurrent layers": spec.recurrence is not None
        and not knows(spec.recurrence, _LANES),
        f"a width of {spec.width}": not _are_whole(spec.width),
        f"heads of {' and '.join(map(str, sizes))}": max(sizes) > MAX_HEAD_DIM
        or (latent is None and not _are_whole(*parts)),
        "these widths of a table": spec.inputs is not None and not _are_whole(spec.inputs.width),
        "norms of heads that were turned": spec.is_qk_norm_late,
        "layer norms of heads": spec.is_qk_norm_centred,
        "scores that fall with the distance": spec.alibi is not None,
        "a norm of the embedding": spec.has_embed_norm,
        "q, k and v within limits": bool(spec.qkv_clip),
        f"the activation {spec.activation}": spec.activation not in KERNEL_NAMES,
        "norms inside attention and MLPs": spec.has_inner_norms,
        "products that round their inputs": spec.input_bits > 0,
        "several streams side by side": spec.streams is not None,
        "experts that read narrower vectors": experts is not None and experts.narrow_width > 0,
        "these widths of experts": experts is not None
        and not _are_whole(experts.width, experts.shared_width),
    }
    return [words for words, is_there in problems.items() if is_there]


def _are_whole(*widths: int) -> bool:
    """Whether the kernels read all of them as whole vectors."""
    return all(width % _LANES == 0 for width in widths)


def numbers_of(spec: ModelSpec, heads: Heads) -> dict[str, float]:
    """The numbers that a pass needs, as values of NetworkStruct."""
    same = (
        *("width", "ffn_width", "num_heads", "num_kv_heads", "head_dim", "max_len", "norm_eps"),
        *("is_post_norm", "is_parallel", "is_qk_norm_whole", "residual_scale", "logits_scale"),
        *("attn_cap", "logits_cap"),
    )
    other = spec.other_heads
    return {name: getattr(spec, name) for name in same} | {
        "scale": heads.scale,
        "is_layer_norm": spec.norm == "layer",
        "activation": activation_number(spec.activation),
        "embed_scale": 1.0 if spec.takes_stream else spec.embed_scale,
        "other_kv_heads": 0 if other is None else other.num_kv_heads,
        "other_head_dim": 0 if other is None else other.head_dim,
    }
