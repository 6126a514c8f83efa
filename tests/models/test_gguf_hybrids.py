"""Hybrids of attention and recurrence, and Mamba alone, in GGUF files as converters make them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from hunch.errors import UnsupportedModelError
from hunch.models.weights import open_weights
from recurrent_models import BY_TORCH, CASES, check_logits, make
from tiny_gguf import add_key, finish, names_in

ARCHITECTURES = {"Lfm2": "lfm2", "Lfm2Moe": "lfm2moe", "GraniteMoeHybrid": "granitehybrid"}
ARCHITECTURES |= {"NemotronH": "nemotron_h", "FalconH1": "falcon-h1", "Mamba2": "mamba2"}
ARCHITECTURES |= dict.fromkeys(("Mamba", "FalconMamba"), "mamba")
KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "shortconv.l_cache": "conv_L_cache",
    "expert_feed_forward_length": "moe_intermediate_size",
    "leading_dense_block_count": "num_dense_layers", "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state", "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads", "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier", "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling", "attention.key_length": "head_dim",
    "expert_weights_scale": "routed_scaling_factor",
}  # fmt: skip
NEMOTRON = {
    "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups", "ssm.time_step_rank": "mamba_num_heads",
    "expert_count": "n_routed_experts", "expert_group_count": "n_group",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
}  # fmt: skip


ALONE = {
    "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "state_size", "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "num_heads",
}  # fmt: skip


def multiplied(name: str, x: torch.Tensor, config: Any) -> torch.Tensor:
    """Falcon-H1's matrices with the factors of its config, as its converter writes them."""
    attn_in, keys = config.attention_in_multiplier, config.mamba_n_groups * config.mamba_d_state
    factors = {
        "down_proj": config.mlp_multipliers[1], "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * attn_in, "q_proj": attn_in, "v_proj": attn_in,
        "o_proj": config.attention_out_multiplier, "out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier, "embed_tokens": config.embedding_multiplier,
    }  # fmt: skip
    if "in_proj" in name:
        sizes = (config.mamba_d_ssm,) * 2 + (keys,) * 2 + (config.mamba_n_heads,)
        each = zip(x.split(sizes), config.ssm_multipliers, strict=True)
        return torch.cat([rows * factor for rows, factor in each]) * config.ssm_in_multiplier
    return x * next((factor for part, factor in factors.items() if part in name), 1.0)


