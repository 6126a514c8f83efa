"""Falcon (1B to 180B): layer norms, a plain MLP, few KV heads. Falcon 3 is Llama."""

from __future__ import annotations

from dataclasses import replace

from hunch.layers.attention import Alibi
from hunch.layers.rope import RopeSpec
from hunch.models.decoder import Decoder
from hunch.models.families.alibi import Bloom, slopes_of
from hunch.models.reading import (
    FROM_GGUF,
    Config,
    Defaulted,
    gpt_layers,
    read_float,
    read_int,
    refuse,
)
from hunch.models.spec import ModelSpec, read_common


class Falcon(Decoder):
    """Both branches read one norm (7B, 11B), or each its own (40B, 180B)."""

    names = replace(
        Bloom.names,
        mlp_norm="ln_mlp",
        aliases=(("ln_attn", "input_layernorm"), ("post_attention_layernorm", "ln_mlp")),
    )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "apply_residual_connection_post_layernorm", False)
        is_grouped = bool(config.get("new_decoder_architecture", False))
        is_parallel = bool(config.get("parallel_attn", True)) or is_grouped
        num_heads = config.get("num_attention_heads") or config.get("n_head")
        num_kv = 1 if config.get("multi_query", True) else num_heads
        if is_grouped:
            num_kv = config.get("num_kv_heads") or config.get("n_head_kv") or num_heads
        width = config.get("hidden_size") or config.get("n_embed")
        older = {
            "num_hidden_layers": config.get("n_layer"),
            "hidden_size": width,
            "num_attention_heads": num_heads,
            "intermediate_size": config.get("ffn_hidden_size")
            or config.get("ff_factor", 4) * (width or 0),
            "num_key_value_heads": num_kv,
            "hidden_act": config.get("activation", "gelu"),
            "tie_word_embeddings": True,
        }
        common = read_common(Defaulted(config, older), architecture)
        common["norm_eps"] = read_float(config, "layer_norm_epsilon", 1e-5)
        common["ffn_width"] = read_int(older, "intermediate_size")
        for key in ("num_kv_heads", "n_head_kv", "rotary", "ff_factor"):
            config.get(key)  # of no use to the smaller ones
        if config.get("alibi", False):  # in place of turns
            common["rope"] = RopeSpec(rope_type="none")
            common["alibi"] = Alibi(slopes=slopes_of(common["num_heads"]), is_rounded=True)
        num_norms = config.get("num_ln_in_parallel_attn") or (2 if is_grouped else 1)
        return ModelSpec(
            **common,
            **gpt_layers(bool(config.get("bias", False))),
            is_parallel=is_parallel,
            has_mlp_norm=not is_parallel or num_norms == 2,
            num_qkv_groups=1 if config.get(FROM_GGUF) else common["num_kv_heads"],
        )
