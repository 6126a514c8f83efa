"""Granite (4 without Mamba layers): Llama with scales on embedding, residual, scores and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hunch.errors import UnsupportedModelError
from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.families.llama import Llama
from hunch.models.reading import Config, read_float, read_int, refuse
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


class GraniteHybrid(Granite):
    """Granite 4 (micro): files of the family that also has Mamba layers and experts."""

    names: ClassVar[Names] = Names(
        gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear"
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        others = {*(config.get("layer_types") or ["mamba"])} - {"attention", "full_attention"}
        if others:
            raise UnsupportedModelError(
                f"{architecture}: layers of kind {', '.join(sorted(others))} are not supported; "
                "Granite 4 models whose layers all attend (micro, 350m, 1b) are"
            )
        refuse(config, "num_local_experts", 0)
        refuse(config, "normalization_function", "rmsnorm")
        refuse(config, "position_embedding_type", "rope", "nope")
        for key in config:  # of the layers and experts it has not
            if key.startswith(("mamba_", "time_step_")) or key in ("num_experts_per_tok",):
                config.get(key)
        spec = super().read_config(config, architecture)
        if config.get("position_embedding_type") != "rope":
            spec = replace(spec, rope=RopeSpec(kind="none"))
        return replace(spec, ffn_width=read_int(config, "shared_intermediate_size", 1024))
