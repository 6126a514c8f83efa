"""Qwen3-Next and Qwen3.5: three of four layers are gated delta nets, the fourth attends, gated.

Qwen3.5 comes with an MLP or with experts in every layer. Some files also read pictures:
only the text model is taken.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hunch.models.experts import read_shared_experts
from hunch.models.families.llama import Llama
from hunch.models.reading import Config, Defaulted
from hunch.models.recurrent import read_delta
from hunch.models.spec import ModelSpec


class Qwen35(Llama):
    """Norms mean 1 + w, but for the one inside a gated delta net."""

    turns_part = True
    keys = Llama.keys.but(
        given={"head_dim": 256, "partial_rotary_factor": 0.25},
        only={
            "attn_output_gate": True,
            "hidden_act": ("silu", "swish"),  # recurrent layers have it too
            "mamba_ssm_dtype": "float32",  # of the states
            "mlp_bias": False,
            "rope_interleaved": False,
        },
        fields={"has_qk_norm": True, "has_attn_gate": True, "is_norm_shifted": True},
        reads_pictures=True,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        return replace(spec, **read_delta(config, spec.num_layers))


class Qwen35Moe(Qwen35):
    """Experts in every layer, and a shared one, with a gate for each token."""

    keys = Qwen35.keys.but(
        given={"norm_topk_prob": True},
        named={"num_experts": "num_local_experts"},
        experts=partial(read_shared_experts, is_shared_gated=True),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given = {"intermediate_size": config.get("moe_intermediate_size")}
        return super().read_config(Defaulted(config, given), architecture)


class Qwen3Next(Qwen35Moe):
    """The same layers; its files fuse the inputs of a gated delta net by key head."""
