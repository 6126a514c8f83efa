"""StableLM (3B, 2, Zephyr): Llama with layer norms and a quarter of each head turned."""

from __future__ import annotations

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.reading import Config, Defaulted, read_float, refuse
from hunch.models.spec import ModelSpec, read_common


class StableLM(Decoder):
    """Attention and MLP may read the same norm (`use_parallel_residual`); 2-12B norms its heads."""

    turns_part = True
    names = Names(q_norm="self_attn.q_layernorm.norms.{}", k_norm="self_attn.k_layernorm.norms.{}")

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "rotary_scaling_factor", 1.0)
        config = Defaulted(config, {"partial_rotary_factor": 0.25})
        common = read_common(config, architecture)
        common["norm_eps"] = read_float(config, "layer_norm_eps", 1e-5)
        is_parallel = bool(config.get("use_parallel_residual", False))
        has_head_norms = bool(config.get("qk_layernorm", False))
        return ModelSpec(
            **common,
            norm="layer",
            has_qk_norm=has_head_norms,
            is_qk_norm_centred=has_head_norms,
            is_qk_norm_own=has_head_norms,
            has_qkv_bias=bool(config.get("use_qkv_bias", False)),
            is_parallel=is_parallel,
            has_mlp_norm=not is_parallel,
        )
