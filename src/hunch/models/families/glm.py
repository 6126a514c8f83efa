"""GLM-4 (9B, 32B), 4.5 and 4.6 with experts, and what writes in those that see: Llama with a part
of each head turned."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, first_dense, read_deepseek_experts
from hunch.models.reading import Config, Defaulted, read_int, refuse, without_pictures
from hunch.models.spec import ModelSpec, read_common

_DEFAULTS = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07}
_MOE_DEFAULTS = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}


class Glm(Decoder):
    """The models of 2024, without norms of what is added."""

    turns_part = True

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        common = read_common(Defaulted(config, _DEFAULTS), architecture)
        return ModelSpec(
            **common,
            has_qkv_bias=bool(config.get("attention_bias", True)),
            is_rope_interleaved=True,
        )


class Glm4(Glm):
    """The models of 2025 (0414), Z1 among them."""

    names = Names(attn_out_norm="post_self_attn_layernorm", mlp_out_norm="post_mlp_layernorm")

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        return replace(super().read_config(config, architecture), has_branch_norms=True)


class Glm4v(Glm4):
    """What writes in GLM-4.1V and 4.6V-Flash."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given = {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5}
        return super().read_config(without_pictures(Defaulted(config, given)), architecture)


class Glm4Moe(Decoder):
    """Its larger models norm the heads of q and k."""

    turns_part = True
    names = Names(experts=ExpertNames(shared="mlp.shared_experts."))

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, _MOE_DEFAULTS)
        common = read_common(config, architecture)
        num_layers = common["num_layers"]
        experts = read_deepseek_experts(config, num_layers)
        return ModelSpec(
            **common,
            experts=replace(experts, layers=first_dense(config, num_layers)),
            has_qk_norm=bool(config.get("use_qk_norm", False)),
            has_qkv_bias=bool(config.get("attention_bias", False)),
        )


class Glm4vMoe(Glm4Moe):
    """What writes in GLM-4.5V and 4.6V."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        size = read_int(config, "hidden_size") // read_int(config, "num_attention_heads")
        given = Defaulted(config, {"head_dim": size})
        return super().read_config(without_pictures(given), architecture)


class SolarOpen(Glm4Moe):
    """Experts in every layer, and whole heads are turned."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "use_qk_norm", False)
        given = {"intermediate_size": config.get("moe_intermediate_size"), "rope_theta": 1e6}
        given |= {"partial_rotary_factor": 1.0}
        spec = super().read_config(Defaulted(config, given), architecture)
        assert spec.experts is not None
        return replace(spec, experts=replace(spec.experts, layers=(True,) * spec.num_layers))
