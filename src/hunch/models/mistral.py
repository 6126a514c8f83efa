"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from hunch.models.decoder import Decoder
from hunch.models.spec import Config, ModelSpec, read_common, read_windows


class Mistral(Decoder):
    """A token sees the last `sliding_window` positions; null means all of them."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        common = read_common(config, architecture)
        common["windows"] = read_windows(config, common["num_layers"])
        return ModelSpec(**common)
