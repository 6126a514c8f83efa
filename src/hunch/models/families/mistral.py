"""Mistral: Llama with a sliding window."""

from __future__ import annotations

from hunch.models.decoder import Decoder
from hunch.models.reading import Config, read_windows
from hunch.models.spec import ModelSpec, read_common


class Mistral(Decoder):
    """A token sees the last `sliding_window` positions; null means all of them."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        common = read_common(config, architecture)
        common["windows"] = read_windows(config, common["num_layers"])
        return ModelSpec(**common)
