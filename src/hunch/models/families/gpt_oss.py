"""gpt-oss: windows and sinks in attention, biases everywhere, experts that clip."""

from __future__ import annotations

from functools import partial

from hunch.kernels.activation import CLIP_LIMIT, CLIP_SLOPE
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_wide_experts
from hunch.models.keys import ATTN_BIASES, Keys
from hunch.models.reading import last_of


class GptOss(Decoder):
    """Softmax over the chosen experts alone; rows of gate and up alternate in the file."""

    names = Names(experts=ExpertNames(router="mlp.router", is_interleaved=True))
    keys = Keys(
        given={
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "num_experts_per_tok": 4,
        },
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        named={"num_experts": "num_local_experts"},
        # Its experts have an activation of their own.
        only={"hidden_act": "silu", "swiglu_limit": CLIP_LIMIT, "swiglu_alpha": CLIP_SLOPE},
        unused={"initial_context_length", "experts_per_token"},  # repeat other keys
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias"),
        fields={"activation": "clipped", "has_sinks": True},
        sees_all=lambda _, num_layers: last_of(2, num_layers),
        experts=partial(read_wide_experts, scores="chosen", has_router_bias=True, has_bias=True),
    )
