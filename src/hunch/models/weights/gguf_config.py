"""A config.json out of a GGUF's metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.hub.gguf_file import GgufHeader
from hunch.models.reading import FROM_GGUF
from hunch.models.weights import gguf_dense, gguf_experts, gguf_hybrid, gguf_layers
from hunch.models.weights.gguf_known import ARCHITECTURES, REASONS
from hunch.models.weights.gguf_reader import Reader


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


def config_of(header: GgufHeader, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """A config.json for the model in the file, by its tensors where these tell more.

    `factors` are the file's rope factors, by the names of their tensors.
    """
    prefix = architecture(header)
    read, (name, model_type) = Reader(header, prefix), ARCHITECTURES[prefix]
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "vocab_size": _embedding_shape(header)[0],
    }
    if prefix in ("mamba", "mamba2"):
        config["num_hidden_layers"] = _num_layers(header, read.size("block_count"))
        config |= gguf_hybrid.mamba(read)
    else:
        config |= _gpt2_config(read) if prefix in _LEARNED else _llama_config(read, factors)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        short = "padding_token_id" if key == "pad_token_id" else key
        config[key] = header.metadata.get(f"tokenizer.ggml.{short}")
    return {**config, FROM_GGUF: True}


def _gpt2_config(read: Reader) -> dict[str, Any]:
    header = read.header
    return {
        "n_embd": read.size("embedding_length"),
        "n_head": read.size("attention.head_count"),
        "n_layer": _num_layers(header, read.size("block_count")),
        "n_inner": read.size("feed_forward_length"),
        "n_positions": read.size("context_length"),
        "layer_norm_epsilon": read.real("attention.layer_norm_epsilon"),
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }


def _llama_config(read: Reader, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    header, prefix = read.header, read.prefix
    vocab_size, hidden_size = _embedding_shape(header)
    num_heads = read.size("attention.head_count")
    config: dict[str, Any] = {
        "hidden_size": read.size("embedding_length"),
        "intermediate_size": read.size(
            "feed_forward_length", read.number("expert_feed_forward_length", 0)
        ),
        "num_hidden_layers": _num_layers(header, read.size("block_count"))
        - read.count("nextn_predict_layers"),
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
    head_dim = config["head_dim"] or 2  # latent attention's is no real width
    if config["hidden_size"] != hidden_size:
        raise ModelFormatError(
            f"{header.path} claims width {config['hidden_size']}; its embedding has {hidden_size}"
        )
    if head_dim % 2 or config["num_attention_heads"] % config["num_key_value_heads"]:
        raise ModelFormatError(
            f"{header.path}: {config['num_attention_heads']} heads, "
            f"{config['num_key_value_heads']} key-value heads of width {head_dim} cannot be"
        )
