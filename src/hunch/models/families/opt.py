"""OPT, BioGPT: learned positions, layer norms, a plain MLP, biases everywhere."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.reading import Config, Defaulted, gpt_layers, read_int, refuse
from hunch.models.spec import ModelSpec, read_sizes


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

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "layer_norm_elementwise_affine", True)
        width, num_heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        num_layers = read_int(config, "num_hidden_layers")
        sizes = read_sizes(config, architecture, width, num_layers, num_heads)
        embed_width = read_int(config, "word_embed_proj_dim", width)
        is_pre_norm = bool(config.get("do_layer_norm_before", True))
        return ModelSpec(
            **sizes,
            ffn_width=read_int(config, "ffn_dim"),
            max_len=read_int(config, "max_position_embeddings", 2048),
            **gpt_layers(bool(config.get("enable_bias", True))),
            norm_eps=1e-5,
            is_post_norm=not is_pre_norm,
            has_final_norm=is_pre_norm and not config.get("_remove_final_layer_norm", False),
            activation=str(config.get("activation_function", "relu")),
            position_offset=2,
            embed_width=embed_width if embed_width != width else 0,
            # Projected, embedding and output matrix are no longer the same.
            is_tied=bool(config.get("tie_word_embeddings", True)) and embed_width == width,
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

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config.get("layer_norm_eps")  # transformers has 1e-5, whatever it says
        named = {
            "ffn_dim": read_int(config, "intermediate_size", 4096),
            "activation_function": config.get("hidden_act", "gelu"),
            "max_position_embeddings": config.get("max_position_embeddings", 1024),
        }
        spec = super().read_config(Defaulted(named, config), architecture)
        has_scale = bool(config.get("scale_embedding", True))
        return replace(spec, embed_scale=spec.width**0.5 if has_scale else 1.0)
