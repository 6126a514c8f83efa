"""StableLM (3B, 2, Zephyr): Llama with layer norms and a quarter of each head rotated."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.keys import Keys
from hunch.models.reading import Config
from hunch.models.spec import ModelSpec

HEAD_NORMS = ("has_qk_norm", "is_qk_norm_centred", "is_qk_norm_own")


class StableLM(Decoder):
    """Attention and MLP may read the same norm (`use_parallel_residual`); 2-12B norms its heads."""

    turns_part = True
    names = Names(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}")
    keys = Keys(
        given={"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
        numbers={"norm_eps": "layer_norm_eps"},
        only={"rotary_scaling_factor": 1.0},
        flags={
            **dict.fromkeys(HEAD_NORMS, "qk_layernorm"),
            "has_qkv_bias": "use_qkv_bias",
            "is_parallel": "use_parallel_residual",
        },
        fields={"norm": "layer"},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        return replace(spec, has_mlp_norm=not spec.is_parallel)
