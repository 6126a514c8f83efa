"""OLMo 1 to 3 and Hybrid, OLMoE, FlexOlmo, EXAONE 4, K-EXAONE, AFMoE, Kolibri: norms of branches,
of heads, or weightless."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.experts import ExpertNames, first_dense, read_deepseek_experts
from hunch.models.families.llama import Llama
from hunch.models.families.qwen import read_experts
from hunch.models.reading import (
    Config,
    Defaulted,
    read_float,
    read_int,
    read_rope,
    refuse,
    windows_of,
)
from hunch.models.recurrent import FULL, LINEAR, read_delta
from hunch.models.spec import ModelSpec

_NAMES = Names(attn_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
_EPS = {"rms_norm_eps": 1e-5}


class Olmo(Llama):
    """Layer norms without weights; q, k and v may be kept within limits."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "mlp_bias", False)
        return replace(
            super().read_config(config, architecture),
            norm="layer",
            norm_eps=1e-5,
            has_norm_weight=False,
            qkv_clip=read_clip(config),
        )


def read_clip(config: Config) -> float:
    return 0.0 if config.get("clip_qkv") is None else read_float(config, "clip_qkv")


class Olmo2(Llama):
    """Branches read the stream as it is."""

    names = _NAMES

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        return replace(
            super().read_config(Defaulted(config, _EPS), architecture),
            has_input_norms=False,
            has_branch_norms=True,
            has_qk_norm=True,
            is_qk_norm_whole=True,
        )


class Olmo3(Olmo2):
    """Three layers with a window to one without, which alone has its rope stretched."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"rope_theta": 5e5, "sliding_window": 4096})
        spec = super().read_config(config, architecture)
        windows = windows_of(config, spec.num_layers, 4)
        given = config.get("rope_parameters")
        local = given.get("sliding_attention") if isinstance(given, Mapping) else None
        return replace(
            spec,
            windows=windows,
            more_ropes=(read_rope(config, spec.head_dim, local or {"rope_type": "default"}),),
            rope_of=tuple(int(window is not None) for window in windows),
        )


class OlmoHybrid(Olmo2):
    """Three of four layers are gated delta nets, with norms before their halves."""

    names = replace(
        _NAMES,
        aliases=(
            ("attention_layer_norm", "input_layernorm"),
            ("feedforward_layer_norm", "post_attention_layernorm"),
        ),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "hidden_act", "silu")  # of the convolutions too
        for key in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor"):
            config.get(f"linear_{key}")  # of how it is drawn
        has_no_rope = "rope_theta" in config and config.get("rope_theta") is None
        given = Defaulted(config, {"rms_norm_eps": 1e-6})
        spec = super().read_config(given, architecture)
        num_keys = read_int(config, "linear_num_key_heads", spec.num_heads)
        k_dim = read_int(config, "linear_key_head_dim", int(0.75 * spec.width / num_keys))
        types = [FULL if layer % 4 == 3 else LINEAR for layer in range(spec.num_layers)]
        types = types if FULL in types else [*types[:-1], FULL]
        delta = read_delta(
            Defaulted({
                "layer_types": config.get("layer_types") or types,
                "linear_num_key_heads": num_keys,
                "linear_num_value_heads": config.get("linear_num_value_heads") or spec.num_heads,
                "linear_key_head_dim": k_dim,
                "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * k_dim,
            }, config),
            spec.num_layers,
        )  # fmt: skip
        beta_scale = 2.0 if config.get("linear_allow_neg_eigval", True) else 1.0
        delta["recurrence"] = replace(
            delta["recurrence"], beta_scale=beta_scale, read_eps=1e-5, is_apart=True
        )
        rope = RopeSpec(rope_type="none") if has_no_rope else spec.rope
        return replace(spec, **delta, rope=rope)


class Olmoe(Llama):
    """Experts in every layer, behind norms that stand where Llama has them."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "clip_qkv", None)  # it would limit what was normed
        spec = super().read_config(Defaulted(config, _EPS), architecture)
        inner = Defaulted(config, {"moe_intermediate_size": spec.ffn_width})
        experts = read_experts(inner, spec.num_layers)
        return replace(spec, experts=experts, has_qk_norm=True, is_qk_norm_whole=True)


