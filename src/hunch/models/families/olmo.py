"""OLMo 1 to 3 and Hybrid, OLMoE, FlexOlmo, EXAONE 4, K-EXAONE, AFMoE, Kolibri: norms of branches,
of heads, or weightless."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hunch.models.build import Names
from hunch.models.experts import (
    ExpertNames,
    read_deepseek_experts,
    read_qwen_experts,
    read_shared_experts,
)
from hunch.models.families.llama import Llama
from hunch.models.reading import (
    FULL,
    LINEAR,
    STILL,
    Config,
    Defaulted,
    last_of,
    read_int,
    read_local_rope,
)
from hunch.models.recurrent import read_delta
from hunch.models.spec import ModelSpec

_NAMES = Names(attn_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm")
_BRANCH_NORMS = {"has_input_norms": False, "has_branch_norms": True, "has_qk_norm": True}


class Olmo(Llama):
    """Layer norms without weights; q, k and v may be clipped."""

    keys = Llama.keys.but(
        only={"mlp_bias": False},
        numbers={"qkv_clip": "clip_qkv"},
        fields={"norm": "layer", "norm_eps": 1e-5, "has_norm_weight": False},
    )


class Olmo2(Llama):
    """Branches read the stream without a norm."""

    names = _NAMES
    keys = Llama.keys.but(
        given={"rms_norm_eps": 1e-5}, fields=_BRANCH_NORMS | {"is_qk_norm_whole": True}
    )


class Olmo3(Olmo2):
    """Three layers with a window to one without, the only one whose rope is stretched."""

    keys = Olmo2.keys.but(
        given={"rope_theta": 5e5, "sliding_window": 4096},
        sees_all=lambda _, num_layers: last_of(4, num_layers),
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        local = read_local_rope(config, spec.head_dim, {"rope_type": "default"})
        return spec.with_rope(local, (not sees_all for sees_all in spec.sees_all))


class OlmoHybrid(Olmo2):
    """Three of four layers are gated delta nets, with norms before their halves."""

    names = replace(
        _NAMES,
        aliases=(
            ("attention_layer_norm", "input_layernorm"),
            ("feedforward_layer_norm", "post_attention_layernorm"),
        ),
    )
    keys = Olmo2.keys.but(
        given={"rms_norm_eps": 1e-6, "linear_allow_neg_eigval": True},
        only={"hidden_act": "silu"},  # of the convolutions too
        unused={  # of initialisation
            *("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max"),
            "linear_dt_init_floor",
        },
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        num_keys = read_int(config, "linear_num_key_heads", spec.num_heads)
        k_dim = read_int(config, "linear_key_head_dim", int(0.75 * spec.width / num_keys))
        types = [FULL if layer % 4 == 3 else LINEAR for layer in range(spec.num_layers)]
        types = types if FULL in types else [*types[:-1], FULL]
        found = {
            "layer_types": config.get("layer_types") or types,
            "linear_num_key_heads": num_keys,
            "linear_num_value_heads": config.get("linear_num_value_heads") or spec.num_heads,
            "linear_key_head_dim": k_dim,
            "linear_value_head_dim": config.get("linear_value_head_dim") or 2 * k_dim,
        }
        delta = read_delta(Defaulted(found, config), spec.num_layers)
        beta_scale = 2.0 if config.get("linear_allow_neg_eigval") else 1.0
        delta["recurrence"] = replace(
            delta["recurrence"], beta_scale=beta_scale, read_eps=1e-5, is_apart=True
        )
        has_no_rope = "rope_theta" in config and config.get("rope_theta") is None
        return replace(spec, **delta, rope=STILL if has_no_rope else spec.rope)


class Olmoe(Llama):
    """Experts in every layer; norms as in Llama."""

    keys = Llama.keys.but(
        given={"rms_norm_eps": 1e-5},
        named={"moe_intermediate_size": "intermediate_size", "num_experts": "num_local_experts"},
        only={"clip_qkv": None},  # it would clip what was normed
        fields={"has_qk_norm": True, "is_qk_norm_whole": True},
        experts=read_qwen_experts,
    )


class FlexOlmo(Olmoe):
    """OLMo 2's layers with experts."""

    names = _NAMES
    keys = Olmoe.keys.but(given={"rms_norm_eps": 1e-6, "rope_theta": 5e5}, fields=_BRANCH_NORMS)


