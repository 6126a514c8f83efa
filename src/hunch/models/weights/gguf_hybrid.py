"""What a GGUF says of attention beside Mamba 2 or convolutions, in the words of a config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hunch.errors import UnsupportedModelError
from hunch.models.weights import gguf_dense, gguf_experts

if TYPE_CHECKING:
    from hunch.models.weights.gguf_config import Reader

# Their layers that do not attend have 0 KV heads.
PREFIXES = ("lfm2", "lfm2moe", "granitehybrid", "nemotron_h", "nemotron_h_moe")
LFM2 = {  # GGUF's names of tensors
    "token_embd_norm": "model.embedding_norm",  # of the last states, in spite of its name
    "output_norm": "model.embedding_norm",
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "exp_probs_b": "feed_forward.expert_bias",
}
_MAMBA = {
    "ssm_in": "in_proj",
    "ssm_a": "A_log",  # stored as what it stands for, -e^x
    "ssm_d": "D",
    "ssm_dt": "dt_bias",
    "ssm_conv1d": "conv1d",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
GRANITE = {
    **{theirs: f"mamba.{ours}" for theirs, ours in _MAMBA.items()},
    **{
        f"ffn_{part}{ending}": f"shared_mlp.{part}_proj"
        for part in ("gate", "up", "down")
        for ending in ("", "_shexp")
    },
}
FALCON = {
    **{theirs: f"mamba.{ours}" for theirs, ours in _MAMBA.items()},
    **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_norm": "pre_ff_layernorm",
    "output_norm": "model.final_layernorm",
}
MAMBA_2 = {
    **{theirs: f"mixer.{ours}" for theirs, ours in _MAMBA.items()},
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "attn_norm": "norm",
}
MAMBA_1 = MAMBA_2 | {"ssm_x": "mixer.x_proj", "ssm_dt": "mixer.dt_proj"}
NEMOTRON = {
    **{theirs: f"mixer.{ours}" for theirs, ours in _MAMBA.items()},
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "token_embd": "model.embeddings",
    "output_norm": "model.norm_f",
    "attn_norm": "norm",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "exp_probs_b": "mixer.gate.e_score_correction_bias",
}


def lfm2(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """The MLP's width is that of its tensors."""
    tensors, num_layers = read.header.tensors, config["num_hidden_layers"]
    found = {
        "layer_types": [
            "conv" if f"blk.{at}.shortconv.conv.weight" in tensors else "full_attention"
            for at in range(num_layers)
        ],
        "conv_L_cache": read.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
    }
    if read.number("expert_count", 0):
        found |= {
            "num_experts": read.size("expert_count"),
            "num_experts_per_tok": read.size("expert_used_count"),
            "moe_intermediate_size": read.size("expert_feed_forward_length"),
            "num_dense_layers": int(read.number("leading_dense_block_count", 0)),
            "routed_scaling_factor": read.real("expert_weights_scale", 1.0),
            "use_expert_bias": any("exp_probs_b" in name for name in tensors),
        }
    return found


