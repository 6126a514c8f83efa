"""Llama (2, 3.x), SmolLM2, TinyLlama and others like them; SmolLM3, Seed-OSS, Helium, CWM,
BitNet."""

from __future__ import annotations

from dataclasses import replace

from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.keys import ATTN_BIASES, Keys
from hunch.models.reading import STILL, Config, check_listed, read_int, read_windows
from hunch.models.spec import ModelSpec

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class Llama(Decoder):
    """The skeleton as it is; biases where the config asks for them."""

    keys = Keys(
        flags=dict.fromkeys(ATTN_BIASES, "attention_bias")
        | {"has_mlp_bias": "mlp_bias", "is_rope_interleaved": "rope_interleaved"}
    )


class InternLM3(Llama):
    """Llama with biases, by keys of its own."""

    keys = Llama.keys.but(
        given={"rms_norm_eps": 1e-5},
        flags={"has_qkv_bias": "qkv_bias", "has_out_bias": "bias", "has_mlp_bias": "bias"},
    )


class InternLM2(Llama):
    """InternLM 2 and 2.5: Llama under other names; q, k and v of a KV head stand side by side."""

    names = Names(
        embed="model.tok_embeddings.weight",
        head="output.weight",
        attn_norm="attention_norm",
        q="attention.wq",
        k="attention.wk",
        v="attention.wv",
        qkv="attention.wqkv",
        out="attention.wo",
        mlp_norm="ffn_norm",
        gate="feed_forward.w1",
        up="feed_forward.w3",
        down="feed_forward.w2",
    )

    keys = Llama.keys.but(
        given={"bias": True},
        unused={"attn_implementation"},
        flags=dict.fromkeys(ATTN_BIASES, "bias"),
        fields={"num_qkv_groups": 0},
    )


class Exaone(Llama):
    """EXAONE 3 and 3.5: Llama under other names."""

    names = Names(
        roots=("transformer.", ""),
        embed="transformer.wte.weight",
        final_norm="transformer.ln_f",
        layer="transformer.h.{}.",
        attn_norm="ln_1",
        q="attn.attention.q_proj",
        k="attn.attention.k_proj",
        v="attn.attention.v_proj",
        out="attn.attention.out_proj",
        mlp_norm="ln_2",
        gate="mlp.c_fc_0",
        up="mlp.c_fc_1",
        down="mlp.c_proj",
    )

    keys = Llama.keys.but(
        given={"rms_norm_eps": 1e-5},
        named={
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
    )


class SeedOss(Llama):
    """Biases of q, k and v; of the output where the config asks for them by another key."""

    keys = Llama.keys.but(
        given={"attention_bias": True}, flags={"has_out_bias": "attention_out_bias"}
    )


class Helium(Llama):
    """Rotary pairs are neighbours."""

    keys = Llama.keys.but(
        given={"rms_norm_eps": 1e-8, "rope_theta": 1e5},
        fields={"is_rope_interleaved": True, "has_out_bias": False},
    )


class BitNet(Llama):
    """The outputs of heads and the inputs of an MLP's last product are normed. Checkpoints in its
    own form round the inputs of products; see weights/bitnet.py."""

    keys = Llama.keys.but(
        given={"rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "relu2"},
        fields={"has_inner_norms": True},
    )


class Cwm(Llama):
    """Three layers with a window after one without."""

    keys = Llama.keys.but(
        given={"rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 8192},
        rope=LLAMA3_ROPE | {"factor": 16.0},
        only={"attention_bias": False},
        sees_all=lambda _, num_layers: [layer % 4 == 0 for layer in range(num_layers)],
    )


class SmolLM3(Llama):
    """Where the config switches windows on, the layers that are not turned have one."""

    keys = Llama.keys.but(
        given={"rope_theta": 2e6, "tie_word_embeddings": True},
        unused={"max_window_layers"},  # layer_types has it
    )

    @classmethod
    def read_more(cls, spec: ModelSpec, config: Config) -> ModelSpec:
        turns = read_turns(config, spec.num_layers)
        is_on = bool(config.get("use_sliding_window", False))
        sees_all = [turn or not is_on for turn in turns]
        windows = read_windows(config, spec.num_layers, sees_all)
        return replace(spec.with_rope(STILL, (not turn for turn in turns)), windows=windows)


def read_turns(config: Config, num_layers: int) -> list[bool]:
    """Per layer: whether it rotates its heads."""
    every = read_int(config, "no_rope_layer_interval", 4)
    turns = config.get("no_rope_layers")  # 1 if a layer does rotate them
    turns = turns or [(layer + 1) % every for layer in range(num_layers)]
    check_listed("no_rope_layers", turns, num_layers)
    return [bool(turn) for turn in turns]
