"""GGUF's words to Hugging Face's: tensor names, and a config.json out of the metadata."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.hub.gguf_file import GgufHeader

ARCHITECTURES = {  # general.architecture -> (architectures, model_type)
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# Files of these store the rows of q and k so that rotary pairs are neighbours.
INTERLEAVED = ("llama", "mistral")

_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "rope_freqs": "rope_freqs",  # no parameter: what each rotary frequency is divided by
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
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,5})\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")


def architecture(header: GgufHeader) -> str:
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path} holds a model of architecture {name!r}; "
            f"known are {', '.join(ARCHITECTURES)}"
        )
    return str(name)


def hf_name(header: GgufHeader, name: str) -> str:
    """The Hugging Face name of a tensor of the file."""
    match = _NAME.fullmatch(name)
    table = _INNER if match and match["layer"] else _OUTER
    if match is None or match["part"] not in table:
        raise UnsupportedModelError(
            f"{header.path} has a tensor {name!r} that no dense {architecture(header)} model has"
        )
    outer = f"model.layers.{int(match['layer'])}." if match["layer"] else ""
    return f"{outer}{table[match['part']]}.{match['kind']}"


class _Reader:
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

    def size(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int) or value < 1:
            raise ModelFormatError(f"{self.header.path}: {self.prefix}.{key}={value} is no size")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        # The file holds float32; its shortest decimal is what config.json says (1e-05).
        return float(str(np.float32(self.number(key, default))))


def config_of(header: GgufHeader, rope_factors: list[float] | None) -> dict[str, Any]:
    """A config.json for the model in the file; the tensors are asked where they know better."""
    prefix = architecture(header)
    read = _Reader(header, prefix)
    vocab_size, hidden_size = _embedding_shape(header)
    num_heads = read.size("attention.head_count")
    name, model_type = ARCHITECTURES[prefix]
    config: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": read.size("embedding_length"),
        "intermediate_size": read.size("feed_forward_length"),
        "num_hidden_layers": _num_layers(header, read.size("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read.size("attention.head_count_kv", num_heads),
        "head_dim": read.size("attention.key_length", max(1, hidden_size // num_heads)),
        "max_position_embeddings": read.size("context_length"),
        "rms_norm_eps": read.real("attention.layer_norm_rms_epsilon"),
        "rope_theta": read.real("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(read, rope_factors),
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
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        short = "padding_token_id" if key == "pad_token_id" else key
        config[key] = header.metadata.get(f"tokenizer.ggml.{short}")
    _check(header, config, read)
    return config


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


def _rope_scaling(read: _Reader, factors: list[float] | None) -> dict[str, Any] | None:
    if factors is not None:  # Llama 3's scaling, already worked out per frequency
        return {"rope_type": "factors", "factors": factors}
    kind = read.header.metadata.get(f"{read.prefix}.rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{read.header.path}: rope scaling {kind!r} is not known")
    scaling = {"rope_type": kind, "factor": read.real("rope.scaling.factor")}
    if kind == "yarn":
        key = "rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = read.size(key)
    return scaling


def _check(header: GgufHeader, config: dict[str, Any], read: _Reader) -> None:
    """Sizes that contradict each other would surface as shape errors far from their cause."""
    _, hidden_size = _embedding_shape(header)
    head_dim = config["head_dim"]
    if config["hidden_size"] != hidden_size:
        raise ModelFormatError(
            f"{header.path} claims width {config['hidden_size']}; its embedding has {hidden_size}"
        )
    if head_dim % 2 or config["num_attention_heads"] % config["num_key_value_heads"]:
        raise ModelFormatError(
            f"{header.path}: {config['num_attention_heads']} heads, "
            f"{config['num_key_value_heads']} key-value heads of width {head_dim} cannot be"
        )
    if read.size("rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedModelError(f"{header.path}: rotary embedding over part of a head")
