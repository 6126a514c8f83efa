"""A GGUF's metadata about attention beside Mamba 2 or convolutions, as keys of a config.json."""

from __future__ import annotations

from typing import Any

from hunch.errors import UnsupportedModelError
from hunch.models.reading import FULL
from hunch.models.weights import gguf_dense, gguf_experts
from hunch.models.weights.gguf_reader import Reader


def _mamba_2(read: Reader) -> dict[str, Any]:
    """Sizes of Mamba 2 layers."""
    sizes = read.all(
        mamba_n_heads="ssm.time_step_rank",
        mamba_n_groups="ssm.group_count",
        mamba_d_state="ssm.state_size",
        mamba_d_conv="ssm.conv_kernel",
    )
    return sizes | {"mamba_conv_bias": read.has("ssm_conv1d.bias")}


def lfm2(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """The MLP's width is that of its tensors."""
    tensors, num_layers = read.header.tensors, config["num_hidden_layers"]
    found = {
        "layer_types": [
            "conv" if f"blk.{at}.shortconv.conv.weight" in tensors else FULL
            for at in range(num_layers)
        ],
        "conv_L_cache": read.size("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
    }
    if read.number("expert_count", 0):
        found |= {
            **gguf_experts.counted(read, config),
            "moe_intermediate_size": read.size("expert_feed_forward_length"),
            "num_dense_layers": read.count("leading_dense_block_count"),
            "routed_scaling_factor": read.real("expert_weights_scale", 1.0),
            "use_expert_bias": read.has("exp_probs_b"),
        }
    return found


def granite(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """Heads are not rotated; files of this name that rotate them are Bamba's."""
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
        **_mamba_2(read),
        "mamba_expand": max(1, inner // config["hidden_size"]),
    }


def falcon(read: Reader, config: dict[str, Any]) -> dict[str, Any]:
    """The factors of its config are in the file's matrices already."""
    return {
        **_mamba_2(read),
        "mamba_d_ssm": read.size("ssm.inner_size"),
        "mamba_rms_norm": read.has("ssm_norm"),
        "mamba_norm_before_gate": False,  # as in all of its published configs
    }


def mamba(read: Reader) -> dict[str, Any]:
    """For files with recurrent layers alone: no heads attend."""
    tensors, width = read.header.tensors, read.size("embedding_length")
    inner, rank = read.size("ssm.inner_size"), read.size("ssm.time_step_rank")
    found: dict[str, Any] = {
        "hidden_size": width,
        "expand": max(1, inner // width),
        "state_size": read.size("ssm.state_size"),
        "conv_kernel": read.size("ssm.conv_kernel"),
        "layer_norm_epsilon": read.real("attention.layer_norm_rms_epsilon"),
        "use_conv_bias": read.has("ssm_conv1d.bias"),
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
    """The types of layers, by their tensors."""
    tensors, num_layers = read.header.tensors, config["num_hidden_layers"]
    letters = {"ssm_in": "M", "attn_q": "*", "ffn_gate_inp": "E", "ffn_up": "-"}
    pattern = "".join(
        letters[next(p for p in letters if f"blk.{at}.{p}.weight" in tensors)]
        for at in range(num_layers)
    )
    mamba = _mamba_2(read)
    found = mamba | {
        "hybrid_override_pattern": pattern,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mamba_head_dim": max(1, read.size("ssm.inner_size") // mamba["mamba_n_heads"]),
        "attention_bias": read.has("attn_q.bias"),
        "mlp_bias": read.has("ffn_up.bias"),
    }
    if read.number("expert_count", 0):
        shared = read.size("expert_shared_feed_forward_length")
        found |= gguf_experts.routed(read) | {"moe_shared_expert_intermediate_size": shared}
    return found
