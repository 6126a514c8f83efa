"""Persimmon: layer norms, of heads too, a plain MLP, and half of each head turned."""

from __future__ import annotations

from typing import ClassVar

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.reading import Config, Defaulted, read_float
from hunch.models.spec import ModelSpec, read_common

_DEFAULTS = {"partial_rotary_factor": 0.5, "hidden_act": "relu2"}


class Persimmon(Decoder):
    """q, k and v of a head stand side by side in the file."""

    turns_part: ClassVar[bool] = True
    names: ClassVar[Names] = Names(
        final_norm="model.final_layernorm",
        qkv="self_attn.query_key_value",
        out="self_attn.dense",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        has_head_norms = bool(config.get("qk_layernorm", True))
        common = read_common(Defaulted(config, _DEFAULTS), architecture)
        common["norm_eps"] = read_float(config, "layer_norm_eps", 1e-5)
        return ModelSpec(
            **common,
            norm="layer",
            has_qk_norm=has_head_norms,
            is_qk_norm_centred=has_head_norms,
            has_qk_norm_bias=has_head_norms,
            is_gated=False,
            has_qkv_bias=True,
            has_out_bias=True,
            has_mlp_bias=True,
            num_qkv_groups=common["num_heads"],
        )
