"""A GGUF's metadata about experts and latent attention, as keys of a config.json."""

from __future__ import annotations

from typing import Any

from hunch.models.reading import FULL, SLIDING
from hunch.models.weights.gguf_reader import Reader

_SIGMOID = 2  # of expert_gating_func


def local(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """Mixtral's and Granite's keys."""
    return read.all(num_local_experts="expert_count", num_experts_per_tok="expert_used_count")


def phi(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """Mixtral's keys; the output matrix has a bias."""
    has_bias = "output.bias" in read.header.tensors
    return {**local(read, config), "lm_head_bias": has_bias, "mlp_bias": None}


def counted(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """Qwen's and OLMoE's keys."""
    return read.all(num_experts="expert_count", num_experts_per_tok="expert_used_count")


def qwen(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """Whether a token's weights add up to one: llama.cpp goes by the family."""
    tensors, num_layers = read.header.tensors, config["num_hidden_layers"]
    found = {
        **counted(read, config),
        "mlp_only_layers": [
            i for i in range(num_layers) if f"blk.{i}.ffn_gate_inp.weight" not in tensors
        ],
        "moe_intermediate_size": read.size("expert_feed_forward_length"),
    }
    is_third = read.prefix in ("qwen3moe", "qwen3vlmoe")
    if is_third or read.prefix == "qwen2moe":
        found["norm_topk_prob"] = is_third
    if not is_third:
        key = "expert_shared_feed_forward_length"
        found["shared_expert_intermediate_size"] = read.size(key)
    return found


def gpt_oss(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """Every second layer has the window; the ends of YaRN's ramp are not rounded."""
    scaling = config["rope_scaling"]
    return {
        **local(read, config),
        "intermediate_size": read.size("expert_feed_forward_length"),
        "layer_types": [(SLIDING, FULL)[i % 2] for i in range(config["num_hidden_layers"])],
        "rope_scaling": scaling and {**scaling, "truncate": False},
        "mlp_bias": None,
    }


def llama4(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """llama.cpp knows by the architecture which layers turn their heads and how queries grow, and
    by the number of experts whether heads are normed."""
    return {
        **local(read, config),
        "intermediate_size": read.size("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": read.size("interleave_moe_layer_step", 1),
        "use_qk_norm": read.size("expert_count") != 128,
        "attention_chunk_size": config["sliding_window"] or 8192,
        "sliding_window": None,
        "mlp_bias": None,
    }


def deepseek(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """V3 and GLM-4.7-Flash choose experts by sigmoid scores, V2 by a softmax."""
    rope_dim = read.size("rope.dimension_count")
    # Files that hold the latent's own matrices give the sizes of heads under other keys.
    head = read.size("attention.key_length_mla", read.size("attention.key_length"))
    values = read.size("attention.value_length_mla", read.size("attention.value_length"))
    found = {
        "head_dim": None,
        "partial_rotary_factor": None,
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": read.size("attention.kv_lora_rank"),
        "q_lora_rank": read.count("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": head - rope_dim,
        "v_head_dim": values,
        **routed(read),
        "mlp_bias": None,
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in read.header.tensors,
        "rope_scaling": _scaled(read, config["rope_scaling"]),
    }
    if int(read.number("expert_gating_func", 1)) != _SIGMOID:
        method = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
        found |= {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
        found |= {"topk_method": method, "scoring_func": "softmax"}
    return found


def glm(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """Its files hold its MTP layers after the others; they are counted in block_count."""
    return {
        **routed(read),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in read.header.tensors,
        "mlp_bias": None,
    }


def dots(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {**routed(read), "mlp_bias": None}


def minimax(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {**local(read, config), "intermediate_size": read.size("expert_feed_forward_length")}


def hunyuan(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **read.all(num_experts="expert_count", moe_topk="expert_used_count"),
        "moe_intermediate_size": read.size(
            "expert_feed_forward_length", config["intermediate_size"]
        ),
        "num_shared_expert": read.size("expert_shared_count", 1),
    }


def ernie(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **read.all(
            moe_num_experts="expert_count",
            moe_k="expert_used_count",
            moe_intermediate_size="expert_feed_forward_length",
        ),
        "moe_num_shared_experts": read.count("expert_shared_count"),
        "moe_layer_start_index": read.count("leading_dense_block_count"),
        "moe_layer_interval": read.size("interleave_moe_layer_step", 1),
        "attention_bias": None,
        "mlp_bias": None,
    }


def routed(read: Reader) -> dict[str, Any]:
    """DeepSeek's keys."""
    return {
        "first_k_dense_replace": read.count("leading_dense_block_count"),
        "n_routed_experts": read.size("expert_count"),
        "num_experts_per_tok": read.size("expert_used_count"),
        "n_shared_experts": read.count("expert_shared_count"),
        "moe_intermediate_size": read.size("expert_feed_forward_length"),
        "routed_scaling_factor": read.real("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(read.get("expert_weights_norm")),
        "n_group": int(read.number("expert_group_count", 1)) or 1,
        "topk_group": int(read.number("expert_group_used_count", 1)) or 1,
    }


def _scaled(read: Reader, scaling: dict[str, Any] | None) -> dict[str, Any] | None:
    """YaRN with what DeepSeek's files add to it: the scale of scores, a tenth of it."""
    key = "rope.scaling.yarn_log_multiplier"
    if scaling is None or not read.number(key, 0):
        return scaling
    size = round(10 * read.real(key), 6)
    return {**scaling, "mscale": size, "mscale_all_dim": size}
