"""Command R, R7B and A: one layer norm without a bias for both branches, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from hunch.layers.rope import RopeSpec
from hunch.models.decoder import Decoder
from hunch.models.reading import (
    Config,
    Defaulted,
    read_attn_biases,
    read_float,
    read_int,
    refuse,
    windows_of,
)
from hunch.models.spec import ModelSpec, read_common

_DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
_THETA = {"CohereForCausalLM": 500_000.0, "Cohere2ForCausalLM": 10_000.0}


class Cohere(Decoder):
    """Command R+ norms its heads too, each with weights of its own."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config.get("model_length")  # what it was trained at
        config = Defaulted(config, _DEFAULTS | {"rope_theta": _THETA.get(architecture)})
        common = read_common(config, architecture)
        common["norm_eps"] = read_float(config, "layer_norm_eps")
        has_head_norms = bool(config.get("use_qk_norm", False))
        return ModelSpec(
            **common,
            norm="layer",
            has_norm_bias=False,
            has_qk_norm=has_head_norms,
            is_qk_norm_centred=has_head_norms,
            is_qk_norm_own=has_head_norms,
            is_parallel=True,
            has_mlp_norm=False,
            is_rope_interleaved=True,
            **read_attn_biases(config),
            logits_scale=read_float(config, "logit_scale"),
        )


class Cohere2(Cohere):
    """Three of four layers have a window and turn their heads; the fourth does neither."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        for key in ("use_gated_activation", "use_parallel_block", "use_embedding_sharing"):
            refuse(config, key, True)
        refuse(config, "position_embedding_type", "rope_gptj")
        refuse(config, "rotary_pct", 1.0)
        refuse(config, "order_of_interleaved_layers", "local_attn_first")
        spec = super().read_config(config, architecture)
        config = Defaulted(config, {"sliding_window": 4096})
        every = read_int(config, "sliding_window_pattern", read_int(config, "layer_switch", 4))
        windows = windows_of(config, spec.num_layers, every)
        return replace(
            spec,
            windows=windows,
            more_ropes=(RopeSpec(rope_type="none"),),
            rope_of=tuple(int(window is None) for window in windows),
        )
