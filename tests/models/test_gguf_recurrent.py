"""Families with recurrent layers in GGUF files, as llama.cpp's converters arrange them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from recurrent_models import CASES, check_logits, make
from tiny_gguf import add_key, finish, names_in

ARCHITECTURES = {"Qwen3Next": "qwen3next", "Qwen3_5": "qwen35", "Qwen3_5Moe": "qwen35moe"}
KEYS = {
    "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}  # fmt: skip


def tiled(x: torch.Tensor, dim: int, config: Any, size: int) -> torch.Tensor:
    """Value heads, of `size` numbers each, not by key head but by their place in its group."""
    heads = x.unflatten(dim, (config.linear_num_key_heads, -1, size))
    return heads.transpose(dim, dim + 1).flatten(dim, dim + 2)


def reordered(name: str, x: torch.Tensor, config: Any) -> torch.Tensor:
    """What the converters of Qwen3.5 do to a recurrent layer's tensors."""
    size, num_qk = config.linear_value_head_dim, 2 * config.linear_num_key_heads
    num_qk *= config.linear_key_head_dim
    if "in_proj_qkv." in name or "conv1d" in name:
        return torch.cat((x[:num_qk], tiled(x[num_qk:], 0, config, size)))
    if "in_proj_z" in name:
        return tiled(x, 0, config, size)
    if any(part in name for part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias")):
        return tiled(x, 0, config, 1)
    return tiled(x, 1, config, size) if "out_proj" in name else x


def parts_of(name: str, x: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Qwen3-Next's converter takes apart what its files fuse by key head."""
    if "in_proj_qkvz" not in name:
        return {name: x}
    group = config.linear_num_value_heads // config.linear_num_key_heads
    sizes = [config.linear_key_head_dim] * 2 + [group * config.linear_value_head_dim] * 2
    q, k, v, z = x.unflatten(0, (config.linear_num_key_heads, -1)).split(sizes, dim=1)
    qkv = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    return {name.replace("qkvz", "qkv"): qkv, name.replace("qkvz", "z"): z.flatten(0, 1)}


def convert(path: Path, case: str, folder: Path) -> Any:
    theirs, arch = make(case, folder), ARCHITECTURES[CASES[case][0]]
    config = theirs.config
    writer = gguf.GGUFWriter(path, arch)
    for key, name in KEYS.items():
        value = getattr(config, name, None)
        if value is not None:
            add_key(writer, f"{arch}.{key}", value)
    inner = config.linear_value_head_dim * config.linear_num_value_heads
    writer.add_uint32(f"{arch}.ssm.inner_size", inner)
    writer.add_uint32(f"{arch}.rope.dimension_count", config.head_dim // 4)
    writer.add_float32(f"{arch}.rope.freq_base", config.rope_parameters["rope_theta"])
    names = names_in(arch, config.num_hidden_layers)
    for whole, tensor in theirs.state_dict().items():
        if whole == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for name, x in parts_of(whole, tensor.float(), config).items():
            if "linear_attn." in name and arch != "qwen3next":
                x = reordered(name, x, config)
            if name.endswith("A_log"):
                x = -x.exp()
            elif name.endswith("dt_bias"):
                name = name.replace("dt_bias", "dt_proj.bias")
            elif "conv1d" in name:
                x = x.squeeze()
            elif name.endswith("norm.weight") and "linear_attn.norm" not in name:
                x = x + 1
            if "experts." in name and not name.endswith(".weight"):
                name += ".weight"
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            assert found is not None, name
            writer.add_tensor(found, np.ascontiguousarray(x.numpy()))
    finish(writer)
    return theirs


QWEN = [case for case in CASES if case.startswith("qwen") and "dense" not in case]


@pytest.mark.parametrize("case", QWEN)
@torch.no_grad()
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = convert(tmp_path / "m.gguf", case, tmp_path / "saved")
    check_logits(tmp_path / "m.gguf", theirs)
