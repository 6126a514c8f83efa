"""Families in GGUF files, named as the gguf package names them, against transformers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from builders import plain_logits
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights
from their_models import make
from tiny_gguf import interleave

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
IDS = torch.randint(3, 90, (41,), generator=torch.Generator().manual_seed(5)).tolist()
KEYS = {  # what converters take over from every config.json
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
    "attention.sliding_window": ("sliding_window",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "attention.scale": ("attention_multiplier",),
    "logit_scale": ("logits_scaling",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
GEMMA4: dict[str, Any] = {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
GEMMA4 |= {"attention.key_length": 24, "attention.key_length_swa": 16}
GEMMA4 |= {"attention.sliding_window_pattern": [True, True, False, True, False]}
FAMILIES = {  # case -> architecture, what its converter writes besides
    "granite": ("granite", {}),
    "phi-3, part of a head turned": ("phi3", {"rope.dimension_count": 4, "rope.freq_base": 1e3}),
    "phi-3, long": (
        "phi3",
        {
            "rope.dimension_count": 6,
            "rope.freq_base": 1e3,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": float(np.sqrt(1 + np.log(4) / np.log(32))),
        },
    ),
    "gpt-2": ("gpt2", {"feed_forward_length": 128}),
    "gpt-bigcode": ("starcoder", {}),
    "gemma": ("gemma", {}),
    "smollm 3, as converted": ("smollm3", {"rope.freq_base": 2e6}),
    "stablelm": ("stablelm", {"rope.dimension_count": 2}),
    "stablelm, parallel": ("stablelm", {"rope.dimension_count": 2}),
    "starcoder 2": ("starcoder2", {}),
    "gemma 2 as converted": ("gemma2", {"rope.freq_base": 1e4}),
    "gemma 3 as converted": ("gemma3", {"rope.freq_base": 1e6}),
    "gemma 4": ("gemma4", GEMMA4 | {"attention.shared_kv_layers": 2}),
    "gemma 4, keys as values": ("gemma4", GEMMA4),
    "gemma 4, experts": ("gemma4", GEMMA4),
}


def stored(name: str, tensor: torch.Tensor, architecture: str, config: dict[str, Any]) -> Any:
    """What a converter does to a tensor's numbers."""
    value = tensor.float().numpy()
    if architecture in ("gemma", "gemma2", "gemma3") and name.endswith("norm.weight"):
        return value + 1
    if architecture == "gpt2" and ".c_" in name and value.ndim == 2:
        return np.ascontiguousarray(value.T)
    if architecture in ("granite", "smollm3") and ("q_proj" in name or "k_proj" in name):
        key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
        return interleave(value, config[key])
    return value


def gemma4_lists(config: dict[str, Any]) -> dict[str, Any]:
    """What its converter says of every layer, and of what only some models have."""
    num_layers, changed = config["num_hidden_layers"], config["per_layer_config"]
    heads = [config["num_key_value_heads"]] * num_layers
    for at, some in changed.items():
        heads[int(at)] = some.get("num_key_value_heads", heads[int(at)])
    widths = [config["intermediate_size"]] * num_layers
    for at in range(num_layers - config["num_kv_shared_layers"], num_layers):
        widths[at] *= 1 + config["use_double_wide_mlp"]
    found = {"attention.head_count_kv": heads, "feed_forward_length": widths}
    found["embedding_length_per_layer_input"] = config["hidden_size_per_layer_input"]
    if config["enable_moe_block"]:
        keys = {"expert_count": "num_experts", "expert_used_count": "top_k_experts"}
        keys["expert_feed_forward_length"] = "moe_intermediate_size"
        found |= {key: config[name] for key, name in keys.items()}
    return found


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        return writer.add_array(key, value)
    return (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)


def gguf_name(names: gguf.TensorNameMap, name: str) -> str:
    """As converters have it; those of Gemma 4 give some tensors a suffix first."""
    scales = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
    for ending, part in scales.items():
        if name.endswith(ending):
            return f"blk.{name.split('.')[2]}.{part}.scale"
    name += ".weight" if name.endswith(("layer_scalar", "experts.gate_up_proj")) else ""
    name += ".weight" if name.endswith(".experts.down_proj") else ""
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)


def convert(path: Path, case: str) -> Any:
    """Write the case's model; returns transformers' own."""
    architecture, more = FAMILIES[case]
    theirs, config, tensors = make(case)
    more = more | (gemma4_lists(config) if architecture == "gemma4" else {})
    writer = gguf.GGUFWriter(path, architecture)
    for key, names in KEYS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        value = more.pop(key, value) if key in more else value
        if value is not None:
            add_key(writer, f"{architecture}.{key}", value)
    for key, value in more.items():
        add_key(writer, f"{architecture}.{key}", value)
    arch = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, 5)
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        found = gguf_name(names, name)
        writer.add_tensor(found, stored(name, tensor, architecture, config))
    if case == "phi-3, long":
        scaling = config["rope_parameters"]
        for key in ("long", "short"):
            factors = np.array(scaling[f"{key}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{key}.weight", factors)
    if architecture == "gemma4":
        factors = np.array([1.0] * 3 + [1e30] * 9, np.float32)  # a quarter of 24 numbers is turned
        writer.add_tensor("rope_freqs.weight", factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return theirs


@pytest.mark.parametrize("case", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = convert(tmp_path / "m.gguf", case)
    expected = theirs(torch.tensor([IDS])).logits[0]
    ours = load_decoder(open_weights(tmp_path / "m.gguf"))
    torch.testing.assert_close(plain_logits(ours, IDS), expected, atol=1e-4, rtol=1e-4)
