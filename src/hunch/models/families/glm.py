"""GLM-4 (9B, 32B), 4.5 and 4.6 with experts, and the text models of vision-language ones: Llama
with a part of each head rotated."""

from __future__ import annotations

from hunch.layers.experts import ExpertSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_deepseek_experts
from hunch.models.keys import Keys
from hunch.models.reading import Config, Defaulted, read_int
from hunch.models.spec import ModelSpec


class Glm(Decoder):
    """The models of 2024, without norms of what is added to the stream."""

    turns_part = True
    keys = Keys(
        given={"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "attention_bias": True},
        flags={"has_qkv_bias": "attention_bias"},
        fields={"is_rope_interleaved": True},
    )


class Glm4(Glm):
    """The models of 2025 (0414), Z1 among them."""

    names = Names(attn_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")
    keys = Glm.keys.but(fields={"has_branch_norms": True})


class Glm4v(Glm4):
    """The text model of GLM-4.1V and 4.6V-Flash."""

    keys = Glm4.keys.but(
        given={"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5}, reads_pictures=True
    )


class Glm4Moe(Decoder):
    """Its larger models norm the heads of q and k."""

    turns_part = True
    names = Names(experts=ExpertNames(shared="mlp.shared_experts."))
    keys = Keys(
        given={"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
        flags={"has_qkv_bias": "attention_bias", "has_qk_norm": "use_qk_norm"},
        experts=read_deepseek_experts,
    )


class Glm4vMoe(Glm4Moe):
    """The text model of GLM-4.5V and 4.6V."""

    keys = Glm4Moe.keys.but(reads_pictures=True)

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        size = read_int(config, "hidden_size") // read_int(config, "num_attention_heads")
        return super().read_config(Defaulted(config, {"head_dim": size}), architecture)


def _read_in_all_layers(config: Config, num_layers: int) -> ExpertSpec:
    """Experts in every layer, whatever a file has for layers without."""
    all_sparse = {"mlp_layer_types": ["sparse"] * num_layers}
    return read_deepseek_experts(Defaulted(all_sparse, config), num_layers)


class SolarOpen(Glm4Moe):
    """Experts in every layer, and whole heads are rotated."""

    keys = Glm4Moe.keys.but(
        given={"rope_theta": 1e6, "partial_rotary_factor": 1.0},
        only={"use_qk_norm": False},
        experts=_read_in_all_layers,
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given = {"intermediate_size": config.get("moe_intermediate_size")}
        return super().read_config(Defaulted(config, given), architecture)
