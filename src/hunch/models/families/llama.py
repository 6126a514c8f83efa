"""Llama (2, 3.x), SmolLM2, TinyLlama and others like them; SmolLM3, Seed-OSS, Helium, CWM,
BitNet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hunch.errors import ModelFormatError
from hunch.layers.rope import RopeSpec
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.reading import Config, Defaulted, read_attn_biases, read_int, read_windows, refuse
from hunch.models.spec import ModelSpec, read_common


class Llama(Decoder):
    """The skeleton as it is; biases where the config asks for them."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        return ModelSpec(
            **read_common(config, architecture),
            **read_attn_biases(config),
            has_mlp_bias=bool(config.get("mlp_bias", False)),
            is_rope_interleaved=bool(config.get("rope_interleaved", False)),
        )


class InternLM3(Llama):
    """Biases by keys of its own."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        has_bias = bool(config.get("bias", False))
        return replace(
            super().read_config(Defaulted(config, {"rms_norm_eps": 1e-5}), architecture),
            has_qkv_bias=bool(config.get("qkv_bias", False)),
            has_out_bias=has_bias,
            has_mlp_bias=has_bias,
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

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config.get("attn_implementation")
        spec = super().read_config(config, architecture)
        biases = read_attn_biases(config, "bias", True)
        return replace(spec, **biases, num_qkv_groups=spec.num_kv_heads)


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

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        older = {
            "num_hidden_layers": config.get("num_layers"),
            "rms_norm_eps": config.get("layer_norm_epsilon", 1e-5),
            "hidden_act": config.get("activation_function", "silu"),
        }
        return super().read_config(Defaulted(config, older), architecture)


class SeedOss(Llama):
    """Biases of q, k and v; of the output where the config asks for them by another key."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        return replace(
            super().read_config(config, architecture),
            has_qkv_bias=bool(config.get("attention_bias", True)),
            has_out_bias=bool(config.get("attention_out_bias", False)),
        )


class Helium(Llama):
    """Pairs that are turned are neighbours."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"rms_norm_eps": 1e-8, "rope_theta": 1e5})
        spec = super().read_config(config, architecture)
        return replace(spec, is_rope_interleaved=True, has_out_bias=False)


class BitNet(Llama):
    """What heads have read, and what an MLP's last product takes, is normed. Checkpoints in its own
    form round what goes into products; see weights/bitnet.py."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        given = {"rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "relu2"}
        spec = super().read_config(Defaulted(config, given), architecture)
        return replace(spec, has_inner_norms=True)


class Cwm(Llama):
    """Three layers with a window after one without."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        refuse(config, "attention_bias", False)
        given = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}
        config = Defaulted(config, given | llama3_rope(config, 16.0))
        spec = super().read_config(config, architecture)
        layer_types = ("sliding_attention", "full_attention")
        types = [layer_types[layer % 4 == 0] for layer in range(spec.num_layers)]
        inner = Defaulted(config, {"layer_types": types, "sliding_window": 8192})
        return replace(spec, windows=read_windows(inner, spec.num_layers))


class SmolLM3(Llama):
    """Where the config switches windows on, the layers that are not turned have one."""

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        config = Defaulted(config, {"rope_theta": 2e6, "tie_word_embeddings": True})
        spec = super().read_config(config, architecture)
        config.get("max_window_layers")  # layer_types says it
        turns = read_turns(config, spec.num_layers)
        layer_types = ("sliding_attention", "full_attention")
        is_on = bool(config.get("use_sliding_window", False))
        types = [layer_types[bool(turn) or not is_on] for turn in turns]
        return replace(
            spec,
            more_ropes=(RopeSpec(rope_type="none"),),
            rope_of=tuple(int(not turn) for turn in turns),
            windows=read_windows(Defaulted(config, {"layer_types": types}), spec.num_layers),
        )


def llama3_rope(config: Config, factor: float) -> dict[str, Any]:
    """The rope of families with Llama 3's, for a config that says nothing of it."""
    if any(config.get(key) for key in ("rope_theta", "rope_parameters", "rope_scaling")):
        return {}
    sizes = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    original = {"original_max_position_embeddings": 8192}
    return {"rope_scaling": {"rope_type": "llama3", **sizes, **original}}


def read_turns(config: Config, num_layers: int) -> list[int]:
    """Per layer: whether it turns its heads."""
    every = read_int(config, "no_rope_layer_interval", 4)
    turns: list[int] = config.get("no_rope_layers") or []  # 1 where a layer does turn them
    if not turns:
        turns = [int((layer + 1) % every != 0) for layer in range(num_layers)]
    if len(turns) != num_layers:
        raise ModelFormatError(
            f"no_rope_layers lists {len(turns)} layers, num_hidden_layers={num_layers}"
        )
    return turns
