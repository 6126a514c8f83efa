"""Apertus: Llama with norms of q and k, and an MLP without a gate whose activation is learned."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.build import Names
from hunch.models.families.llama import Llama, llama3_rope
from hunch.models.reading import Config, Defaulted, refuse
from hunch.models.spec import ModelSpec


class Apertus(Llama):
    """Each layer has learned two numbers of its activation."""

    names = Names(
        attn_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        unread=r"\.mlp\.act_fn\.(beta|eps)$",  # the same in every layer
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "qk_norm", True)
        refuse(config, "post_norm", False)
        given = {"rms_norm_eps": 1e-5, "rope_theta": 1.2e7, "hidden_act": "xielu"}
        given |= llama3_rope(config, 8.0)
        spec = super().read_config(Defaulted(config, given), architecture)
        return replace(spec, is_gated=False, has_qk_norm=True)
