"""gpt-oss: windows and sinks in attention, biases everywhere, experts that clip."""

from __future__ import annotations

from typing import Any

from hunch.errors import UnsupportedModelError
from hunch.kernels.activation import CLIP_LIMIT, CLIP_SLOPE
from hunch.kernels.experts import Routing
from hunch.layers.experts import ExpertSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_count
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

_ROPE = {  # of a config that says nothing of it
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


class GptOss(Decoder):
    """Softmax over the chosen experts alone; gate and up lie by turns in the file."""

    names = Names(
        experts=ExpertNames(router="mlp.router", is_interleaved=True),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given: dict[str, Any] = {
            "sliding_window": 128,
            "rope_theta": 150_000.0,
            "rms_norm_eps": 1e-5,
        }
        if not any(config.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling")):
            given["rope_scaling"] = _ROPE
        config = Defaulted(config, given)
        common = read_common(config, architecture)
        refuse(config, "hidden_act", "silu", None)  # its experts have one of their own
        for key, known in (("swiglu_limit", CLIP_LIMIT), ("swiglu_alpha", CLIP_SLOPE)):
            if read_float(config, key, known) != known:
                raise UnsupportedModelError(f"{key}={config[key]} is not supported; only {known}")
        config.get("initial_context_length")  # as rope_scaling has it
        config.get("experts_per_token")  # as num_experts_per_tok
        common |= {
            "activation": "clipped",
            "windows": windows_of(config, common["num_layers"], 2),
            **read_attn_biases(config, default=True),
            "has_sinks": True,
        }
        routing = Routing(
            num_experts=read_count(config, "num_local_experts", "num_experts"),
            num_chosen=read_int(config, "num_experts_per_tok", 4),
            scores="chosen",
        )
        experts = ExpertSpec(
            routing=routing,
            width=common["ffn_width"],
            layers=(True,) * common["num_layers"],
            has_router_bias=True,
            has_bias=True,
        )
        return ModelSpec(**common, experts=experts)
