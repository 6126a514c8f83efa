"""Granite: Llama with scales on embedding, residual branches, attention and logits."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.families.llama import Llama
from hunch.models.reading import Config, read_float
from hunch.models.spec import ModelSpec


class Granite(Llama):
    """The multipliers of its config stand where Llama has ones."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        return replace(
            super().read_config(config, architecture),
            embed_scale=read_float(config, "embedding_multiplier", 1.0),
            residual_scale=read_float(config, "residual_multiplier", 1.0),
            attn_scale=read_float(config, "attention_multiplier", 1.0),
            logits_scale=1.0 / read_float(config, "logits_scaling", 1.0),
        )
