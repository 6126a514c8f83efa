"""Phi-1 to 2, Persimmon: layer norms, a plain MLP. Phi-3 to 4: Llama with fused tensors. Phi-MoE:
experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hunch.errors import ModelFormatError
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.families.mistral import Mixtral
from hunch.models.reading import (
    FROM_GGUF,
    Config,
    Defaulted,
    gpt_layers,
    read_attn_biases,
    read_float,
    read_windows,
    refuse,
)
from hunch.models.spec import ModelSpec, read_common

_DEFAULTS = {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"}


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

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        has_head_norms = bool(config.get("qk_layernorm", False))
        common = read_common(Defaulted(config, _DEFAULTS), architecture)
        common["norm_eps"] = read_float(config, "layer_norm_eps", 1e-5)
        return ModelSpec(
            **common,
            **gpt_layers(),
            has_qk_norm=has_head_norms,
            is_qk_norm_centred=has_head_norms,
            has_qk_norm_bias=has_head_norms,
            is_parallel=True,
            has_mlp_norm=False,
            has_head_bias=True,
        )


class Persimmon(Phi):
    """The MLP stands after attention; q, k and v of a head stand side by side in the file."""

    names = replace(
        Phi.names,
        qkv="self_attn.query_key_value",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"hidden_act": "relu2", "qk_layernorm": True})
        spec = super().read_config(config, architecture)
        return replace(
            spec,
            is_parallel=False,
            has_mlp_norm=True,
            has_head_bias=False,
            num_qkv_groups=spec.num_heads,
        )


class Phi3(Decoder):
    """Files for long contexts have two sets of rope factors. The set for the context that is served
    is used at every length: a row's text may not depend on how long it will become."""

    turns_part = True

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        beside, given = config.get("original_max_position_embeddings"), config.get("rope_scaling")
        if given and beside is None and not config.get(FROM_GGUF):  # 4096 to transformers then
            raise ModelFormatError("config.json lacks original_max_position_embeddings")
        if isinstance(given, Mapping) and given.get("type") == "yarn":  # by its first files' name
            named = {**given, "type": "longrope"}
            config = Defaulted({"rope_scaling": named}, config)
        for key, only in (("full_attn_mod", 1), ("interpolate_factor", 1), ("lm_head_bias", False)):
            refuse(config, key, only)
        common = read_common(config, architecture)
        common["windows"] = read_windows(config, common["num_layers"])
        common["norm_eps"] = float(config.get("rms_norm_eps") or 1e-5)
        return ModelSpec(**common)


class PhiMoe(Mixtral):
    """Mixtral's experts, layer norms, and scales of rope factors of its own.

    An expert's weight is its share among those that come near to it: where the others are far
    below, it is one. transformers always takes two experts, whatever the config says.
    """

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "num_experts_per_tok", 2)
        config.get("input_jitter_noise")  # of training
        config.get("original_max_position_embeddings")  # read with the rope factors, if any
        given = config.get("rope_scaling") or config.get("rope_parameters")
        if isinstance(given, Mapping) and "long_mscale" in given:
            scales = ("short_mscale", "long_mscale")
            rope = {key: value for key, value in given.items() if key not in scales}
            is_short = given.get("short_factor") == given.get("long_factor")
            rope["attention_factor"] = given[scales[not is_short]]
            config = Defaulted({"rope_parameters": rope, "rope_scaling": None}, config)
        spec = super().read_config(Defaulted(config, {"num_local_experts": 16}), architecture)
        assert spec.experts is not None
        spread = 2 * read_float(config, "router_jitter_noise", 0.01)
        routing = replace(spec.experts.routing, scores="near", is_normed=False, spread=spread)
        return replace(
            spec,
            **read_attn_biases(config),
            norm="layer",
            experts=replace(spec.experts, routing=routing),
            has_head_bias=bool(config.get("lm_head_bias", False)),
        )
