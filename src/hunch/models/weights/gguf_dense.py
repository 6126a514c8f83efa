"""A GGUF's metadata about dense models not built like Llama, as keys of a config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hunch.models.weights.gguf_layers import layer_types
from hunch.models.weights.gguf_reader import Reader

Found = dict[str, Any]

_NO_BIASES = {"attention_bias": None, "mlp_bias": None}  # keys that the family does not have


def _eps(read: Reader) -> float:
    return read.real("attention.layer_norm_epsilon")


def _chatglm(read: Reader, config: Found) -> Found:
    has_fused = "blk.0.attn_qkv.bias" in read.header.tensors
    return {"attention_bias": has_fused or config["attention_bias"]}


def _granite(read: Reader, config: Found) -> Found:
    return {
        "embedding_multiplier": read.real("embedding_scale", 1.0),
        "residual_multiplier": read.real("residual_scale", 1.0),
        "attention_multiplier": read.real("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": read.real("logit_scale", 1.0),
    }


def _minicpm(read: Reader, config: Found) -> Found:
    """Files without the keys are of the first models, whose scales llama.cpp has built in."""
    found = _granite(read, config)
    if f"{read.prefix}.embedding_scale" in read.header.metadata:
        return found
    return found | {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 1.4 * config["num_hidden_layers"] ** -0.5,
        "logits_scaling": config["hidden_size"] / 256,
    }


def _gemma(read: Reader, config: Found) -> Found:
    """The largest model's scale of scores, which llama.cpp recognises by the number of layers."""
    num_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    is_largest = num_layers == {"gemma2": 46, "gemma3": 62}.get(read.prefix)
    by_heads = config["hidden_size"] // config["num_attention_heads"]
    found = {
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": by_heads if is_largest else head_dim,
    }
    if read.prefix == "gemma":
        del found["query_pre_attn_scalar"]
        return found
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = read.number(key, 0)
        found[key] = read.real(key) if value else None
    if read.prefix == "gemma3":
        found["rope_local_base_freq"] = read.real("rope.freq_base_swa", 10000.0)
    return found


def _stablelm(read: Reader, config: Found) -> Found:
    return {
        "layer_norm_eps": _eps(read),
        "use_qkv_bias": config["attention_bias"],
        "attention_bias": None,
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in read.header.tensors,
    }


def _starcoder2(read: Reader, config: Found) -> Found:
    has_bias = config["attention_bias"]
    act = "gelu_pytorch_tanh"
    return _NO_BIASES | {"norm_epsilon": _eps(read), "hidden_act": act, "use_bias": has_bias}


def _gpt_neox(read: Reader, config: Found) -> Found:
    return {
        "layer_norm_eps": _eps(read),
        "hidden_act": "gelu",
        "use_parallel_residual": bool(read.get("use_parallel_residual", True)),
        "attention_bias": "blk.0.attn_qkv.bias" in read.header.tensors,
        "mlp_bias": None,
    }


def _falcon(read: Reader, config: Found) -> Found:
    tensors = read.header.tensors
    return _NO_BIASES | {
        "layer_norm_epsilon": _eps(read),
        "hidden_act": "gelu",
        "num_ln_in_parallel_attn": 1 + ("blk.0.attn_norm_2.weight" in tensors),
        "ffn_hidden_size": config["intermediate_size"],
        "bias": "blk.0.attn_qkv.bias" in tensors,
    }


def _bloom(read: Reader, config: Found) -> Found:
    size = {"seq_length": config["max_position_embeddings"]}
    return _NO_BIASES | size | {"layer_norm_epsilon": _eps(read)}


def _mpt(read: Reader, config: Found) -> Found:
    clip = read.real("attention.clamp_kqv", 0.0) or None
    most = read.real("attention.max_alibi_bias", 0.0)
    return _NO_BIASES | {
        "d_model": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "max_seq_len": config["max_position_embeddings"],
        "expansion_ratio": config["intermediate_size"] // config["hidden_size"],
        "attn_config": {"alibi": most > 0, "alibi_bias_max": most or 8, "clip_qkv": clip},
        "layer_norm_epsilon": _eps(read),
    }


def _cohere(read: Reader, config: Found) -> Found:
    return {
        "layer_norm_eps": _eps(read),
        "logit_scale": read.real("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in read.header.tensors,
    }


def _olmo2(read: Reader, config: Found) -> Found:
    if config["sliding_window"] is None:
        return {}
    found = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return found | _windows(read, config)


def _windows(read: Reader, config: Found) -> Found:
    """One layer without a window after three with one, if the model has windows."""
    is_on = config["sliding_window"] is not None
    return {"layer_types": layer_types(read, config, 4)} if is_on else {}


def _ministral3(read: Reader, config: Found) -> Found:
    """Queries grow with their position; YaRN's two scales of attention are alike where a file has
    one."""
    scaling = config["rope_scaling"]
    beta = read.real("attention.temperature_scale", 0.0)
    if not scaling or not beta:
        return {}
    has_scale = bool(read.number("rope.scaling.yarn_log_multiplier", 0))
    more = {"llama_4_scaling_beta": beta, "attention_factor": 1.0 if has_scale else None}
    return {"rope_scaling": {**scaling, **more}}


KEYS: dict[str, Callable[[Reader, Found], Found]] = {
    "apertus": lambda read, config: {"hidden_act": "xielu"},  # its learned numbers: see gguf.py
    "arcee": lambda read, config: {"hidden_act": "relu2"},
    "chatglm": _chatglm,
    "bloom": _bloom,
    "cohere2": lambda read, config: (
        _cohere(read, config) | {"layer_types": layer_types(read, config, 4)}
    ),
    "command-r": _cohere,
    "ernie4_5": lambda read, config: _NO_BIASES | {"use_bias": config["attention_bias"]},
    "exaone4": _windows,
    "falcon": _falcon,
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), _gemma),
    "gptneox": _gpt_neox,
    "granite": _granite,
    "minicpm": _minicpm,
    "mistral3": _ministral3,
    "mpt": _mpt,
    "nemotron": lambda read, config: {"norm_eps": _eps(read), "hidden_act": "relu2"},
    "olmo": lambda read, config: {"clip_qkv": read.real("attention.clamp_kqv", 0.0) or None},
    "olmo2": _olmo2,
    "phi2": lambda read, config: (
        _NO_BIASES | {"layer_norm_eps": _eps(read), "hidden_act": "gelu_new"}
    ),
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
