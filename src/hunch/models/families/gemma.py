"""Gemma 1, 2 and 3 (text): scaled embedding, norms of 1 + w, and norms around both branches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.reading import (
    FROM_GGUF,
    Config,
    Defaulted,
    read_attn_biases,
    read_float,
    read_int,
    read_rope,
    read_windows,
    refuse,
)
from hunch.models.spec import ModelSpec, read_common

_DEFAULTS = {  # of Gemma 3: its files leave out what does not differ
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "rope_theta": 1e6,
}


class Gemma(Decoder):
    """Llama's layers with a GELU."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        common = read_common(config, architecture)
        # Files of the first Gemma say "gelu" in hidden_act and mean its approximation.
        older = config.get("hidden_act", "gelu")
        older = "gelu_pytorch_tanh" if older == "gelu" else older
        common["activation"] = str(config.get("hidden_activation") or older)
        common["is_tied"] = bool(config.get("tie_word_embeddings", True))
        refuse(config, "use_bidirectional_attention", False)
        return ModelSpec(
            **common,
            embed_scale=float(common["width"]) ** 0.5,
            **read_attn_biases(config),
            is_norm_shifted=not config.get(FROM_GGUF, False),
        )


class Gemma2(Gemma):
    """Windows on every second layer, caps on scores and logits."""

    caps: ClassVar[tuple[float | None, ...]] = (
        50.0,
        30.0,
    )  # where a file does not say them: of scores, of logits
    names = Names(
        attn_out_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_out_norm="post_feedforward_layernorm",
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"sliding_window": 4096})
        spec = super().read_config(config, architecture)
        config.get("sliding_window_size")  # sliding_window once more
        return replace(
            spec,
            has_branch_norms=True,
            attn_scale=read_float(config, "query_pre_attn_scalar", 256.0) ** -0.5,
            attn_cap=_cap(config, "attn_logit_softcapping", cls.caps[0]),
            logits_cap=_cap(config, "final_logit_softcapping", cls.caps[1]),
            windows=_windows(config, spec.num_layers, 2),
        )


class Gemma3(Gemma2):
    """Five layers with a window to one without; each kind turns its heads by its own theta."""

    caps: ClassVar[tuple[float | None, ...]] = (None, None)

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, _DEFAULTS)
        refuse(config, "attn_logit_softcapping", None)
        spec = super().read_config(config, architecture)
        pattern = config.get("_sliding_window_pattern")  # under either name
        windows = _windows(config, spec.num_layers, pattern or 6)
        local = {"rope_theta": read_float(config, "rope_local_base_freq", 1e4)}
        given = config.get("rope_parameters")
        if isinstance(given, Mapping) and "sliding_attention" in given:
            local = given["sliding_attention"]
        return replace(
            spec,
            has_qk_norm=True,
            windows=windows,
            more_ropes=(read_rope(config, spec.head_dim, local),),
            rope_of=tuple(int(window is not None) for window in windows),
        )


class VaultGemma(Gemma2):
    """Nothing is normed before it is added."""

    names = Names(mlp_norm="pre_feedforward_layernorm")

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        return replace(super().read_config(config, architecture), has_branch_norms=False)


def _cap(config: Config, key: str, default: float | None) -> float:
    return 0.0 if config.get(key, default) is None else read_float(config, key, default)


def _windows(config: Config, num_layers: int, pattern: int) -> tuple[int | None, ...]:
    """By `layer_types`; older files say how many layers there are to one without a window."""
    if config.get("sliding_window_pattern") is not None:
        pattern = read_int(config, "sliding_window_pattern")
    if config.get("layer_types") is not None or config.get("sliding_window") is None:
        return read_windows(config, num_layers)
    window = read_int(config, "sliding_window")
    return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
