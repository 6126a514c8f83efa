"""Qwen3: heads of q and k are normalised before they are rotated."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.families.qwen2 import Qwen2
from hunch.models.reading import Config
from hunch.models.spec import ModelSpec


class Qwen3(Qwen2):
    """Qwen2's windows; biases only where the config asks for them."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        has_bias = bool(config.get("attention_bias", False))
        return replace(
            super().read_config(config, architecture),
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            has_qk_norm=True,
        )
