"""Families in GGUF files, named as the gguf package names them, against transformers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from builders import DictWeights
from hunch.errors import UnsupportedModelError
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights
from hunch.models.weights.configs import unified_config
from their_models import check_logits, make
from tiny_gguf import add_key, finish, interleave, names_in

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")
KEYS = {  # what converters take over from every config.json
    "block_count": ("num_hidden_layers", "n_layer"),
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": (
        "layer_norm_epsilon",
        "layer_norm_eps",
        "norm_epsilon",
        "norm_eps",
    ),
    "attention.sliding_window": ("sliding_window",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "attention.scale": ("attention_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "use_parallel_residual": ("use_parallel_residual",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
GEMMA4: dict[str, Any] = {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
GEMMA4 |= {"attention.key_length": 24, "attention.key_length_swa": 16}
GEMMA4 |= {"attention.sliding_window_pattern": [True, True, False, True, False]}
MPT: dict[str, Any] = {"embedding_length": 32, "attention.head_count": 4, "block_count": 3}
MPT |= {"feed_forward_length": 128, "context_length": 128}
FAMILIES = {  # case -> architecture, what its converter writes besides
    "granite": ("granite", {}),
    "minicpm": ("minicpm", {}),
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
    "qwen2": ("qwen2vl", {"rope.dimension_sections": [1, 2, 1, 0]}),
    "qwen3": ("qwen3vl", {"rope.dimension_sections": [2, 3, 3, 0], "n_deepstack_layers": 3}),
    "gpt-2": ("gpt2", {"feed_forward_length": 128}),
    "gpt-bigcode": ("starcoder", {}),
    "gemma": ("gemma", {}),
    "smollm 3, as converted": ("smollm3", {"rope.freq_base": 2e6}),
    "stablelm": ("stablelm", {"rope.dimension_count": 2}),
    "stablelm, parallel": ("stablelm", {"rope.dimension_count": 2}),
    "starcoder 2": ("starcoder2", {}),
    "gpt-neox": ("gptneox", {"rope.dimension_count": 2}),
    "gpt-neox, one after the other": ("gptneox", {"rope.dimension_count": 2}),
    "falcon, grouped heads": ("falcon", {"feed_forward_length": 128}),
    "falcon": ("falcon", {"feed_forward_length": 56, "attention.head_count_kv": 1}),
    "phi": ("phi2", {"rope.dimension_count": 4}),
    "nemotron": ("nemotron", {"rope.dimension_count": 4}),
    "arcee": ("arcee", {}),
    "olmo 2": ("olmo2", {}),
    "olmo 3": ("olmo2", {"rope.freq_base": 5e5}),
    "exaone 4": ("exaone4", {}),
    "exaone 4, windows": (
        "exaone4",
        {"attention.sliding_window_pattern": [True, False, True], "rope.freq_base": 500.0},
    ),
    "cohere": ("command-r", {"rope.freq_base": 5e5}),
    "cohere 2": ("cohere2", {}),
    "glm": ("chatglm", {"rope.dimension_count": 8}),
    "llama, grouped heads, tied": ("exaone", {}),
    "glm 4": ("glm4", {"rope.dimension_count": 8}),
    "seed-oss": ("seed_oss", {}),
    "ernie 4.5": ("ernie4_5", {"rope.freq_base": 5e5}),
    "olmo": ("olmo", {"attention.layer_norm_epsilon": 1e-5}),
    "olmo, limits": ("olmo", {"attention.layer_norm_epsilon": 1e-5, "attention.clamp_kqv": 0.7}),
    "hunyuan": ("hunyuan-dense", {}),
    # Converters make another theta of alpha.
    "hunyuan, alpha": ("hunyuan-dense", {"rope.freq_base": 1e4 * 50 ** (16 / 14)}),
    "ministral 3": (
        "mistral3",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 1000.0}
        | {"rope.scaling.original_context_length": 32, "attention.temperature_scale": 0.4}
        | {"rope.scaling.yarn_log_multiplier": 1.0},
    ),
    "apertus": ("apertus", {"rope.freq_base": 1.2e7}),
    "bloom": ("bloom", {"feed_forward_length": 128, "context_length": 128}),
    "mpt": ("mpt", MPT | {"attention.max_alibi_bias": 8.0}),
    "cohere, head norms": ("command-r", {"rope.freq_base": 5e5}),
    "llama, yarn, betas": (
        "llama",
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 1000.0}
        | {"rope.scaling.original_context_length": 32, "rope.scaling.yarn_beta_fast": 8.0}
        | {"rope.scaling.yarn_beta_slow": 2.0, "rope.scaling.yarn_attn_factor": 1.3},
    ),
    # Its converter takes fused tensors apart: what is left is Llama.
    "llama": ("internlm2", {}),
    "gemma 2 as converted": ("gemma2", {"rope.freq_base": 1e4}),
    "gemma 3 as converted": ("gemma3", {"rope.freq_base": 1e6}),
    "gemma 4": ("gemma4", GEMMA4 | {"attention.shared_kv_layers": 2}),
    "gemma 4, keys as values": ("gemma4", GEMMA4),
    "gemma 4, experts": ("gemma4", GEMMA4),
}


def stored(name: str, tensor: torch.Tensor, architecture: str, config: dict[str, Any]) -> Any:
    """What a converter does to a tensor's numbers."""
    value = tensor.float().numpy()
    if architecture in ("gemma", "gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return value + 1
    if architecture == "gpt2" and ".c_" in name and value.ndim == 2:
        return np.ascontiguousarray(value.T)
    if name.split(".")[-2] == "query_key_value":  # a KV head's queries, key and value
        groups = config.get("num_kv_heads", config.get("n_head", 4))
        groups = groups if config.get("new_decoder_architecture", True) else 1
        parts = np.split(value.reshape(groups, -1, 8, *value.shape[1:]), [-2, -1], axis=1)
        return np.concatenate([part.reshape(-1, *value.shape[1:]) for part in parts])
    turned = ("granite", "minicpm", "smollm3", "arcee", "mistral3", "olmo", "internlm2", "llama")
    if architecture in turned and ("q_proj" in name or "k_proj" in name):
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


def gguf_name(names: gguf.TensorNameMap, name: str) -> str:
    """As converters have it; those of Gemma 4 give some tensors a suffix first."""
    scales = {"router.scale": "ffn_gate_inp", "router.per_expert_scale": "ffn_down_exps"}
    for ending, part in scales.items():
        if name.endswith(ending):
            return f"blk.{name.split('.')[2]}.{part}.scale"
    name += ".weight" if name.endswith(("layer_scalar", "experts.gate_up_proj")) else ""
    name += ".weight" if name.endswith(".experts.down_proj") else ""
    suffixes = (".weight", ".bias")
    found = names.get_name(name, suffixes) or names.get_name(
        name.removeprefix("transformer."), suffixes
    )
    assert found is not None, name
    return str(found)


def fused_qkv(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            found[name] = value
    return found


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
    names = names_in(architecture, 5)
    if architecture == "apertus":
        for part in ("alpha_p", "alpha_n", "beta", "eps"):
            values = [t.item() for name, t in tensors.items() if name.endswith(f"act_fn.{part}")]
            writer.add_array(f"xielu.{part}", values)
        factors = 1.2e7 ** -(np.arange(4) / 4) / theirs.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    if case == "glm":  # as THUDM's own files have it
        tensors = fused_qkv(tensors)
    for name, tensor in tensors.items():
        if ".act_fn." in name:
            continue
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        found = gguf_name(names, name)
        writer.add_tensor(found, stored(name, tensor, architecture, config))
    if case == "phi-3, long":
        scaling = config["rope_parameters"]
        for key in ("long", "short"):
            factors = np.array(scaling[f"{key}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{key}.weight", factors)
    if case == "exaone 4, windows":
        factors = 500.0 ** -(np.arange(4) / 4) / theirs.model.rotary_emb.inv_freq.numpy()
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    if architecture == "gemma4":
        factors = np.array([1.0] * 3 + [1e30] * 9, np.float32)  # a quarter of 24 numbers is turned
        writer.add_tensor("rope_freqs.weight", factors)
    finish(writer)
    return theirs


@pytest.mark.parametrize("case", FAMILIES)
@torch.no_grad()
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = convert(tmp_path / "m.gguf", case)
    ours = load_decoder(open_weights(tmp_path / "m.gguf"))
    check_logits(ours, theirs)


@torch.no_grad()
def test_minicpm_without_the_keys_of_its_scales(tmp_path: Path, monkeypatch) -> None:
    """Also in Hugging Face's form, by the keys of its own code."""
    for key in ("embedding_scale", "residual_scale", "logit_scale"):
        monkeypatch.delitem(KEYS, key)
    theirs = convert(tmp_path / "m.gguf", "minicpm")
    ours = load_decoder(open_weights(tmp_path / "m.gguf"))
    check_logits(ours, theirs)
    _, config, tensors = make("minicpm")
    for key in ("embedding_multiplier", "residual_multiplier", "logits_scaling"):
        del config[key]
    del config["attention_multiplier"]
    config |= {"architectures": ["MiniCPMForCausalLM"], "scale_emb": 12, "scale_depth": 1.4}
    ours = load_decoder(DictWeights(unified_config(config | {"dim_model_base": 256}), tensors))
    check_logits(ours, theirs)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [("gemma3n", "use its safetensors"), ("nomic-bert", "as vectors"), ("clip", "in another one")],
)
def test_why_an_architecture_is_refused_is_said(architecture, words, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    finish(writer)
    with pytest.raises(UnsupportedModelError, match=f"{architecture}' is not supported: .*{words}"):
        open_weights(tmp_path / "m.gguf")
