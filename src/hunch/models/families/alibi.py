"""BLOOM and MPT: no positions but in the scores, which fall with the distance of tokens (ALiBi)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hunch.errors import ModelFormatError
from hunch.layers.attention import Alibi
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.keys import BIASES, PLAIN_LAYERS, Keys
from hunch.models.reading import STILL, Config, Recorded, read_int, refuse_unread
from hunch.models.spec import ModelSpec


def slopes_of(num_heads: int) -> tuple[float, ...]:
    """A geometric sequence down to 1/256. If the number of heads is no power of two: that of the
    next lower one, and numbers between its own for the further heads."""
    lower = 1 << int(math.log2(num_heads))
    row = [2.0 ** (-8.0 * head / lower) for head in range(1, lower + 1)]
    between = [2.0 ** (-4.0 * head / lower) for head in range(1, 2 * lower, 2)]
    return (*row, *between[: num_heads - lower])


# Settings of BLOOM's first code, and older and newer names of sizes.
_BLOOM_CODE = {
    *("masked_softmax_fusion", "bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv"),
    *("unk_token_id", "offset_alibi", "slow_but_exact", "n_head", "n_layer"),
    *("num_hidden_layers", "num_attention_heads", "hidden_size"),
}


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

    keys = Keys(
        given={"tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        named={
            "hidden_size": "n_embed",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "max_position_embeddings": "seq_length",
        },
        only={"apply_residual_connection_post_layernorm": False},
        unused=_BLOOM_CODE,
        numbers={"norm_eps": "layer_norm_epsilon"},
        fields=PLAIN_LAYERS
        | dict.fromkeys((*BIASES, "has_embed_norm"), True)
        | {"activation": "gelu_pytorch_tanh", "rope": STILL, "num_qkv_groups": 0},
        ffn_share=4,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        return replace(spec, alibi=Alibi(slopes=slopes_of(spec.num_heads)))


_ATTENTION = Keys(  # of MPT
    only={
        "alibi": True,
        "qk_ln": False,
        "prefix_lm": False,
        "attn_type": "multihead_attention",
        "alibi_bias_max": 8,
    },
    unused={"attn_impl"},
    numbers={"qkv_clip": "clip_qkv", "attn_scale": "softmax_scale"},
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

    keys = Keys(
        given={
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
        },
        named={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len",
        },
        only={"no_bias": True, "logit_scale": None},
        unused={  # of no use with ALiBi, or of training
            *("learned_pos_emb", "norm_type", "embedding_fraction", "verbose", "init_config"),
            "init_device",
        },
        numbers={"norm_eps": "layer_norm_epsilon"},
        fields=PLAIN_LAYERS | {"activation": "gelu", "has_norm_bias": False, "rope": STILL},
        ffn_share=4,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        given: Any = config.get("attn_config") or {}
        if not isinstance(given, Mapping):
            raise ModelFormatError(f"config.json: attn_config={given!r} must be an object")
        recorded = Recorded(given)
        attn = _ATTENTION.over(recorded)
        fields = _ATTENTION.read(attn)
        if extra := recorded.unread():
            refuse_unread(config, extra, f"{spec.architecture}: attn_config")
        width = read_int(config, "expansion_ratio", 4) * spec.width
        alibi = Alibi(slopes=slopes_of(spec.num_heads))
        return replace(spec, ffn_width=width, alibi=alibi, **fields)