def parts_of(name: str, x: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """What converters take apart, by names of GGUF where they give them."""
    layer = next((part for part in name.split(".") if part.isdigit()), "")
    shexp = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if "shared_mlp.input_linear" in name:
        gate, up = x.chunk(2)
        stem = f"blk.{layer}.ffn"
        return {f"{stem}_gate{shexp}.weight": gate, f"{stem}_up{shexp}.weight": up}
    if "shared_mlp.output_linear" in name:
        return {f"blk.{layer}.ffn_down{shexp}.weight": x}
    if name.endswith(("experts.gate_up_proj", "moe.input_linear.weight")):
        gate, up = x.chunk(2, dim=1)
        return {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
    if name.endswith("mixer.experts.up_proj"):
        return {f"blk.{layer}.ffn_up_exps.weight": x}
    if name.endswith("e_score_correction_bias"):
        return {f"blk.{layer}.exp_probs_b.bias": x}
    if name.endswith(("experts.down_proj", "moe.output_linear.weight")):
        return {f"blk.{layer}.ffn_down_exps.weight": x}
    if "block_sparse_moe.router" in name:
        return {f"blk.{layer}.ffn_gate_inp.weight": x}
    if name.endswith("expert_bias"):
        return {f"blk.{layer}.exp_probs_b.bias": x}
    if name.endswith("A_log"):
        return {f"blk.{layer}.ssm_a": -(x.exp() if x.dim() == 2 else x.exp()[:, None])}
    if name.endswith(".D"):
        return {f"blk.{layer}.ssm_d": x[:, None] if hasattr(config, "n_groups") else x}
    if name.endswith("dt_bias"):
        return {f"blk.{layer}.ssm_dt.bias": x}
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = config.mamba_n_groups if "mamba" in name else config.n_groups
        return {f"blk.{layer}.ssm_norm.weight": x.view(groups, -1)}
    return {name: x.squeeze(1) if "conv" in name and x.dim() == 3 else x}


def convert(path: Path, case: str, folder: Path, **more: bool) -> Any:
    theirs, arch = make(case, folder), ARCHITECTURES[CASES[case][0]]
    config = theirs.config
    has_experts = "E" in getattr(config, "hybrid_override_pattern", "")
    arch = "nemotron_h_moe" if has_experts else arch
    writer = gguf.GGUFWriter(path, arch)
    keys = KEYS | NEMOTRON if "nemotron" in arch else KEYS
    if arch.startswith("mamba"):
        keys = {**KEYS, **ALONE, "attention.key_length": ""}
        keys |= {"ssm.time_step_rank": "time_step_rank"} if arch == "mamba" else {}
        writer.add_uint32(f"{arch}.attention.head_count", 0)
        writer.add_uint32(f"{arch}.context_length", 2**20)
        writer.add_bool("mamba.ssm.dt_b_c_rms", hasattr(config, "mixer_rms_eps"))
    if arch == "nemotron_h":
        keys = {key: name for key, name in keys.items() if "expert" not in key}
    for key, name in keys.items():
        value = getattr(config, name, None)
        if key == "expert_count" and value is None:
            value = getattr(config, "num_local_experts", None)
        if value is not None:
            add_key(writer, f"{arch}.{key}", value)
    eps = getattr(config, "norm_eps", None) or getattr(config, "rms_norm_eps", None)
    eps = eps or config.layer_norm_epsilon
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", eps)
    if arch == "falcon-h1":
        writer.add_uint32(f"{arch}.attention.head_count_kv", config.num_key_value_heads)
    elif not arch.startswith("mamba"):
        attends = [layer_type == "full_attention" for layer_type in config.layer_types]
        counts = [config.num_key_value_heads * some for some in attends]
        writer.add_array(f"{arch}.attention.head_count_kv", counts)
    if arch == "granitehybrid":
        writer.add_uint32(f"{arch}.ssm.inner_size", config.mamba_expand * config.hidden_size)
        writer.add_bool(f"{arch}.rope.scaling.finetuned", more.get("is_turned", False))
    elif arch.startswith("mamba"):
        writer.add_uint32(f"{arch}.ssm.inner_size", config.expand * config.hidden_size)
    elif "nemotron" in arch:
        inner = config.mamba_num_heads * config.mamba_head_dim
        writer.add_uint32(f"{arch}.ssm.inner_size", inner)
        writer.add_bool(f"{arch}.expert_weights_norm", config.norm_topk_prob)
    else:
        writer.add_float32(f"{arch}.rope.freq_base", config.rope_parameters["rope_theta"])
        if arch == "falcon-h1":
            writer.add_uint32(f"{arch}.ssm.inner_size", config.mamba_d_ssm)
    names = names_in(arch, config.num_hidden_layers)
    for whole, tensor in theirs.state_dict().items():
        if whole == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = multiplied(whole, tensor, config) if arch == "falcon-h1" else tensor
        for name, x in parts_of(whole, tensor.float(), config).items():
            found = name
            if "nemotron" in arch:  # as its published files name them
                name = name.replace("model.", "backbone.")
            if not name.startswith("blk."):
                found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            writer.add_tensor(found, np.ascontiguousarray(x.numpy()))
    finish(writer)
    return theirs


@pytest.mark.parametrize(
    "case",
    [
        *("lfm2", "lfm2-moe", "granite 4 h", "granite 4 h, experts"),
        *("nemotron h", "nemotron h, other order", "nemotron h, experts"),
        *("falcon h1", "falcon mamba", "mamba 2"),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = convert(tmp_path / "m.gguf", case, tmp_path / "saved")
    check_logits(tmp_path / "m.gguf", theirs, is_native=case not in BY_TORCH)


def test_bamba_says_where_to_read_it_from(tmp_path: Path) -> None:
    convert(tmp_path / "m.gguf", "granite 4 h", tmp_path / "saved", is_turned=True)
    with pytest.raises(UnsupportedModelError, match="Bamba is not read from GGUF"):
        open_weights(tmp_path / "m.gguf")