def _last_of_pattern(config: Config, num_layers: int) -> list[bool]:
    pattern = config.get("sliding_window_pattern")
    every = len(pattern) if isinstance(pattern, str) else pattern  # "LLLG" is one of four
    return last_of(every or 4, num_layers)


class Exaone4(Llama):
    """If some layers have a window (32B), the others do not rotate their heads."""

    names = _NAMES
    keys = Llama.keys.but(
        given={"rms_norm_eps": 1e-5, "sliding_window": 4096},
        fields=_BRANCH_NORMS,
        sees_all=_last_of_pattern,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        is_mixed = config.get("sliding_window") is not None
        return spec.with_rope(STILL, (is_mixed and sees_all for sees_all in spec.sees_all))


class ExaoneMoe(Exaone4):
    """K-EXAONE: norms before the branches, and DeepSeek's experts."""

    names = Names(
        experts=ExpertNames(shared="mlp.shared_experts."),
        aliases=(("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),),
    )
    keys = Exaone4.keys.but(
        given={
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
        },
        named={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
        fields={"has_input_norms": True, "has_branch_norms": False},
        experts=read_deepseek_experts,
    )


class Kolibri(Exaone4):
    """Norms before the branches too; logits with a bias choose experts, sigmoids weigh them."""

    names = Names(
        attn_out_norm="post_attn_norm",
        mlp_out_norm="post_ffn_norm",
        experts=ExpertNames(shared="mlp.shared_experts.", choice_bias="moe.router.expert_bias"),
    )
    keys = Exaone4.keys.but(
        given={
            "rms_norm_eps": 1e-6, "head_dim": 128, "sliding_window": 513,
            "sliding_window_pattern": 5, "num_experts_per_tok": 6, "moe_intermediate_size": 512,
            "intermediate_size": 1, "shared_expert_intermediate_size": 512,
        },
        named={"num_experts": "num_local_experts"},
        only={"attention_bias": False},
        fields={"has_input_norms": True},
        experts=partial(read_shared_experts, scores="chosen_sigmoid", has_choice_bias=True),
    )  # fmt: skip

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        assert spec.experts is not None
        experts = replace(spec.experts, layers=(True,) * spec.num_layers)
        return replace(super().read_more(spec, config), experts=experts)


class Afmoe(ExaoneMoe):
    """Trinity: norms before the branches too, gated heads, DeepSeek's experts."""

    names = Names(
        attn_out_norm="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        mlp_out_norm="post_mlp_layernorm",
        attn_gate="self_attn.gate_proj",
        experts=ExpertNames(
            router="mlp.router.gate", choice_bias="mlp.expert_bias", shared="mlp.shared_experts."
        ),
    )
    keys = ExaoneMoe.keys.but(
        given={
            "head_dim": 128, "sliding_window": 1024, "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
        },
        named={
            "sliding_window_pattern": "global_attn_every_n_layers",
            "first_k_dense_replace": "num_dense_layers",
            "routed_scaling_factor": "route_scale",
        },
        only={"score_func": ("sigmoid", None), "route_norm": (True, None), "attention_bias": False},
        unused={"load_balance_coeff"},  # of its training
        fields={"has_branch_norms": True, "has_attn_gate": True},
    )  # fmt: skip

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        scale = spec.width**0.5 if config.get("mup_enabled") else 1.0
        return replace(super().read_more(spec, config), embed_scale=scale)
