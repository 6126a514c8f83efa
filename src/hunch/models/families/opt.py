"""OPT, BioGPT: learned positions, layer norms, a plain MLP, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.keys import BIASES, PLAIN_LAYERS, Keys
from hunch.models.reading import Config, read_int
from hunch.models.spec import ModelSpec


class Opt(Decoder):
    """The 350M model has a narrower embedding and its norms after the sums."""

    names = Names(
        roots=("model.decoder.", "decoder.", ""),
        embed="model.decoder.embed_tokens.weight",
        positions="model.decoder.embed_positions.weight",
        final_norm="model.decoder.final_layer_norm",
        layer="model.decoder.layers.{}.",
        attn_norm="self_attn_layer_norm",
        out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
        project_in="model.decoder.project_in",
        project_out="model.decoder.project_out",
    )

    keys = Keys(
        given={"hidden_act": "relu", "enable_bias": True, "tie_word_embeddings": True},
        named={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        only={"layer_norm_elementwise_affine": True},
        flags=dict.fromkeys(BIASES, "enable_bias"),
        fields=PLAIN_LAYERS | {"norm_eps": 1e-5, "position_offset": 2},
        has_rope=False,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        embed_width = read_int(config, "word_embed_proj_dim", spec.width)
        is_pre_norm = bool(config.get("do_layer_norm_before", True))
        return replace(
            spec,
            is_post_norm=not is_pre_norm,
            has_final_norm=is_pre_norm and not config.get("_remove_final_layer_norm", False),
            embed_width=embed_width if embed_width != spec.width else 0,
            # Projected, embedding and output matrix are no longer the same.
            is_tied=spec.is_tied and embed_width == spec.width,
        )


class BioGpt(Opt):
    """OPT's layers, behind an embedding that is scaled."""

    names = replace(
        Opt.names,
        roots=("biogpt.", ""),
        embed="biogpt.embed_tokens.weight",
        positions="biogpt.embed_positions.weight",
        final_norm="biogpt.layer_norm",
        layer="biogpt.layers.{}.",
        head="output_projection.weight",
    )

    keys = Keys(
        given={
            "intermediate_size": 4096,
            "hidden_act": "gelu",
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "scale_embedding": True,
        },
        unused={"layer_norm_eps"},  # transformers uses 1e-5, whatever this is
        fields=Opt.keys.fields | dict.fromkeys(BIASES, True),
        has_rope=False,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        has_scale = config.get("scale_embedding")
        return replace(spec, embed_scale=spec.width**0.5 if has_scale else 1.0)
