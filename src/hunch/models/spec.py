"""What a model is: its config.json read once, every value checked, nothing left to guess later."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.kernels.activation import ACTIVATIONS, GATED_ACTIVATIONS
from hunch.kernels.recurrence import Recurrence, StatesShape
from hunch.layers.attention import Alibi
from hunch.layers.experts import ExpertSpec
from hunch.layers.latent import LatentShape
from hunch.layers.recurrent import CarriedScales
from hunch.layers.rope import RopeSpec, amplitude
from hunch.layers.streams import StreamsShape
from hunch.models.reading import (
    FROM_GGUF,
    INPUT_BITS,
    Config,
    Recorded,
    check_listed,
    read_int,
    refuse_unread,
    shown,
)
from hunch.models.refused import REFUSED
from hunch.registry import MODELS, resolve, unknown

MAX_NODES = 32  # of a draft, if nothing sets another limit


# Of each named part of a layer: numbers of rows, in order, and what these are multiplied by.
RowFactors = tuple[tuple[str, tuple[tuple[int, float], ...]], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherHeads:
    """Keys and values of layers whose heads are of another shape than the model's."""

    num_kv_heads: int
    head_dim: int
    layers: tuple[bool, ...]  # per layer: whether its heads are of this shape


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenInputs:
    """A table with a vector of each token for each layer, besides its embedding."""

    width: int  # numbers per layer
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Geometry and options of a decoder."""

    architecture: str  # a key of registry.MODELS
    vocab_size: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    max_len: int
    # Norms
    norm: str = "rms"  # rms, layer
    norm_eps: float = 1e-6
    has_norm_weight: bool = True  # False: norms of the stream only divide
    has_norm_bias: bool = True  # of layer norms
    has_qk_norm: bool = False  # each head of q and k is normed before it is rotated
    qk_norm_eps: float = 0.0  # of these norms; 0: norm_eps
    is_qk_norm_whole: bool = False  # they are normed over all heads at once
    is_qk_norm_late: bool = False  # they are normed after they are rotated
    is_qk_norm_centred: bool = False  # they are normed by a layer norm
    has_qk_norm_bias: bool = False  # of layer norms
    is_qk_norm_own: bool = False  # of layer norms: each head has weights of its own
    unnormed: tuple[bool, ...] = ()  # per layer: q and k are not normed here; (): all are
    has_v_norm: bool = False  # each head of v is divided by its root mean square
    has_input_norms: bool = True  # of the stream, before attention and MLP read it
    has_branch_norms: bool = False  # outputs of attention and MLP are normed before they are added
    is_post_norm: bool = False  # norms stand after the residual sums, none before the branches
    is_parallel: bool = False  # attention and MLP read the same stream, and both are added
    has_mlp_norm: bool = True  # False: the MLP of a parallel layer reads attention's norm
    has_final_norm: bool = True
    has_embed_norm: bool = False  # of the embedding, before the first layer
    has_inner_norms: bool = False  # norms of heads' outputs and of the MLP's last inputs
    # The MLP
    activation: str = "silu"
    is_gated: bool = True
    ffn_widths: tuple[int, ...] = ()  # per layer; (): all as wide as ffn_width
    experts: ExpertSpec | None = None  # in place of some layers' MLPs
    # Attention
    # Per layer: positions a token sees; None: all; below 0: those of its chunk of that size.
    windows: tuple[int | None, ...] = ()
    attn_scale: float = 0.0  # of the scores; 0: head_dim ** -0.5
    qkv_clip: float = 0.0  # q, k and v lie between -clip and clip; 0: as they are
    attn_cap: float = 0.0  # scores s become cap * tanh(s / cap); 0: as they are
    alibi: Alibi | None = None  # scores fall with the distance
    latent: LatentShape | None = None  # keys and values of all heads are one vector per token
    has_attn_gate: bool = False  # heads' outputs are scaled by a sigmoid of the layer's input
    has_sinks: bool = False  # one score per head that is in the softmax and has no value
    other_heads: OtherHeads | None = None
    kv_of: tuple[int, ...] = ()  # per layer: the one whose keys and values it reads; (): its own
    is_value_key: tuple[bool, ...] = ()  # per layer: keys, before their norm, are values too
    # Recurrent layers, in attention's place
    recurrence: Recurrence | None = None
    is_recurrent: tuple[bool, ...] = ()  # per layer; (): none is
    attends_too: bool = False  # all layers are recurrent, and attend beside it
    is_mlp: tuple[bool, ...] = ()  # per layer, if each is one half alone; (): all have both
    # Positions
    rope: RopeSpec | None = None  # None: positions are learned, and added to the embedding
    more_ropes: tuple[RopeSpec, ...] = ()  # those of layers that have another rope
    rope_of: tuple[int, ...] = ()  # per layer: 0 is `rope`, 1 the first of more_ropes; (): all 0
    position_offset: int = 0  # rows of the table of learned positions before that of position 0
    input_bits: int = 0  # to which inputs of products are rounded, each row by its largest; 0: not
    # Biases
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_head_bias: bool = False  # of the output matrix
    # Embedding, residual stream and output
    inputs: TokenInputs | None = None
    streams: StreamsShape | None = None  # side by side; None: there is one
    has_layer_scale: bool = False  # the stream is scaled at the end of each layer
    embed_width: int = 0  # of the embedding on disk, where it is projected to `width`
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # factor of what attention and MLP add to the stream
    carried: CarriedScales | None = None  # layers add to what they read; None: to the stream
    logits_scale: float = 1.0
    logits_cap: float = 0.0  # as attn_cap
    is_tied: bool = False  # the embedding is the output matrix too
    # What a stage of a pipeline lacks; see stage.py
    takes_stream: bool = False  # its input is the stream of earlier layers
    has_embedding: bool = True
    has_head: bool = True
    # How the file holds it
    dtype: str | None = None  # precision it was saved in
    is_norm_shifted: bool = False  # norms are stored as w and mean 1 + w
    is_transposed: bool = False  # matrices are stored [in, out]
    # Parts of a fused tensor, each with its share of q, k and v; 0: one for each KV head.
    num_qkv_groups: int = 1
    is_qvk: bool = False  # there v stands before k
    row_factors: RowFactors = ()  # parts of a layer to multiply, and the factors of their rows
    is_rope_interleaved: bool = False  # rotary pairs are neighbours in a head

    @staticmethod
    def from_config(config: Config) -> ModelSpec:
        """Read a config.json of Hugging Face's form."""
        name = _architecture(config)
        if name not in MODELS:
            raise UnsupportedModelError(_not_known(config, name))
        if config.get("quantization_config"):
            method = dict(config["quantization_config"]).get("quant_method", "unknown")
            raise UnsupportedModelError(
                f"quantization_config ({method}) is not supported; use the plain model or a GGUF"
            )
        family = resolve(MODELS, name)
        recorded = Recorded(config)
        spec: ModelSpec = family.read_config(recorded, name)
        if recorded.get(INPUT_BITS):
            spec = replace(spec, input_bits=read_int(recorded, INPUT_BITS))
        spec.check()
        is_part = any(rope.dim > 0 for rope in spec.ropes)
        if is_part and not family.turns_part and not config.get(FROM_GGUF):
            raise UnsupportedModelError(
                f"{name}: config.json asks for a part of each head to be turned "
                "(partial_rotary_factor); the family turns whole heads"
            )
        if extra := recorded.unread():
            refuse_unread(config, extra, f"{name}: config.json")
        return spec

    def check(self) -> None:
        """Raise for values that contradict each other."""
        if self.num_heads % self.num_kv_heads:
            raise ModelFormatError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.rope is not None and self.head_dim % 2:
            raise ModelFormatError(f"head_dim={self.head_dim} must be even to be rotated")
        known = {*ACTIVATIONS, *(GATED_ACTIVATIONS if self.is_gated else ("xielu",))}
        if self.activation not in known:
            raise UnsupportedModelError(f"activation {unknown(self.activation, known)}")
        check_listed("layer_types", self.windows, self.num_layers)
        if self.is_recurrent and len(self.is_recurrent) != self.num_layers:
            raise UnsupportedModelError(
                "layers of a model with recurrent ones cannot be picked yet"
            )
        others = () if self.other_heads is None else self.other_heads.layers
        shares = () if self.streams is None else self.streams.sparsity
        if any(some and len(some) != self.num_layers for some in (others, self.kv_of, shares)):
            raise UnsupportedModelError("layers that share keys and values cannot be picked yet")
        if self.experts is not None:
            self.experts.check()
        if self.other_heads is not None and self.num_heads % self.other_heads.num_kv_heads:
            raise ModelFormatError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_global_key_value_heads={self.other_heads.num_kv_heads}"
            )
        num_rows = self.vocab_size if self.inputs is None else self.inputs.vocab_size
        if num_rows < self.vocab_size and self.streams is None:
            raise ModelFormatError(
                f"vocab_size_per_layer_input={num_rows} is less than vocab_size={self.vocab_size}"
            )
        for rope in self.ropes:
            if rope.factors and len(rope.factors) != (rope.dim or self.turned_dim) // 2:
                raise ModelFormatError(
                    f"{len(rope.factors)} rope factors for a head of {self.turned_dim}"
                )

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """All ropes of layers; none if positions are learned."""
        return () if self.rope is None else (self.rope, *self.more_ropes)

    def at(self, layer: int) -> ModelSpec:
        """The spec with the sizes of one layer."""
        other, widths = self.other_heads, self.ffn_widths
        if other is None and not widths and not self.unnormed:
            return self
        has_norm = self.has_qk_norm and not (self.unnormed and self.unnormed[layer])
        width = widths[layer] if widths else self.ffn_width
        spec = replace(self, ffn_width=width, has_qk_norm=has_norm)
        if other is None or not other.layers[layer]:
            return spec
        return replace(spec, num_kv_heads=other.num_kv_heads, head_dim=other.head_dim)

    def has_mixer(self, layer: int) -> bool:
        """Whether the layer attends or is recurrent."""
        return not self.is_mlp or not self.is_mlp[layer]

    def has_mlp(self, layer: int) -> bool:
        return not self.is_mlp or self.is_mlp[layer]

    def recurs(self, layer: int) -> bool:
        return bool(self.is_recurrent) and self.is_recurrent[layer]

    def keeps_kv(self, layer: int) -> bool:
        """Whether the layer has keys and values of its own."""
        if not self.has_mixer(layer):
            return False
        if self.recurs(layer) and not self.attends_too:
            return False
        return not self.kv_of or self.kv_of[layer] == layer

    def is_reader(self, layer: int) -> bool:
        """Whether the layer reads the keys and values of an earlier one."""
        return bool(self.kv_of) and not self.keeps_kv(layer)

    def has_other_heads(self, layer: int) -> bool:
        return self.other_heads is not None and self.other_heads.layers[layer]

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that keep keys and values, as the cache has them: other heads come last."""
        kept = [layer for layer in range(self.num_layers) if self.keeps_kv(layer)]
        return tuple(sorted(kept, key=self.has_other_heads))

    def place_of(self, layer: int) -> int:
        """The layer's number in the KV cache or, if it is recurrent, among rows' states."""
        if not self.has_mixer(layer):
            return 0
        if self.recurs(layer):
            return self.is_recurrent[:layer].count(True)
        return self.kv_layers.index(self.kv_of[layer] if self.kv_of else layer)

    def kv_shapes(
        self, num_kv_heads: int, num_other_heads: int | None = None
    ) -> tuple[tuple[int, int, int], ...]:
        """Layers, KV heads and head width of the cache: one for each shape of heads. This
        device has `num_kv_heads` heads of the first and `num_other_heads` of the second; None:
        all."""
        num_others = sum(self.has_other_heads(layer) for layer in self.kv_layers)
        num_layers = len(self.kv_layers) or 1  # a stage may have none of its own
        shapes = [(num_layers - num_others, num_kv_heads, self.head_dim)]
        if self.other_heads is not None:
            count = self.other_heads.num_kv_heads if num_other_heads is None else num_other_heads
            shapes.append((num_others, count, self.other_heads.head_dim))
        return tuple(shapes)

    def states_of(self, num_rows: int, max_nodes: int = MAX_NODES) -> StatesShape | None:
        """The states of recurrent layers, for this many rows and nodes of drafts; None: it has
        none."""
        if self.recurrence is None:
            return None
        num_layers = max(sum(self.is_recurrent), 1)  # a stage may have none of its own
        return StatesShape(
            self.recurrence, num_layers=num_layers, num_rows=num_rows, max_nodes=max_nodes
        )

    @property
    def widest_window(self) -> int | None:
        """The most positions that a layer sees; None: all."""
        windows = [abs(window) for window in self.windows if window is not None]
        return max(windows) if windows and len(windows) == self.num_layers else None

    @property
    def value_dim(self) -> int:
        """The width of a head's values in the cache."""
        return self.head_dim if self.latent is None else self.latent.latent_dim

    @property
    def turned_dim(self) -> int:
        """The numbers of a head that rotary tables rotate, in the tables' order."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    def rope_index(self, layer: int) -> int:
        return self.rope_of[layer] if self.rope_of else 0

    def normed_after_turns(self) -> ModelSpec:
        """The spec for heads that are rotated before they are normed. To rotate does not change
        what norms divide by; a factor of the rope is divided out again, all but for the epsilon."""
        assert self.rope is not None
        scale = amplitude(self.rope)
        if scale == 1.0:
            return self
        rope = replace(self.rope, attention_factor=1.0)
        return replace(self, rope=rope, qk_norm_eps=self.norm_eps / scale**2)

    @property
    def sees_all(self) -> tuple[bool, ...]:
        """Per layer: whether it has no window."""
        return tuple(window is None for window in self.windows)

    def with_rope(self, rope: RopeSpec, layers: Iterable[bool]) -> ModelSpec:
        """The spec with another rope for some layers."""
        return replace(self, more_ropes=(rope,), rope_of=tuple(map(int, layers)))


_FEW = 8  # a config with fewer keys is too short to resemble a family's
_ENDINGS = ("ForCausalLM", "LMHeadModel")


def _architecture(config: Config) -> str:
    """The architecture that a config names: a family's whole model, its layers without an output
    matrix, or, as in transformers, a model_type alone."""
    names, model_type = config.get("architectures") or [], str(config.get("model_type"))
    if isinstance(names, list | tuple) and names:
        whole = [str(names[0]).removesuffix("Model") + ending for ending in _ENDINGS]
        return next((name for name in whole if name in MODELS), str(names[0]))
    wanted = _letters(model_type.removesuffix("_text"))
    for name in MODELS:
        if wanted in [_letters(name.removesuffix(ending)) for ending in _ENDINGS]:
            return name
    raise ModelFormatError(
        "config.json names no architectures; add the one of its family, such as "
        '"architectures": ["LlamaForCausalLM"]'
    )


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def _not_known(config: Config, name: str) -> str:
    """The reason, or the family that reads most of the config's keys, and the keys that it does
    not."""
    if name in REFUSED:
        return f"architecture {name!r} is not supported: {REFUSED[name]}"
    left: dict[str, Config] = {}
    for known in MODELS if len(config) > _FEW else ():
        recorded = Recorded(config)
        try:
            resolve(MODELS, known).read_config(recorded, known)
        except (ModelFormatError, UnsupportedModelError):
            continue
        left[known] = recorded.unread()
    words = f"architecture {unknown(name, MODELS)}"
    if not left:
        return words
    nearest = min(left, key=lambda known: len(left[known]))
    differs = "whose config has the same keys; its layers may compute otherwise"
    if left[nearest]:
        differs = f"which has no {shown(left[nearest])}"
    words += "" if words.endswith("?") else "."
    return f"{words} By its config it is nearest to {nearest}, {differs}"
