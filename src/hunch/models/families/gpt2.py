"""GPT 1 and 2, GPT-Neo, GPTBigCode (StarCoder 1): learned positions, layer norms, a plain MLP."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.errors import UnsupportedModelError
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.keys import BIASES, PLAIN_LAYERS, Keys
from hunch.models.reading import Config, read_int
from hunch.models.spec import ModelSpec


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

    keys = Keys(
        given={
            "max_position_embeddings": 1024,
            "hidden_act": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        named={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
        },
        only={"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
        unused={"n_ctx"},  # an older name of n_positions
        numbers={"norm_eps": "layer_norm_epsilon"},
        fields=PLAIN_LAYERS | dict.fromkeys((*BIASES, "is_transposed"), True),
        has_rope=False,
        ffn_share=4,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        is_scaled = config.get("scale_attn_weights", True)
        return replace(spec, attn_scale=0.0 if is_scaled else 1.0)


class Gpt1(Gpt2):
    """Norms stand after the sums, and none at the end. Its "gelu" is the approximation."""

    names = replace(
        Gpt2.names,
        embed="transformer.tokens_embed.weight",
        positions="transformer.positions_embed.weight",
    )

    keys = Gpt2.keys.but(
        given={"max_position_embeddings": 512, "hidden_act": "gelu"},
        named={"hidden_act": "afn"},
        fields={"is_post_norm": True, "has_final_norm": False},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        activation = "gelu_new" if spec.activation == "gelu" else spec.activation
        return replace(super().read_more(spec, config), activation=activation)


class GptBigCode(Gpt2):
    """One KV head for all heads; matrices are stored as in newer models."""

    keys = Gpt2.keys.but(
        given={"hidden_act": "gelu_pytorch_tanh"},
        only={"multi_query": True},
        unused={"num_key_value_heads"},  # follows from multi_query
        fields={"num_kv_heads": 1, "is_transposed": False},
    )


class GptNeo(Decoder):
    """Every second layer has a window; scores are not scaled."""

    names = replace(
        Gpt2.names,
        q="attn.attention.q_proj",
        k="attn.attention.k_proj",
        v="attn.attention.v_proj",
        out="attn.attention.out_proj",
    )

    keys = Keys(
        given={"hidden_act": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        named={
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "hidden_act": "activation_function",
        },
        numbers={"norm_eps": "layer_norm_epsilon"},
        fields=PLAIN_LAYERS | {"attn_scale": 1.0, "has_out_bias": True, "has_mlp_bias": True},
        has_rope=False,
        ffn_share=4,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        window = read_int(config, "window_size", 256)
        types = _neo_layers(config)
        return replace(spec, windows=tuple(window if name == "local" else None for name in types))


def _neo_layers(config: Config) -> list[str]:
    """ "global" or "local" for every layer, listed or as patterns that are repeated."""
    patterns: Any = config.get("attention_types") or [[["global", "local"], 12]]
    listed = [name for names, count in patterns for name in list(names) * count]
    layer_types: list[str] = config.get("attention_layers") or listed
    if others := {*layer_types} - {"global", "local"}:
        raise UnsupportedModelError(f"layers of type {', '.join(sorted(others))} are not known")
    return layer_types
