"""GGUF's words to Hugging Face's: tensor names, and a config.json out of the metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.hub.gguf_file import GgufHeader
from hunch.models.weights import gguf_dense, gguf_experts, gguf_hybrid, gguf_layers
from hunch.models.weights.gguf_known import ARCHITECTURES, REASONS

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    # No parameters: what each rotary frequency is divided by.
    "rope_freqs": "rope_freqs",
    "rope_factors_short": "rope_freqs_short",
    "rope_factors_long": "rope_freqs_long",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    # The router, and tensors that hold all experts; see arrange.py.
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}
# Parts whose name is all of the tensor's.
_BARE = ("exp_probs_b", "attn_sinks", "layer_output_scale", "ssm_a", "ssm_d", "ssm_dt")
_SINGLE = ("ssm_a", "ssm_d", "ffn_norm")  # whose names may end so; the last in Falcon-H1's files
_GPT2 = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LATENT = {  # a head's ways to keys and to values may come apart, the former turned
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b",
    "attn_v_b": "self_attn.v_b",
}
_SHARED = {
    f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")
}
_TURNED_NORMS = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_AFTER = {"post_attention_norm": "post_attention_layernorm"}
_BRANCHES = {**_AFTER, "post_ffw_norm": "post_feedforward_layernorm"}
_OWN = {  # what a family calls differently, or has besides
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt2": _GPT2,
    "starcoder": _GPT2,
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma4": _SANDWICH | gguf_layers.GEMMA4,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), gguf_layers.DELTA | _AFTER),
    "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    "gpt-oss": {"attn_sinks": "self_attn.sinks"} | _AFTER,
    "deepseek2": _LATENT | _SHARED,
    "llama4": gguf_experts.LLAMA4,
    "glm4moe": _SHARED | _AFTER,
    "exaone4": _BRANCHES,
    "falcon": gguf_dense.FALCON,
    "chatglm": gguf_dense.GLM4,
    "glm4": gguf_dense.GLM4,
    "gptneox": gguf_dense.GPT_NEOX,
    "olmo2": _BRANCHES,
    "phi2": gguf_dense.PHI2,
    "seed_oss": _AFTER,
    "dots1": _SHARED,
    "ernie4_5-moe": _SHARED | {"exp_probs_b": "mlp.moe_statics.e_score_correction_bias"},
    "hunyuan-dense": _TURNED_NORMS,
    "hunyuan-moe": _TURNED_NORMS
    | {f"ffn_{part}_shexp": f"mlp.shared_mlp.{part}_proj" for part in ("gate", "up", "down")},
    "apertus": {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
    "bloom": gguf_dense.BLOOM,
    "mpt": gguf_dense.MPT,
    "granitehybrid": gguf_hybrid.GRANITE,
    "falcon-h1": gguf_hybrid.FALCON,
    "mamba": gguf_hybrid.MAMBA_1,
    "mamba2": gguf_hybrid.MAMBA_2,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), gguf_hybrid.NEMOTRON),
    **dict.fromkeys(("lfm2", "lfm2moe"), gguf_hybrid.LFM2),
    "minimax-m2": {"exp_probs_b": "block_sparse_moe.e_score_correction_bias"},
}
_NAME = re.compile(
    r"(?:blk\.(?P<layer>\d{1,5})\.)?(?P<part>(?:shortconv\.)?\w+)(?:\.(?P<ending>weight|bias|scale))?"
)
_SCALES = {"ffn_gate_inp": "router.scale", "ffn_down_exps": "router.per_expert_scale"}  # Gemma 4's
_DRAFTING = re.compile(r"blk\.(?P<layer>\d{1,5})\.nextn\.(?P<rest>[\w.]+)")  # of MTP layers


def architecture(header: GgufHeader) -> str:
    name = header.metadata.get("general.architecture")
    if name in REASONS:
        raise UnsupportedModelError(
            f"{header.path}: architecture {name!r} is not supported: {REASONS[name]}"
        )
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path} holds a model of architecture {name!r}; "
            f"known are {', '.join(ARCHITECTURES)}"
        )
    return str(name)


def hf_name(header: GgufHeader, name: str) -> str:
    """The Hugging Face name of a tensor of the file."""
    match, prefix = _NAME.fullmatch(name), architecture(header)
    if drafting := _DRAFTING.fullmatch(name):
        return f"model.layers.{int(drafting['layer'])}.nextn.{drafting['rest']}"
    table = {**(_INNER if match and match["layer"] else _OUTER), **_OWN.get(prefix, {})}
    if prefix == "falcon" and "blk.0.attn_norm_2.weight" in header.tensors:
        table |= gguf_dense.FALCON_40B
    is_whole = match is not None and (match["ending"] is not None or match["part"] in _SINGLE)
    if match is None or not is_whole or match["part"] not in table:
        raise UnsupportedModelError(
            f"{header.path} has a tensor {name!r} that no {architecture(header)} model has"
        )
    layer = gguf_dense.LAYERS.get(prefix, "model.layers")
    outer = f"{layer}.{int(match['layer'])}." if match["layer"] else ""
    if match["ending"] == "scale":
        table, ending = {**table, **_SCALES}, ""
    else:
        is_bare = match["part"] in _BARE and (prefix, match["part"]) != ("mamba", "ssm_dt")
        ending = "" if is_bare else f".{match['ending'] or 'weight'}"
    return f"{outer}{table[match['part']]}{ending}"


class Reader:
    """Typed access to the metadata under one architecture's prefix."""

    def __init__(self, header: GgufHeader, prefix: str) -> None:
        self.header = header
        self.prefix = prefix

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.header.metadata.get(f"{self.prefix}.{key}", default)
        if value is None:
            raise ModelFormatError(f"{self.header.path}: its metadata lacks {self.prefix}.{key}")
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 2**40:
            raise ModelFormatError(
                f"{self.header.path}: {self.prefix}.{key} is {str(value)[:40]}, not a number"
                " hunch can use"
            )
        return value

    def sizes(self, key: str, num_layers: int) -> list[int]:
        """One per layer, where the file lists them; else the same for all."""
        value = self.header.metadata.get(f"{self.prefix}.{key}")
        if not isinstance(value, list):
            return [self.size(key)] * num_layers
        is_size = all(isinstance(some, int) and 0 < some < 2**40 for some in value)
        if not is_size or len(value) != num_layers:
            raise ModelFormatError(
                f"{self.header.path}: {self.prefix}.{key} does not list {num_layers} sizes"
            )
        return [int(some) for some in value]

    def size(self, key: str, default: int | None = None) -> int:
        if self.prefix in gguf_layers.BY_LAYER:
            listed = self.header.metadata.get(f"{self.prefix}.{key}")
            if isinstance(listed, list):
                return self.sizes(key, len(listed))[0]
        listed = self.header.metadata.get(f"{self.prefix}.{key}")
        numbers = listed if isinstance(listed, list) else []
        is_by_layer = self.prefix in gguf_hybrid.PREFIXES and len(numbers) > 0
        is_by_layer = is_by_layer and all(isinstance(some, int) for some in numbers)
        value = max(numbers) if is_by_layer else self.number(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelFormatError(f"{self.header.path}: {self.prefix}.{key}={value} is no size")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        # The file holds float32; its shortest decimal is what config.json says (1e-05).
        return float(str(np.float32(self.number(key, default))))


def config_of(header: GgufHeader, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """A config.json for the model in the file; the tensors are asked where they know better.

    `factors` are the file's rope factors, by the names of their tensors.
    """
    prefix = architecture(header)
    read = Reader(header, prefix)
    if prefix in ("mamba", "mamba2"):
        config = _mamba_config(read)
    else:
        config = _gpt2_config(read) if prefix in _LEARNED else _llama_config(read, factors)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        short = "padding_token_id" if key == "pad_token_id" else key
        config[key] = header.metadata.get(f"tokenizer.ggml.{short}")
    return {**config, "from_gguf": True}


def _gpt2_config(read: Reader) -> dict[str, Any]:
    header = read.header
    name, model_type = ARCHITECTURES[read.prefix]
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": _embedding_shape(header)[0],
        "n_embd": read.size("embedding_length"),
        "n_head": read.size("attention.head_count"),
        "n_layer": _num_layers(header, read.size("block_count")),
        "n_inner": read.size("feed_forward_length"),
        "n_positions": read.size("context_length"),
        "layer_norm_epsilon": read.real("attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _mamba_config(read: Reader) -> dict[str, Any]:
    name, model_type = ARCHITECTURES[read.prefix]
    return {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": _embedding_shape(read.header)[0],
        "num_hidden_layers": _num_layers(read.header, read.size("block_count")),
        **gguf_hybrid.mamba(read),
    }


def _llama_config(read: Reader, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    header, prefix = read.header, read.prefix
    vocab_size, hidden_size = _embedding_shape(header)
    num_heads = read.size("attention.head_count")
    name, model_type = ARCHITECTURES[prefix]
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": read.size("embedding_length"),
        "intermediate_size": read.size(
            "feed_forward_length", read.number("expert_feed_forward_length", 0)
        ),
        "num_hidden_layers": _num_layers(header, read.size("block_count"))
        - int(read.number("nextn_predict_layers", 0)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read.size("attention.head_count_kv", num_heads),
        "head_dim": read.size("attention.key_length", max(1, hidden_size // num_heads)),
        "max_position_embeddings": read.size("context_length"),
        "rms_norm_eps": None,
        "rope_theta": read.real("rope.freq_base", 10000.0),
        "rope_scaling": gguf_layers.rope_scaling(read, factors),
        "sliding_window": None,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    if read.number("attention.sliding_window", 0):
        config["sliding_window"] = read.size("attention.sliding_window")
        if prefix == "llama":  # converters write Mistral as llama; only Mistral has a window
            config["architectures"], config["model_type"] = ["MistralForCausalLM"], "mistral"
    if prefix == "llama" and read.number("expert_count", 0):  # so is Mixtral
        config |= gguf_experts.local(read, config)
        config["architectures"], config["model_type"] = ["MixtralForCausalLM"], "mixtral"
    share = read.size("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    config["partial_rotary_factor"] = share
    if f"{prefix}.attention.layer_norm_epsilon" not in header.metadata:
        config["rms_norm_eps"] = read.real("attention.layer_norm_rms_epsilon")
    if prefix == "gemma4":
        config |= gguf_layers.gemma4(read, config, factors)
    if prefix in _OWN_KEYS:
        config |= _OWN_KEYS[prefix](read, config)
    _check(header, config)
    return config


_LEARNED = ("gpt2", "starcoder")  # their positions are learned
_OWN_KEYS: dict[str, Callable[[Reader, dict[str, Any]], dict[str, Any]]] = {
    **gguf_dense.KEYS,
    "qwen2moe": gguf_experts.qwen,
    "qwen3moe": gguf_experts.qwen,
    "qwen3vlmoe": gguf_experts.qwen,
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), gguf_layers.delta),
    **dict.fromkeys(("lfm2", "lfm2moe"), gguf_hybrid.lfm2),
    "granitehybrid": gguf_hybrid.granite,
    "falcon-h1": gguf_hybrid.falcon,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), gguf_hybrid.nemotron),
    "gpt-oss": gguf_experts.gpt_oss,
    "deepseek2": gguf_experts.deepseek,
    "glm4moe": gguf_experts.glm,
    "llama4": gguf_experts.llama4,
    "olmoe": gguf_experts.counted,
    "dots1": gguf_experts.dots,
    "ernie4_5-moe": gguf_experts.ernie,
    "minimax-m2": gguf_experts.minimax,
    "phimoe": gguf_experts.phi,
    "hunyuan-moe": gguf_experts.hunyuan,
    "granitemoe": lambda read, config: (
        gguf_dense.KEYS["granite"](read, config) | gguf_experts.local(read, config)
    ),
}


def _embedding_shape(header: GgufHeader) -> tuple[int, int]:
    place = header.tensors.get("token_embd.weight")
    if place is None or len(place.shape) != 2:
        raise ModelFormatError(f"{header.path} has no token_embd.weight; is it a language model?")
    return place.shape[0], place.shape[1]


def _num_layers(header: GgufHeader, num_layers: int) -> int:
    found = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
    if num_layers > len(found) or any(str(i) not in found for i in range(num_layers)):
        raise ModelFormatError(
            f"{header.path} claims {num_layers} layers and holds tensors of {len(found)}"
        )
    return num_layers


def _check(header: GgufHeader, config: dict[str, Any]) -> None:
    """Sizes that contradict each other would surface as shape errors far from their cause."""
    _, hidden_size = _embedding_shape(header)
    head_dim = config["head_dim"] or 2  # of latent attention it is no size
    if config["hidden_size"] != hidden_size:
        raise ModelFormatError(
            f"{header.path} claims width {config['hidden_size']}; its embedding has {hidden_size}"
        )
    if head_dim % 2 or config["num_attention_heads"] % config["num_key_value_heads"]:
        raise ModelFormatError(
            f"{header.path}: {config['num_attention_heads']} heads, "
            f"{config['num_key_value_heads']} key-value heads of width {head_dim} cannot be"
        )
