"""Gemma 1, 2 and 3 (text): scaled embedding, norms of 1 + w, and norms around both branches."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.keys import ATTN_BIASES, Keys
from hunch.models.reading import Config, last_of_pattern, read_float, read_local_rope
from hunch.models.spec import ModelSpec


class Gemma(Decoder):
    """Llama's layers with a GELU."""

    keys = Keys(
        given={"tie_word_embeddings": True, "hidden_act": "gelu"},
        named={"hidden_act": "hidden_activation"},
        only={"use_bidirectional_attention": False},
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias"),
        fields={"is_norm_shifted": True},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        # Files of the first Gemma have "gelu" as hidden_act and mean its approximation.
        is_older = config.get("hidden_activation") is None and spec.activation == "gelu"
        activation = "gelu_pytorch_tanh" if is_older else spec.activation
        return replace(spec, activation=activation, embed_scale=float(spec.width) ** 0.5)


class Gemma2(Gemma):
    """Windows on every second layer, caps on scores and logits."""

    names = Names(
        attn_out_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_out_norm="post_feedforward_layernorm",
    )
    keys = Gemma.keys.but(
        given={
            "sliding_window": 4096,
            "sliding_window_pattern": 2,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        unused={"sliding_window_size"},  # the same as sliding_window
        numbers={"attn_cap": "attn_logit_softcapping", "logits_cap": "final_logit_softcapping"},
        fields={"has_branch_norms": True},
        sees_all=last_of_pattern,
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        scale = read_float(config, "query_pre_attn_scalar", 256.0) ** -0.5
        return replace(super().read_more(spec, config), attn_scale=scale)


class Gemma3(Gemma2):
    """Five layers with a window to one without; each kind has its own rotary theta."""

    keys = Gemma2.keys.but(
        given={  # its files leave out what does not differ
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "sliding_window_pattern": 6,
            "final_logit_softcapping": None,
        },
        named={"sliding_window_pattern": "_sliding_window_pattern"},
        only={"attn_logit_softcapping": None},
        fields={"has_qk_norm": True},
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        spec = super().read_more(spec, config)
        usual = {"rope_theta": read_float(config, "rope_local_base_freq")}
        local = read_local_rope(config, spec.head_dim, usual)
        return spec.with_rope(local, (not sees_all for sees_all in spec.sees_all))


class VaultGemma(Gemma2):
    """Without norms of what is added to the stream."""

    names = Names(mlp_norm="pre_feedforward_layernorm")
    keys = Gemma2.keys.but(fields={"has_branch_norms": False})
