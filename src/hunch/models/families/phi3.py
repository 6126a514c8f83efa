"""Phi-3, Phi-3.5 and Phi-4: Llama with fused tensors, part of a head turned, long factors."""

from __future__ import annotations

from hunch.models.decoder import Decoder
from hunch.models.reading import Config, read_windows, refuse
from hunch.models.spec import ModelSpec, read_common


class Phi3(Decoder):
    """Its long-context files have two sets of rope factors: the one for the whole context is used
    at every length, so that a row's text does not depend on how long it will become."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config.get("original_max_position_embeddings")  # read with the rope factors, if any
        for key, only in (("full_attn_mod", 1), ("interpolate_factor", 1), ("lm_head_bias", False)):
            refuse(config, key, only)
        common = read_common(config, architecture)
        common["windows"] = read_windows(config, common["num_layers"])
        common["norm_eps"] = float(config.get("rms_norm_eps") or 1e-5)
        return ModelSpec(**common)
