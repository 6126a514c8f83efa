"""Falcon (1B to 180B): layer norms, a plain MLP, few KV heads. Falcon 3 is Llama."""

from __future__ import annotations

from dataclasses import replace

from hunch.layers.attention import Alibi
from hunch.models.decoder import Decoder
from hunch.models.families.alibi import Bloom, slopes_of
from hunch.models.keys import BIASES, PLAIN_LAYERS, Keys
from hunch.models.reading import STILL, Config
from hunch.models.spec import ModelSpec


class Falcon(Decoder):
    """Both branches read one norm (7B, 11B), or each its own (40B, 180B)."""

    names = replace(
        Bloom.names,
        mlp_norm="ln_mlp",
        aliases=(("ln_attn", "input_layernorm"), ("post_attention_layernorm", "ln_mlp")),
    )

    keys = Keys(
        given={
            "hidden_act": "gelu",
            "tie_word_embeddings": True,
            "layer_norm_epsilon": 1e-5,
            "parallel_attn": True,
            "multi_query": True,
        },
        named={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "hidden_size": "n_embed",
            "hidden_act": "activation",
            "intermediate_size": "ffn_hidden_size",
        },
        only={"apply_residual_connection_post_layernorm": False},
        unused={"num_kv_heads", "n_head_kv", "rotary", "ff_factor"},  # of no use to smaller ones
        flags=dict.fromkeys(BIASES, "bias"),
        numbers={"norm_eps": "layer_norm_epsilon"},
        fields=PLAIN_LAYERS | {"num_qkv_groups": 0},
        ffn_share=4,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        is_grouped = bool(config.get("new_decoder_architecture"))
        is_parallel = bool(config.get("parallel_attn")) or is_grouped
        num_kv = 1 if config.get("multi_query") else spec.num_heads
        if is_grouped:
            num_kv = config.get("num_kv_heads") or config.get("n_head_kv") or spec.num_heads
        if config.get("num_key_value_heads") is None:  # GGUF files have it
            spec = replace(spec, num_kv_heads=num_kv)
        if config.get("ffn_hidden_size") is None:
            spec = replace(spec, ffn_width=config.get("ff_factor", 4) * spec.width)
        if config.get("alibi"):  # instead of rotary positions
            alibi = Alibi(slopes=slopes_of(spec.num_heads), is_rounded=True)
            spec = replace(spec, rope=STILL, alibi=alibi)
        num_norms = config.get("num_ln_in_parallel_attn") or (2 if is_grouped else 1)
        has_mlp_norm = not is_parallel or num_norms == 2
        return replace(spec, is_parallel=is_parallel, has_mlp_norm=has_mlp_norm)
