"""What a model is: its config.json read once, every value checked, nothing left to guess later."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.kernels.activation import ACTIVATIONS
from hunch.layers.experts import ExpertSpec
from hunch.layers.rope import RopeSpec
from hunch.registry import MODELS, resolve, unknown

Config = Mapping[str, Any]


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
    norm: str = "rms"  # rms, layer
    norm_eps: float = 1e-6
    activation: str = "silu"
    is_gated: bool = True  # the MLP has a gate
    rope: RopeSpec | None = None  # None: positions are learned, and added to the embedding
    windows: tuple[int | None, ...] = ()  # per layer: positions a token sees; None: all
    is_tied: bool = False  # the embedding is the output matrix too
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    embed_width: int = 0  # of the embedding, where it is projected to `width`
    is_post_norm: bool = False  # norms stand after the residual sums
    has_final_norm: bool = True
    experts: ExpertSpec | None = None  # in place of some layers' MLPs
    dtype: str | None = None  # precision the file was saved in

    @staticmethod
    def from_config(config: Config) -> ModelSpec:
        """Read a config.json of Hugging Face's form."""
        names = config.get("architectures") or []
        if not isinstance(names, list | tuple) or not names:
            raise ModelFormatError("config.json names no architectures")
        if names[0] not in MODELS:
            raise UnsupportedModelError(f"architecture {unknown(str(names[0]), MODELS)}")
        if config.get("quantization_config"):
            method = dict(config["quantization_config"]).get("quant_method", "unknown")
            raise UnsupportedModelError(
                f"quantization_config ({method}) is not supported; use the plain model or a GGUF"
            )
        family = resolve(MODELS, names[0])
        spec: ModelSpec = family.read_config(config, str(names[0]))
        spec.check()
        return spec

    def check(self) -> None:
        """Values that contradict each other."""
        if self.num_heads % self.num_kv_heads:
            raise ModelFormatError(
                f"num_attention_heads={self.num_heads} is not a multiple of "
                f"num_key_value_heads={self.num_kv_heads}"
            )
        if self.rope is not None and self.head_dim % 2:
            raise ModelFormatError(f"head_dim={self.head_dim} must be even to be rotated")
        if self.activation not in ACTIVATIONS:
            raise UnsupportedModelError(f"activation {unknown(self.activation, ACTIVATIONS)}")
        if len(self.windows) != self.num_layers:
            raise ModelFormatError(
                f"layer_types lists {len(self.windows)} layers, num_hidden_layers={self.num_layers}"
            )
        if self.experts is not None:
            self.experts.check()
        if self.rope and self.rope.factors and len(self.rope.factors) != self.head_dim // 2:
            raise ModelFormatError(
                f"{len(self.rope.factors)} rope factors for a head of {self.head_dim}"
            )


def read_common(config: Config, architecture: str) -> dict[str, Any]:
    """The fields that every family with Llama's keys shares, as arguments of ModelSpec."""
    width = read_int(config, "hidden_size")
    num_heads = read_int(config, "num_attention_heads")
    num_layers = read_int(config, "num_hidden_layers")
    if config.get("head_dim") is None and width % num_heads:
        raise ModelFormatError(
            f"hidden_size={width} is not a multiple of num_attention_heads={num_heads}"
        )
    return {
        "architecture": architecture,
        "vocab_size": read_int(config, "vocab_size"),
        "width": width,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": read_int(config, "num_key_value_heads", num_heads),
        "head_dim": read_int(config, "head_dim", width // num_heads),
        "ffn_width": read_int(config, "intermediate_size"),
        "max_len": read_int(config, "max_position_embeddings", 2048),
        "norm_eps": read_float(config, "rms_norm_eps", 1e-6),
        "activation": str(config.get("hidden_act", "silu")),
        "rope": read_rope(config),
        "windows": (None,) * num_layers,
        "is_tied": bool(config.get("tie_word_embeddings", False)),
        "dtype": config.get("torch_dtype") or config.get("dtype"),
    }


# Far above any model there is. Without them a damaged file fails deep inside an allocation, or
# after an hour of building layers.
_MOST = {"num_hidden_layers": 10_000, "num_attention_heads": 100_000, "head_dim": 1 << 20}
_MOST_OTHERS = 1 << 28


def read_int(config: Config, key: str, default: int | None = None) -> int:
    """A positive whole number of a plausible size."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise ModelFormatError(f"config.json lacks {key}")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFormatError(f"config.json: {key}={value!r} must be a whole number, 1 or more")
    most = _MOST.get(key, _MOST_OTHERS)
    if value > most:
        raise ModelFormatError(f"config.json: {key}={value} is more than any model has ({most})")
    return value


def read_float(config: Config, key: str, default: float | None = None) -> float:
    """A positive number."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise ModelFormatError(f"config.json lacks {key}")
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0 or not math.isfinite(value):
        raise ModelFormatError(f"config.json: {key}={value!r} must be a number above 0")
    return float(value)


def read_rope(config: Config) -> RopeSpec:
    """`rope_parameters`, or the older `rope_theta` with `rope_scaling`."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ModelFormatError(f"config.json: rope settings {given!r} must be an object")
    rope = {"rope_theta": config.get("rope_theta"), **given}
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if share != 1.0:
        raise UnsupportedModelError(f"partial_rotary_factor={share} is not supported; only 1")
    kind = rope.get("rope_type", rope.get("type")) or "default"
    readers: dict[str, Callable[[Config], dict[str, Any]]] = {
        "default": lambda _: {},
        "linear": lambda r: {"factor": read_float(r, "factor")},
        "llama3": _read_llama3,
        "yarn": lambda r: _read_yarn(r, config),
        "factors": lambda r: {"factors": tuple(float(f) for f in r["factors"])},
    }
    if kind not in readers:
        raise UnsupportedModelError(f"rope_type {unknown(str(kind), readers)}")
    return RopeSpec(
        theta=read_float(rope, "rope_theta", 10000.0), kind=str(kind), **readers[kind](rope)
    )


def _read_llama3(rope: Config) -> dict[str, Any]:
    return {
        "factor": read_float(rope, "factor"),
        "low_freq_factor": read_float(rope, "low_freq_factor"),
        "high_freq_factor": read_float(rope, "high_freq_factor"),
        "original_len": read_int(rope, "original_max_position_embeddings"),
    }


def _read_yarn(rope: Config, config: Config) -> dict[str, Any]:
    if rope.get("mscale") or rope.get("mscale_all_dim"):
        raise UnsupportedModelError("rope_type 'yarn' with mscale is not supported")
    max_len = read_int(config, "max_position_embeddings", 2048)
    attention = rope.get("attention_factor")
    return {
        "factor": read_float(rope, "factor"),
        "original_len": read_int(rope, "original_max_position_embeddings", max_len),
        "attention_factor": None if attention is None else read_float(rope, "attention_factor"),
        "beta_fast": read_float(rope, "beta_fast", 32.0),
        "beta_slow": read_float(rope, "beta_slow", 1.0),
        "is_truncated": bool(rope.get("truncate", True)),
    }


def read_windows(
    config: Config, num_layers: int, is_on: bool = True, first: int = 0
) -> tuple[int | None, ...]:
    """Per layer: by `layer_types` where given, else from layer `first` on."""
    if not is_on or config.get("sliding_window") is None:
        return (None,) * num_layers
    window = read_int(config, "sliding_window")
    types = config.get("layer_types")
    if types is None:
        return tuple(window if layer >= first else None for layer in range(num_layers))
    for kind in types:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedModelError(f"layer type {kind!r} is not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
