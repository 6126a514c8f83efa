"""Nemotron-H, Nano 2, 3 Nano, 3 Super: a layer is Mamba 2, attention, an MLP or experts, alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.layers.experts import ExpertSpec
from hunch.layers.rope import RopeSpec
from hunch.models.decoder import Decoder
from hunch.models.experts import ExpertNames, read_deepseek_experts
from hunch.models.families.mamba import Mamba1
from hunch.models.mamba import is_mamba, read_layer_types, read_mamba
from hunch.models.reading import Config, Defaulted, read_attn_biases, read_float, read_int, refuse
from hunch.models.spec import ModelSpec, read_common

_MLP, _EXPERTS = "mlp", "moe"
_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": _MLP, "E": _EXPERTS}
_UNUSED = (
    # Of how it is trained, run and kept elsewhere; a Mamba layer's width is that of its heads.
    *("expand", "chunk_size", "use_mamba_kernels", "mamba_ssm_cache_dtype", "num_logits_to_keep"),
    "rescale_prenorm_residual",
    # Of experts, which transformers writes for models without them too.
    *("n_routed_experts", "n_shared_experts", "num_experts_per_tok", "routed_scaling_factor"),
    *("n_group", "topk_group", "norm_topk_prob", "moe_intermediate_size", "moe_latent_size"),
    *("moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
)
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
    """Heads are not turned; MLPs are of squares, without a gate."""

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

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        for key in ("use_bias", "residual_in_fp32", "tie_word_embeddings"):
            refuse(config, key, False)  # transformers does not read all of them
        for key in ("sliding_window", "mamba_dt_limit"):
            refuse(config, key, None)
        refuse(config, "mamba_hidden_act", "silu")
        for key in _UNUSED:
            config.get(key)
        eps = read_float(config, "layer_norm_epsilon", 1e-5)
        for key in ("rms_norm_eps", "norm_eps"):  # of the same norms
            refuse(config, key, eps)
        types = _layer_types(config)
        older = config.get("attention_head_dim")  # its name in the first files
        given = {"head_dim": config.get("head_dim") or older or 128}
        config = Defaulted(given, Defaulted(config, {"num_hidden_layers": len(types)}))
        common = read_common(config, architecture)
        layer_types = read_layer_types(types, common["num_layers"], _MLP, _EXPERTS)
        common |= {
            "norm_eps": eps,
            "activation": str(config.get("mlp_hidden_act", "relu2")),
            "rope": RopeSpec(rope_type="none"),
        }
        heads = read_int(config, "mamba_num_heads", 128)
        mamba = {
            "mamba_n_heads": heads,
            "mamba_n_groups": config.get("n_groups", 8),
            "mamba_d_state": config.get("ssm_state_size", 128),
            "mamba_d_conv": config.get("conv_kernel", 4),
            "mamba_conv_bias": config.get("use_conv_bias", True),
        }
        inner = heads * read_int(config, "mamba_head_dim", 64)
        experts = None
        if _EXPERTS in layer_types:
            experts = _read_experts(config, layer_types)
            common["activation"] = "relu"
        return ModelSpec(
            **common,
            **read_attn_biases(config),
            experts=experts,
            recurrence=read_mamba(Defaulted(config, mamba), common["width"], inner),
            is_recurrent=is_mamba(layer_types),
            is_mlp=tuple(layer_type in (_MLP, _EXPERTS) for layer_type in layer_types),
            is_gated=experts is not None,
            has_mlp_bias=bool(config.get("mlp_bias", False)),
        )


def _layer_types(config: Config) -> list[str]:
    """By name, or by a letter for each layer."""
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
        narrow_width=read_int(config, "moe_latent_size") if config.get("moe_latent_size") else 0,
    )
