"""GPT 1 and 2, GPT-Neo, GPTBigCode (StarCoder 1): learned positions, layer norms, a plain MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.errors import UnsupportedModelError
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.reading import (
    FROM_GGUF,
    Config,
    Defaulted,
    gpt_layers,
    read_float,
    read_int,
    refuse,
)
from hunch.models.spec import ModelSpec, read_sizes


class Gpt2(Decoder):
    """Hugging Face's files hold every matrix transposed; GGUFs do not."""

    names = Names(
        roots=("transformer.", ""),
        embed="transformer.wte.weight",
        positions="transformer.wpe.weight",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}.",
        attn_norm="ln_1",
        q="attn.q",
        k="attn.k",
        v="attn.v",
        qkv="attn.c_attn",
        out="attn.c_proj",
        mlp_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        unread=r"\.attn\.(attention\.)?(masked_)?bias$",  # masks that old files hold as tensors
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
            refuse(config, key, False)
        width, num_heads = read_int(config, "n_embd"), read_int(config, "n_head")
        sizes = read_sizes(config, architecture, width, read_int(config, "n_layer"), num_heads)
        config.get("n_ctx")  # an older name of n_positions
        return ModelSpec(
            **sizes,
            ffn_width=read_int(config, "n_inner", 4 * width),
            max_len=read_int(config, "n_positions", 1024),
            **gpt_layers(),
            norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
            activation=str(config.get("activation_function", "gelu_new")),
            attn_scale=0.0 if config.get("scale_attn_weights", True) else 1.0,
            is_tied=bool(config.get("tie_word_embeddings", True)),
            is_transposed=not config.get(FROM_GGUF, False),
        )


class Gpt1(Gpt2):
    """Norms stand after the sums, and none at the end. Its "gelu" is the approximation."""

    names = replace(
        Gpt2.names,
        embed="transformer.tokens_embed.weight",
        positions="transformer.positions_embed.weight",
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given = str(config.get("afn", "gelu"))
        named = {"activation_function": "gelu_new" if given == "gelu" else given}
        spec = super().read_config(
            Defaulted(named, Defaulted(config, {"n_positions": 512})), architecture
        )
        return replace(spec, is_post_norm=True, has_final_norm=False)


class GptBigCode(Gpt2):
    """One head of k and v for all of q; matrices as every newer model has them."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "multi_query", True)
        config.get("num_key_value_heads")  # follows from multi_query
        activation = str(config.get("activation_function", "gelu_pytorch_tanh"))
        spec = super().read_config(config, architecture)
        return replace(spec, num_kv_heads=1, activation=activation, is_transposed=False)


class GptNeo(Decoder):
    """Every second layer has a window; scores are not scaled."""

    names = replace(
        Gpt2.names,
        q="attn.attention.q_proj",
        k="attn.attention.k_proj",
        v="attn.attention.v_proj",
        out="attn.attention.out_proj",
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        width, num_heads = read_int(config, "hidden_size"), read_int(config, "num_heads")
        sizes = read_sizes(config, architecture, width, read_int(config, "num_layers"), num_heads)
        window = read_int(config, "window_size", 256)
        sizes["windows"] = tuple(
            window if layer_type == "local" else None for layer_type in _neo_layers(config)
        )
        return ModelSpec(
            **sizes,
            ffn_width=read_int(config, "intermediate_size", 4 * width),
            max_len=read_int(config, "max_position_embeddings", 2048),
            norm="layer",
            norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
            activation=str(config.get("activation_function", "gelu_new")),
            is_gated=False,
            attn_scale=1.0,
            has_out_bias=True,
            has_mlp_bias=True,
            is_tied=bool(config.get("tie_word_embeddings", True)),
        )


def _neo_layers(config: Config) -> list[str]:
    """ "global" or "local" for every layer, listed or as patterns that are repeated."""
    patterns: Any = config.get("attention_types") or [[["global", "local"], 12]]
    listed = [name for names, count in patterns for name in list(names) * count]
    layer_types: list[str] = config.get("attention_layers") or listed
    if others := {*layer_types} - {"global", "local"}:
        raise UnsupportedModelError(f"layers of type {', '.join(sorted(others))} are not known")
    return layer_types
