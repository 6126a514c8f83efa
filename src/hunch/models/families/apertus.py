"""Apertus: Llama with norms of q and k, and an MLP without a gate whose activation is learned."""

from __future__ import annotations

from hunch.models.build import Names
from hunch.models.families.llama import LLAMA3_ROPE, Llama


class Apertus(Llama):
    """Each layer has two learned numbers for its activation."""

    names = Names(
        attn_norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        unread=r"\.mlp\.act_fn\.(beta|eps)$",  # the same in every layer
    )
    keys = Llama.keys.but(
        given={"rms_norm_eps": 1e-5, "rope_theta": 1.2e7, "hidden_act": "xielu"},
        rope=LLAMA3_ROPE | {"factor": 8.0},
        only={"qk_norm": True, "post_norm": False},
        fields={"is_gated": False, "has_qk_norm": True},
    )
