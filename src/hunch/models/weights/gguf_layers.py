"""A GGUF's metadata about ropes, and about layers that differ, as keys of a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.models.reading import FULL, LINEAR, SLIDING
from hunch.models.weights import gguf_experts
from hunch.models.weights.gguf_reader import Reader

_UNTURNED = 1e29  # frequencies divided by more count as 0


def delta(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """Recurrent layers. In files of Qwen3.5, value heads side by side have different key heads."""
    tensors, num_layers = read.header.tensors, config["num_hidden_layers"]
    num_keys, num_values = read.size("ssm.group_count"), read.size("ssm.time_step_rank")
    found = {
        "layer_types": [
            LINEAR if f"blk.{at}.ssm_conv1d.weight" in tensors else FULL for at in range(num_layers)
        ],
        "linear_conv_kernel_dim": read.size("ssm.conv_kernel"),
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": read.size("ssm.state_size"),
        "linear_value_head_dim": read.size("ssm.inner_size") // num_values,
        "linear_value_heads_tiled": read.prefix != "qwen3next" and num_keys != num_values,
    }
    if read.number("expert_count", 0):
        found |= gguf_experts.qwen(read, config)
    return found


def gemma4(
    read: Reader, config: dict[str, Any], factors: Mapping[str, list[float]]
) -> dict[str, Any]:
    """Heads of layers without a window, layers that share keys and values, the table, experts."""
    tensors, num_layers = read.header.tensors, config["num_hidden_layers"]
    types = layer_types(read, config, 6)
    num_shared = read.count("attention.shared_kv_layers")
    widths = read.sizes("feed_forward_length", num_layers)
    kv_heads = read.sizes("attention.head_count_kv", num_layers)
    full = {
        str(at): {
            "head_dim": read.size("attention.key_length"),
            "num_key_value_heads": kv_heads[at],
        }
        for at, layer_type in enumerate(types)
        if layer_type == FULL
    }
    width = read.count("embedding_length_per_layer_input")
    table = tensors.get("per_layer_token_embd.weight")
    if (table is None) != (not width):
        raise ModelFormatError(f"{read.header.path} lacks per_layer_token_embd.weight")
    found = {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "intermediate_size": widths[0],
        "use_double_wide_mlp": len(set(widths)) > 1,
        "num_key_value_heads": kv_heads[types.index(SLIDING) if SLIDING in types else 0],
        "head_dim": read.size("attention.key_length_swa"),
        "per_layer_config": full,
        "layer_types": types,
        "num_kv_shared_layers": num_shared,
        "attention_k_eq_v": any(
            f"blk.{at}.attn_v.weight" not in tensors
            for at in range(num_layers - num_shared)
            if types[at] == FULL
        ),
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": config["vocab_size"] if table is None else table.shape[0],
        "final_logit_softcapping": read.real("final_logit_softcapping", 0.0) or None,
        **_ropes(read, factors),
    }
    if read.number("expert_count", 0):
        found |= {
            "enable_moe_block": True,
            **read.all(
                num_experts="expert_count",
                top_k_experts="expert_used_count",
                moe_intermediate_size="expert_feed_forward_length",
            ),
        }
    return found


def _ropes(read: Reader, factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """A rope for each kind of layer. The file divides by a huge number what is not rotated."""
    by = factors.get("rope_freqs") or [1.0]
    turned = [factor < _UNTURNED for factor in by]
    if not all(factor == 1.0 for factor in by[: sum(turned)]) or any(turned[sum(turned) :]):
        raise ModelFormatError(f"{read.header.path}: its rope_freqs are no share of a head")
    full = {
        "rope_type": "proportional",
        "rope_theta": read.real("rope.freq_base", 1e6),
        "partial_rotary_factor": sum(turned) / len(by),
    }
    local = {"rope_type": "default", "rope_theta": read.real("rope.freq_base_swa", 1e4)}
    return {
        "rope_parameters": {SLIDING: local, FULL: full},
        "rope_theta": None,
        "rope_scaling": None,
        "partial_rotary_factor": None,
    }


def layer_types(read: Reader, config: dict[str, Any], every: int) -> list[str]:
    """Which layers have a window: listed, or one without a window after a number with one."""
    num_layers = config["num_hidden_layers"]
    key = f"{read.prefix}.attention.sliding_window_pattern"
    given = read.header.metadata.get(key, every)
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        given = [(at + 1) % given != 0 for at in range(num_layers)]
    if not isinstance(given, list) or len(given) != num_layers:
        raise ModelFormatError(f"{read.header.path}: {key} does not list {num_layers} layers")
    return [SLIDING if some else FULL for some in given]


def rope_scaling(read: Reader, factors: Mapping[str, list[float]]) -> dict[str, Any] | None:
    """How positions are stretched; None: they are not."""
    if "rope_freqs" in factors:  # Llama 3's scaling, already worked out per frequency
        return {"rope_type": "factors", "factors": factors["rope_freqs"]}
    if "rope_freqs_long" in factors:
        return {
            "rope_type": "longrope",
            "short_factor": factors["rope_freqs_short"],
            "long_factor": factors["rope_freqs_long"],
            "attention_factor": read.real("rope.scaling.attn_factor", 1.0),
            "original_max_position_embeddings": read.size("rope.scaling.original_context_length"),
        }
    rope_type = read.get("rope.scaling.type", "none")
    if rope_type == "none":
        return None
    if rope_type not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{read.header.path}: rope scaling {rope_type!r} is not known")
    scaling = {"rope_type": rope_type, "factor": read.real("rope.scaling.factor")}
    if rope_type == "yarn":
        key = "rope.scaling.original_context_length"
        scaling["original_max_position_embeddings"] = read.size(key)
        for ours, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            scaling[ours] = read.real(f"rope.scaling.yarn_{ours}", usual)
        # Below 1 it is another number, which transformers does not read and whose key is the same.
        attention = read.real("rope.scaling.yarn_attn_factor", 0.0)
        if attention >= 1:
            scaling["attention_factor"] = attention
    return scaling
