"""BLOOM and MPT: no positions but in the scores, which fall with the distance of tokens (ALiBi)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hunch.errors import ModelFormatError
from hunch.layers.attention import Alibi
from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.reading import (
    FROM_GGUF,
    Config,
    Defaulted,
    Recorded,
    gpt_layers,
    read_float,
    read_int,
    refuse,
    refuse_unread,
)
from hunch.models.spec import ModelSpec, read_common


def slopes_of(num_heads: int) -> tuple[float, ...]:
    """A geometric row down to 1/256. Where the heads are no power of two, that of the next lower
    one, and between its numbers as many as there are more heads."""
    lower = 1 << int(math.log2(num_heads))
    row = [2.0 ** (-8.0 * head / lower) for head in range(1, lower + 1)]
    between = [2.0 ** (-4.0 * head / lower) for head in range(1, 2 * lower, 2)]
    return (*row, *between[: num_heads - lower])


# How BLOOM's first code was run; and names of sizes, older and newer.
_BLOOM_CODE = (
    *("masked_softmax_fusion", "bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv"),
    *("unk_token_id", "offset_alibi", "slow_but_exact"),
    *("n_head", "n_layer", "num_hidden_layers", "num_attention_heads", "hidden_size"),
)


class Bloom(Decoder):
    """The embedding is normed; q, k and v of a head stand side by side in the file."""

    names = Names(
        roots=("transformer.", ""),
        embed="transformer.word_embeddings.weight",
        embed_norm="transformer.word_embeddings_layernorm",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}.",
        q="self_attention.q",
        k="self_attention.k",
        v="self_attention.v",
        qkv="self_attention.query_key_value",
        out="self_attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "apply_residual_connection_post_layernorm", False)
        for key in _BLOOM_CODE:
            config.get(key)
        width = read_int(config, "n_embed", read_int(config, "hidden_size", 64))
        given = {
            "hidden_size": width,
            "num_hidden_layers": config.get("n_layer") or config.get("num_hidden_layers"),
            "num_attention_heads": config.get("n_head") or config.get("num_attention_heads"),
            "intermediate_size": 4 * width,
            "max_position_embeddings": config.get("seq_length", 2048),
            "hidden_act": "gelu_pytorch_tanh",
        }
        usual = Defaulted(config, {"tie_word_embeddings": True})
        common = read_common(Defaulted(given, usual), architecture)
        common["norm_eps"] = read_float(config, "layer_norm_epsilon", 1e-5)
        return ModelSpec(
            **common | {"rope": RopeSpec(rope_type="none")},
            **gpt_layers(),
            has_embed_norm=True,
            alibi=Alibi(slopes=slopes_of(common["num_heads"])),
            num_qkv_groups=1 if config.get(FROM_GGUF) else common["num_heads"],
        )


class Mpt(Decoder):
    """Nothing has a bias."""

    names = Names(
        roots=("transformer.", ""),
        embed="transformer.wte.weight",
        final_norm="transformer.norm_f",
        layer="transformer.blocks.{}.",
        attn_norm="norm_1",
        q="attn.q",
        k="attn.k",
        v="attn.v",
        qkv="attn.Wqkv",
        out="attn.out_proj",
        mlp_norm="norm_2",
        up="ffn.up_proj",
        down="ffn.down_proj",
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given_attn: Any = config.get("attn_config") or {}
        if not isinstance(given_attn, Mapping):
            raise ModelFormatError(f"config.json: attn_config={given_attn!r} must be an object")
        attn = Recorded(given_attn)
        for key, only in (("alibi", True), ("qk_ln", False), ("prefix_lm", False)):
            refuse(attn, key, only)
        refuse(attn, "attn_type", "multihead_attention")
        refuse(attn, "alibi_bias_max", 8)
        refuse(config, "no_bias", True)
        refuse(config, "logit_scale", None)
        for key in ("learned_pos_emb", "norm_type", "embedding_fraction", "verbose", "init_config"):
            config.get(key)  # of no use with ALiBi, or to training alone
        config.get("init_device")
        attn.get("attn_impl")
        width = read_int(config, "d_model", 2048)
        ratio = read_int(config, "expansion_ratio", 4)
        given = {
            "hidden_size": width,
            "num_hidden_layers": config.get("n_layers", 24),
            "num_attention_heads": config.get("n_heads", 16),
            "intermediate_size": ratio * width,
            "max_position_embeddings": config.get("max_seq_len", 2048),
            "hidden_act": "gelu",
        }
        usual = Defaulted(config, {"tie_word_embeddings": True})
        common = read_common(Defaulted(given, usual), architecture)
        common["norm_eps"] = read_float(config, "layer_norm_epsilon", 1e-5)
        spec = ModelSpec(
            **common | {"rope": RopeSpec(rope_type="none")},
            norm="layer",
            has_norm_bias=False,
            is_gated=False,
            alibi=Alibi(slopes=slopes_of(common["num_heads"])),
        )
        clip, scale = attn.get("clip_qkv"), attn.get("softmax_scale")
        if extra := attn.unread():
            refuse_unread(config, extra, f"{architecture}: attn_config")
        return replace(
            spec,
            qkv_clip=read_float(attn, "clip_qkv") if clip else 0.0,
            attn_scale=read_float(attn, "softmax_scale") if scale else 0.0,
        )
