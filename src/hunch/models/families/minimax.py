"""MiniMax Text-01 and M1: lightning attention and experts. M2: experts chosen by sigmoids, a part
of each head turned, all heads normed at once."""

from __future__ import annotations

from dataclasses import replace

from hunch.errors import UnsupportedModelError
from hunch.kernels.experts import Routing
from hunch.kernels.lightning import LightningShape
from hunch.layers.experts import ExpertSpec
from hunch.layers.recurrent import CarriedScales
from hunch.models.build import Names
from hunch.models.experts import read_count
from hunch.models.families.mistral import Mixtral
from hunch.models.reading import Config, Defaulted, read_float, read_int, refuse
from hunch.models.recurrent import FULL, LINEAR, is_of_type
from hunch.models.spec import ModelSpec, read_common

_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}


class MiniMax(Mixtral):
    """Mixtral's experts; layers carry on what they read, normed and scaled."""

    names = replace(
        Mixtral.names,
        qkv="",  # of layers that attend: files do not fuse them
        recurrent="self_attn.",
        unread=r"\.self_attn\.(slope_rate|\w+_decay)$",  # follow from the config
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "hidden_act", "silu")  # of queries, keys and values too
        config.get("block_size")  # tokens are folded in one by one
        spec = super().read_config(
            Defaulted(Defaulted({"layer_types": None}, config), _DEFAULTS), architecture
        )
        every = [(FULL, LINEAR)[layer % 2] for layer in range(spec.num_layers)]
        types = config.get("layer_types") or every

        def scales(name: str) -> tuple[float, float]:
            return read_float(config, f"{name}_alpha_factor", 1.0), read_float(
                config, f"{name}_beta_factor", 1.0
            )

        return replace(
            spec,
            recurrence=LightningShape(num_heads=spec.num_heads, head_dim=spec.head_dim),
            is_recurrent=is_of_type(types, LINEAR, spec.num_layers),
            carried=CarriedScales(
                attn=scales("full_attn"), recurrent=scales("linear_attn"), mlp=scales("mlp")
            ),
        )


class MiniMaxM2(Mixtral):
    """The names of Mixtral, and a bias for the choice of experts."""

    turns_part = True
    names = Names(
        experts=replace(
            Mixtral.names.experts, choice_bias="block_sparse_moe.e_score_correction_bias"
        )
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "scoring_func", "sigmoid")
        refuse(config, "use_qk_norm", True)
        refuse(config, "qk_norm_type", "per_layer")
        refuse(config, "use_routing_bias", True)
        refuse(config, "shared_intermediate_size", 0)
        for key in ("full_attention", "linear_attention", "mlp"):
            refuse(config, f"layernorm_{key}_beta", 1.0)
        if {*(config.get("attn_type_list") or [1])} != {1}:
            raise UnsupportedModelError("config.json: attn_type_list has layers that do not attend")
        for key in ("mlp_intermediate_size", "shared_moe_mode", "use_mtp"):
            config.get(key)  # of MLPs and drafting layers that these models do not have
        given: dict[str, object] = {"rope_theta": 5e6, "head_dim": 128}
        if config.get("rotary_dim") is not None:
            size = read_int(Defaulted(config, given), "head_dim")
            given["partial_rotary_factor"] = read_int(config, "rotary_dim") / size
        common = read_common(Defaulted(config, given), architecture)
        routing = Routing(
            num_experts=read_count(config, "num_local_experts"),
            num_chosen=read_int(config, "num_experts_per_tok", 8),
            scores="sigmoid",
            is_normed=True,
        )
        experts = ExpertSpec(
            routing=routing,
            width=common["ffn_width"],
            layers=(True,) * common["num_layers"],
            has_choice_bias=True,
        )
        return ModelSpec(**common, experts=experts, has_qk_norm=True, is_qk_norm_whole=True)