def granite(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """Heads are not turned. Files of this name that turn them are Bamba's."""
    tensors, metadata = read.header.tensors, read.header.metadata
    if metadata.get("granitehybrid.rope.scaling.finetuned", False):
        raise UnsupportedModelError(
            f"{read.header.path}: Bamba is not read from GGUF files; use its safetensors"
        )
    is_mamba = [f"blk.{at}.ssm_in.weight" in tensors for at in range(config["num_hidden_layers"])]
    inner, experts = read.size("ssm.inner_size"), read.number("expert_count", 0)
    shared = tensors.get("blk.0.ffn_up_shexp.weight" if experts else "blk.0.ffn_up.weight")
    return {
        **gguf_dense.KEYS["granite"](read, config),
        **(gguf_experts.local(read, config) if experts else {"num_local_experts": 0}),
        "layer_types": ["mamba" if some else "attention" for some in is_mamba],
        "position_embedding_type": "nope",
        "shared_intermediate_size": 0 if shared is None else shared.shape[0],
        "mamba_n_heads": read.size("ssm.time_step_rank"),
        "mamba_n_groups": read.size("ssm.group_count"),
        "mamba_d_state": read.size("ssm.state_size"),
        "mamba_d_conv": read.size("ssm.conv_kernel"),
        "mamba_expand": max(1, inner // config["hidden_size"]),
        "mamba_conv_bias": any("ssm_conv1d.bias" in name for name in tensors),
    }


def falcon(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """The factors of its config are in the file's matrices already."""
    tensors = read.header.tensors
    return {
        "mamba_n_heads": read.size("ssm.time_step_rank"),
        "mamba_n_groups": read.size("ssm.group_count"),
        "mamba_d_state": read.size("ssm.state_size"),
        "mamba_d_conv": read.size("ssm.conv_kernel"),
        "mamba_d_ssm": read.size("ssm.inner_size"),
        "mamba_conv_bias": any("ssm_conv1d.bias" in name for name in tensors),
        "mamba_rms_norm": any("ssm_norm" in name for name in tensors),
        "mamba_norm_before_gate": False,  # as all of its published configs have it
    }


def mamba(read: Reader) -> dict[str, Any]:
    """Of files whose layers are recurrent alone: there are no heads that attend."""
    tensors, width = read.header.tensors, read.size("embedding_length")
    inner, rank = read.size("ssm.inner_size"), read.size("ssm.time_step_rank")
    found: dict[str, Any] = {
        "hidden_size": width,
        "expand": max(1, inner // width),
        "state_size": read.size("ssm.state_size"),
        "conv_kernel": read.size("ssm.conv_kernel"),
        "layer_norm_epsilon": read.real("attention.layer_norm_rms_epsilon"),
        "use_conv_bias": any("ssm_conv1d.bias" in name for name in tensors),
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if read.prefix == "mamba2":
        return found | {
            "num_heads": rank,
            "head_dim": max(1, inner // rank),
            "n_groups": read.size("ssm.group_count"),
        }
    if read.header.metadata.get("mamba.ssm.dt_b_c_rms", False):
        found |= {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"}
        found["mixer_rms_eps"] = found["layer_norm_epsilon"]
    return found | {"time_step_rank": rank}


def nemotron(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """What a layer is, its tensors tell."""
    tensors, num_layers = read.header.tensors, config["num_hidden_layers"]
    letters = {"ssm_in": "M", "attn_q": "*", "ffn_gate_inp": "E", "ffn_up": "-"}
    heads = read.size("ssm.time_step_rank")
    found = {
        "hybrid_override_pattern": "".join(
            letters[next(p for p in letters if f"blk.{at}.{p}.weight" in tensors)]
            for at in range(num_layers)
        ),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_num_heads": heads,
        "mamba_head_dim": max(1, read.size("ssm.inner_size") // heads),
        "n_groups": read.size("ssm.group_count"),
        "ssm_state_size": read.size("ssm.state_size"),
        "conv_kernel": read.size("ssm.conv_kernel"),
        "use_conv_bias": any("ssm_conv1d.bias" in name for name in tensors),
        "attention_bias": any("attn_q.bias" in name for name in tensors),
        "mlp_bias": any("ffn_up.bias" in name for name in tensors),
    }
    if read.number("expert_count", 0):
        found |= {
            "n_routed_experts": read.size("expert_count"),
            "num_experts_per_tok": read.size("expert_used_count"),
            "moe_intermediate_size": read.size("expert_feed_forward_length"),
            "moe_shared_expert_intermediate_size": read.size("expert_shared_feed_forward_length"),
            "routed_scaling_factor": read.real("expert_weights_scale", 1.0),
            "norm_topk_prob": bool(read.header.metadata.get(f"{read.prefix}.expert_weights_norm")),
            "n_group": read.size("expert_group_count", 1),
            "topk_group": read.size("expert_group_used_count", 1),
        }
    return found
