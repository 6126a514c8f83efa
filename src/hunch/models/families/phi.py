"""Phi-1 to 2, Persimmon: layer norms, a plain MLP. Phi-3 to 4: Llama with fused tensors. Phi-MoE:
experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hunch.errors import ModelFormatError
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.families.mistral import Mistral, Mixtral
from hunch.models.keys import ATTN_BIASES, BIASES, PLAIN_LAYERS, Keys
from hunch.models.reading import FROM_GGUF, Config, Defaulted, no_layers, read_float
from hunch.models.spec import ModelSpec


class Phi(Decoder):
    """The MLP stands beside attention; the output matrix has a bias too."""

    turns_part = True
    names = Names(
        final_norm="model.final_layernorm",
        out="self_attn.dense",
        q_norm="self_attn.q_layernorm",
        k_norm="self_attn.k_layernorm",
        up="mlp.fc1",
        down="mlp.fc2",
    )

    keys = Keys(
        given={"partial_rotary_factor": 0.5, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
        numbers={"norm_eps": "layer_norm_eps"},
        flags=dict.fromkeys(
            ("has_qk_norm", "is_qk_norm_centred", "has_qk_norm_bias"), "qk_layernorm"
        ),
        fields=PLAIN_LAYERS
        | dict.fromkeys((*BIASES, "is_parallel", "has_head_bias"), True)
        | {"has_mlp_norm": False},
    )


class Persimmon(Phi):
    """The MLP stands after attention; q, k and v of a head stand side by side in the file."""

    names = replace(
        Phi.names, qkv="self_attn.query_key_value", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h"
    )

    keys = Phi.keys.but(
        given={"hidden_act": "relu2", "qk_layernorm": True},
        fields={
            "is_parallel": False,
            "has_mlp_norm": True,
            "has_head_bias": False,
            "num_qkv_groups": 0,
        },
    )


class Phi3(Mistral):
    """Files for long contexts have two sets of rope factors. The set for the context that is served
    is used at every length: a row's text may not depend on how long it will become."""

    turns_part = True
    keys = Keys(
        given={"rms_norm_eps": 1e-5},
        only={"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
        sees_all=no_layers,
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        beside, given = config.get("original_max_position_embeddings"), config.get("rope_scaling")
        if given and beside is None and not config.get(FROM_GGUF):  # then transformers takes 4096
            raise ModelFormatError("config.json lacks original_max_position_embeddings")
        if isinstance(given, Mapping) and given.get("type") == "yarn":  # in the first files
            config = Defaulted({"rope_scaling": {**given, "type": "longrope"}}, config)
        return super().read_config(config, architecture)


class PhiMoe(Mixtral):
    """Mixtral's experts, layer norms, and scales of rope factors of its own.

    An expert's weight is its share among those with scores near its own: if the others are far
    below, it is one. transformers always chooses two experts, whatever the config has.
    """

    keys = Mixtral.keys.but(
        given={"num_experts": 16},
        only={"num_experts_per_tok": 2},
        unused={"input_jitter_noise", "original_max_position_embeddings"},  # of training; of ropes
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias") | {"has_head_bias": "lm_head_bias"},
        fields={"norm": "layer"},
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given = config.get("rope_scaling") or config.get("rope_parameters")
        if isinstance(given, Mapping) and "long_mscale" in given:
            scales = ("short_mscale", "long_mscale")
            rope = {key: value for key, value in given.items() if key not in scales}
            is_short = given.get("short_factor") == given.get("long_factor")
            rope["attention_factor"] = given[scales[not is_short]]
            config = Defaulted({"rope_parameters": rope, "rope_scaling": None}, config)
        return super().read_config(config, architecture)

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        assert spec.experts is not None
        spread = 2 * read_float(config, "router_jitter_noise", 0.01)
        routing = replace(spec.experts.routing, scores="near", is_normed=False, spread=spread)
        return replace(spec, experts=replace(spec.experts, routing=routing))
