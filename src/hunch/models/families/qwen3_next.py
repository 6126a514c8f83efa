"""Qwen3-Next and Qwen3.5: three of four layers are gated delta nets, the fourth attends, gated.

Qwen3.5 comes with an MLP or with experts in every layer. Some files also read pictures:
only the text model is taken.
"""

from __future__ import annotations

from dataclasses import replace

from hunch.models.decoder import Decoder
from hunch.models.families.qwen import read_experts
from hunch.models.reading import (
    FROM_GGUF,
    Config,
    Defaulted,
    read_attn_biases,
    read_int,
    refuse,
    without_pictures,
)
from hunch.models.recurrent import read_delta
from hunch.models.spec import ModelSpec, read_common

_DEFAULTS = {"head_dim": 256, "partial_rotary_factor": 0.25}


class Qwen35(Decoder):
    """Norms mean 1 + w, but for the one inside a gated delta net."""

    turns_part = True

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "attn_output_gate", True)
        refuse(config, "hidden_act", "silu", "swish")  # recurrent layers have it too
        refuse(config, "mamba_ssm_dtype", "float32")  # of the states
        config = without_pictures(Defaulted(config, _DEFAULTS))
        common = read_common(config, architecture)
        return ModelSpec(
            **common,
            **read_delta(config, common["num_layers"]),
            has_qk_norm=True,
            has_attn_gate=True,
            **read_attn_biases(config),
            is_norm_shifted=not config.get(FROM_GGUF, False),
        )


class Qwen35Moe(Qwen35):
    """Experts in every layer, and a shared one, of which each token takes as much as it needs."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given = Defaulted(config, {"intermediate_size": config.get("moe_intermediate_size")})
        spec = super().read_config(given, architecture)
        experts = read_experts(Defaulted(config, {"norm_topk_prob": True}), spec.num_layers)
        shared = read_int(config, "shared_expert_intermediate_size")
        experts = replace(experts, shared_width=shared, is_shared_gated=True)
        return replace(spec, experts=experts)


class Qwen3Next(Qwen35Moe):
    """The same layers; its files fuse what goes into a gated delta net by key head."""