class FlexOlmo(Olmo2):
    """OLMo 2's layers with experts."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"rms_norm_eps": 1e-6, "rope_theta": 5e5})
        spec = super().read_config(config, architecture)
        inner = Defaulted(config, {"moe_intermediate_size": spec.ffn_width})
        return replace(spec, experts=read_experts(inner, spec.num_layers))


class Exaone4(Llama):
    """Where some layers have a window (32B), the others do not turn their heads."""

    names = _NAMES

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, _EPS | {"sliding_window": 4096})
        spec = super().read_config(config, architecture)
        pattern = config.get("sliding_window_pattern")
        every = len(pattern) if isinstance(pattern, str) else pattern  # "LLLG" is one of four
        windows = windows_of(config, spec.num_layers, every or 4)
        is_mixed = config.get("sliding_window") is not None
        return replace(
            spec,
            has_input_norms=False,
            has_branch_norms=True,
            has_qk_norm=True,
            windows=windows,
            more_ropes=(RopeSpec(rope_type="none"),),
            rope_of=tuple(int(is_mixed and window is None) for window in windows),
        )


class ExaoneMoe(Exaone4):
    """K-EXAONE: norms before the branches, and DeepSeek's experts."""

    names = Names(
        experts=ExpertNames(shared="mlp.shared_experts."),
        aliases=(("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given = {"n_routed_experts": config.get("num_experts", 64), "first_k_dense_replace": 1}
        given |= {"n_shared_experts": config.get("num_shared_experts", 1)}
        config = Defaulted(config, given | {"routed_scaling_factor": 2.5})
        spec = super().read_config(config, architecture)
        experts = read_deepseek_experts(config, spec.num_layers)
        experts = replace(experts, layers=first_dense(config, spec.num_layers))
        return replace(spec, has_input_norms=True, has_branch_norms=False, experts=experts)


class Kolibri(Exaone4):
    """Norms before the branches too; logits with a bias choose experts, sigmoids weigh them."""

    names = Names(
        attn_out_norm="post_attn_norm",
        mlp_out_norm="post_ffn_norm",
        experts=ExpertNames(shared="mlp.shared_experts.", choice_bias="moe.router.expert_bias"),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "attention_bias", False)
        config = Defaulted(config, {
            "rms_norm_eps": 1e-6, "head_dim": 128, "sliding_window": 513,
            "sliding_window_pattern": 5, "num_experts_per_tok": 6,
            "moe_intermediate_size": 512, "intermediate_size": 1, "mlp_bias": False,
        })  # fmt: skip
        spec = super().read_config(config, architecture)
        experts = read_experts(config, spec.num_layers)
        return replace(
            spec,
            has_input_norms=True,
            experts=replace(
                experts,
                routing=replace(experts.routing, scores="chosen_sigmoid"),
                layers=(True,) * spec.num_layers,
                has_choice_bias=True,
                shared_width=read_int(config, "shared_expert_intermediate_size", 512),
            ),
        )


class Afmoe(Exaone4):
    """Trinity: norms before the branches too, gates of what heads read, DeepSeek's experts."""

    names = Names(
        attn_out_norm="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        mlp_out_norm="post_mlp_layernorm",
        attn_gate="self_attn.gate_proj",
        experts=ExpertNames(
            router="mlp.router.gate", choice_bias="mlp.expert_bias", shared="mlp.shared_experts."
        ),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "score_func", "sigmoid", None)
        refuse(config, "route_norm", True, None)
        refuse(config, "attention_bias", False)
        config.get("load_balance_coeff")  # of its training
        config = Defaulted(config, {
            "head_dim": 128, "sliding_window": 1024,
            "sliding_window_pattern": read_int(config, "global_attn_every_n_layers", 4),
            "n_routed_experts": config.get("num_experts", 64),
            "n_shared_experts": config.get("num_shared_experts", 2),
            "first_k_dense_replace": read_int(config, "num_dense_layers", 1),
            "routed_scaling_factor": config.get("route_scale", 1.0),
        })  # fmt: skip
        spec = super().read_config(config, architecture)
        experts = read_deepseek_experts(config, spec.num_layers)
        return replace(
            spec,
            has_input_norms=True,
            has_attn_gate=True,
            embed_scale=spec.width**0.5 if config.get("mup_enabled", False) else 1.0,
            experts=replace(experts, layers=first_dense(config, spec.num_layers)),
        )
