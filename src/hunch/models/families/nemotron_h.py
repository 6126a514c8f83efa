"""Nemotron-H, Nano 2, 3 Nano, 3 Super: a layer is just one of Mamba 2, attention, MLP, experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.layers.experts import ExpertSpec
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_deepseek_experts
from hunch.models.families.mamba import Mamba1
from hunch.models.keys import ATTN_BIASES, Keys
from hunch.models.mamba import MAMBA_NAMES, is_mamba, read_layer_types, read_mamba
from hunch.models.reading import STILL, Config, Defaulted, read_count, read_int, refuse
from hunch.models.spec import ModelSpec

_MLP, _EXPERTS = "mlp", "moe"
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": _MLP, "E": _EXPERTS}
# Experts have no gate: the square of relu(x) is relu(x) * x, so the matrix that x comes from is
# read as gate and as up.
_EXPERT_NAMES = ExpertNames(
    router="mixer.gate",
    choice_bias="mixer.gate.e_score_correction_bias",
    gate="mixer.experts.{}.up_proj",
    up="mixer.experts.{}.up_proj",
    down="mixer.experts.{}.down_proj",
    shared="mixer.shared_experts.",
    shared_first="up_proj",
    all_up="mixer.experts.up_proj",
    all_down="mixer.experts.down_proj",
    is_turned=False,
)


class NemotronH(Decoder):
    """Heads are not rotated; MLPs are of squared ReLU, without a gate."""

    names = replace(
        Mamba1.names,
        q="mixer.q_proj",
        k="mixer.k_proj",
        v="mixer.v_proj",
        out="mixer.o_proj",
        up="mixer.up_proj",
        down="mixer.down_proj",
        experts=_EXPERT_NAMES,
    )

    keys = Keys(
        given={
            "rms_norm_eps": 1e-5,
            "mamba_n_heads": 128,
            "mamba_head_dim": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
        },
        named={
            "rms_norm_eps": "layer_norm_epsilon",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_state": "ssm_state_size",
            **MAMBA_NAMES,
        },
        only={  # transformers does not read all of them
            "use_bias": False,
            "residual_in_fp32": False,
            "tie_word_embeddings": False,
            "sliding_window": None,
            "mamba_dt_limit": None,
            "mamba_hidden_act": "silu",
        },
        unused={
            # Of training and other software; a Mamba layer's width follows from its heads.
            *("expand", "chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype"),
            *("num_logits_to_keep", "rescale_prenorm_residual"),
            # Of experts, which transformers writes for models without them too.
            *("n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
            *("routed_scaling_factor", "n_group", "topk_group", "norm_topk_prob"),
            *("moe_intermediate_size", "moe_latent_size", "moe_shared_expert_intermediate_size"),
            "moe_shared_expert_overlap",
        },
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias") | {"has_mlp_bias": "mlp_bias"},
        fields={"rope": STILL, "is_gated": False},
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given = {"num_hidden_layers": len(_layer_types(config))}
        older = config.get("attention_head_dim")  # its name in the first files
        first = {
            "head_dim": config.get("head_dim") or older or 128,
            "hidden_act": config.get("mlp_hidden_act", "relu2"),
        }
        config = Defaulted(first, Defaulted(config, given))
        return super().read_config(config, architecture)

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        for key in ("rms_norm_eps", "norm_eps"):  # of the same norms
            refuse(config, key, spec.norm_eps)
        layer_types = read_layer_types(_layer_types(config), spec.num_layers, _MLP, _EXPERTS)
        inner = read_int(config, "mamba_n_heads") * read_int(config, "mamba_head_dim")
        spec = replace(
            spec,
            recurrence=read_mamba(config, spec.width, inner),
            is_recurrent=is_mamba(layer_types),
            is_mlp=tuple(layer_type in (_MLP, _EXPERTS) for layer_type in layer_types),
        )
        if _EXPERTS not in layer_types:
            return spec
        experts = _read_experts(config, layer_types)
        return replace(spec, experts=experts, activation="relu", is_gated=True)


def _layer_types(config: Config) -> list[str]:
    """What each layer is: by name, or by a letter."""
    pattern: Any = config.get("hybrid_override_pattern")
    types: Any = config.get("layers_block_type") or config.get("layer_types") or pattern
    if not isinstance(types, Sequence) or not types:
        raise ModelFormatError("config.json lacks hybrid_override_pattern")
    return [_LETTERS.get(str(one), str(one)) for one in types]


def _read_experts(config: Config, layer_types: list[str]) -> ExpertSpec:
    """DeepSeek's router; the shared expert's width is its own."""
    refuse(config, "mlp_bias", False)
    refuse(config, "mlp_hidden_act", "relu2")
    if _MLP in layer_types:
        raise UnsupportedModelError(
            "hybrid_override_pattern has layers of experts (E) and MLPs (-); only one of them is "
            "supported"
        )
    given = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688}
    config = Defaulted(config, given | {"moe_shared_expert_intermediate_size": 7688})
    return replace(
        read_deepseek_experts(config, len(layer_types)),
        layers=tuple(layer_type == _EXPERTS for layer_type in layer_types),
        shared_width=read_int(config, "moe_shared_expert_intermediate_size"),
        narrow_width=read_count(config, "moe_latent_size"),
    )
