"""Llama (2, 3.x), SmolLM2, TinyLlama and others of the same layout; Seed-OSS and ERNIE 4.5."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.decoder import Decoder
from hunch.models.reading import Config, Defaulted
from hunch.models.spec import ModelSpec, read_common


class Llama(Decoder):
    """The skeleton as it is; biases where the config asks for them."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        has_bias = bool(config.get("attention_bias", False))
        return ModelSpec(
            **read_common(config, architecture),
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            has_mlp_bias=bool(config.get("mlp_bias", False)),
            is_rope_interleaved=bool(config.get("rope_interleaved", False)),
        )


class SeedOss(Llama):
    """Biases of q, k and v; of the output where the config asks for them by another key."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        return replace(
            super().read_config(config, architecture),
            has_qkv_bias=bool(config.get("attention_bias", True)),
            has_out_bias=bool(config.get("attention_out_bias", False)),
        )


class Ernie(Llama):
    """ERNIE 4.5 (dense): pairs that are turned are neighbours; biases everywhere or nowhere."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        has_bias = bool(config.get("use_bias", False))
        return replace(
            super().read_config(Defaulted(config, {"rms_norm_eps": 1e-5}), architecture),
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            has_mlp_bias=has_bias,
            is_rope_interleaved=True,
            is_tied=bool(config.get("tie_word_embeddings", True)),
        )
