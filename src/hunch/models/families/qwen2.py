"""Qwen2 and Qwen2.5: Llama with biases on q, k and v."""

from __future__ import annotations

from hunch.models.decoder import Decoder
from hunch.models.reading import Config, read_windows
from hunch.models.spec import ModelSpec, read_common


class Qwen2(Decoder):
    """The upper layers may have a sliding window, where the config switches it on."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        common = read_common(config, architecture)
        config.get("attention_bias")  # biases are always there; GGUFs say so
        common["windows"] = read_windows(
            config,
            common["num_layers"],
            is_on=bool(config.get("use_sliding_window", False)),
            first=int(config.get("max_window_layers", 0)),
        )
        # GGUF files say it; Hugging Face's config.json has no word for it.
        has_bias = bool(config.get("attention_bias", True))
        return ModelSpec(**common, has_qkv_bias=has_bias)
