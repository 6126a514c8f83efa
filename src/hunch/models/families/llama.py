"""Llama (2, 3.x), SmolLM2, TinyLlama and others of the same layout."""

from __future__ import annotations

from hunch.models.decoder import Decoder
from hunch.models.reading import Config
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
