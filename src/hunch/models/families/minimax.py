"""MiniMax Text-01 and M1: lightning attention and experts. M2: experts chosen by sigmoids, a part
of each head rotated, all heads normed at once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hunch.errors import UnsupportedModelError
from hunch.kernels.lightning import LightningShape
from hunch.layers.recurrent import CarriedScales
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.experts import read_wide_experts
from hunch.models.families.mistral import Mixtral
from hunch.models.keys import Keys
from hunch.models.reading import FULL, LINEAR, Config, Defaulted, read_float, read_int, read_windows
from hunch.models.recurrent import is_of_type
from hunch.models.spec import ModelSpec


class MiniMax(Mixtral):
    """Mixtral's experts; a layer adds to its normed input, both scaled."""

    names = replace(
        Mixtral.names,
        qkv="",  # of layers that attend: files do not fuse them
        recurrent="self_attn.",
        unread=r"\.self_attn\.(slope_rate|\w+_decay)$",  # follow from the config
    )
    keys = Mixtral.keys.but(
        only={"hidden_act": "silu"},  # of queries, keys and values too
        unused={"block_size"},  # tokens are added to the state one by one
        sees_all=None,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        every = [(FULL, LINEAR)[layer % 2] for layer in range(spec.num_layers)]
        types = config.get("layer_types") or every

        def scales(name: str) -> tuple[float, float]:
            alpha = read_float(config, f"{name}_alpha_factor", 1.0)
            return alpha, read_float(config, f"{name}_beta_factor", 1.0)

        return replace(
            spec,
            recurrence=LightningShape(num_heads=spec.num_heads, head_dim=spec.head_dim),
            is_recurrent=is_of_type(types, LINEAR, spec.num_layers),
            windows=read_windows(Defaulted({"layer_types": None}, config), spec.num_layers),
            carried=CarriedScales(
                attn=scales("full_attn"), recurrent=scales("linear_attn"), mlp=scales("mlp")
            ),
        )


class MiniMaxM2(Decoder):
    """The names of Mixtral, and a bias for the choice of experts."""

    turns_part = True
    names = Names(
        experts=replace(
            Mixtral.names.experts, choice_bias="block_sparse_moe.e_score_correction_bias"
        )
    )
    keys = Keys(
        given={"rope_theta": 5e6, "head_dim": 128, "num_experts_per_tok": 8},
        named={"num_experts": "num_local_experts"},
        only={
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "use_routing_bias": True,
            "shared_intermediate_size": 0,
            "layernorm_full_attention_beta": 1.0,
            "layernorm_linear_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0,
        },
        # Of MLPs and drafting layers that these models do not have.
        unused={"mlp_intermediate_size", "shared_moe_mode", "use_mtp"},
        fields={"has_qk_norm": True, "is_qk_norm_whole": True},
        experts=partial(read_wide_experts, scores="sigmoid", is_normed=True, has_choice_bias=True),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        if {*(config.get("attn_type_list") or [1])} != {1}:
            raise UnsupportedModelError("config.json: attn_type_list has layers that do not attend")
        if config.get("rotary_dim") is not None:
            size = read_int(Defaulted(config, cls.keys.given), "head_dim")
            share = read_int(config, "rotary_dim") / size
            config = Defaulted(config, {"partial_rotary_factor": share})
        return super().read_config(config, architecture)
