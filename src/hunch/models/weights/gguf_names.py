"""From GGUF's names of tensors to Hugging Face's, which the family knows."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

from hunch.errors import UnsupportedModelError
from hunch.hub.gguf_file import GgufHeader
from hunch.models.weights.gguf_known import ARCHITECTURES
from hunch.registry import MODELS, resolve

if TYPE_CHECKING:
    from hunch.models.build import Names

# Parts whose name is all of the tensor's.
_BARE = ("exp_probs_b", "attn_sinks", "layer_output_scale", "ssm_a", "ssm_d", "ssm_dt")
_SINGLE = ("ssm_a", "ssm_d", "ffn_norm")  # whose names may end so; the last in Falcon-H1's files
_LATENT = {  # a head's matrices to keys and to values may be apart, the former transposed
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b",
    "attn_v_b": "self_attn.v_b",
}
_RECURRENT = {
    "ssm_in": "in_proj",
    "ssm_x": "x_proj",
    "ssm_a": "A_log",  # stored as -e^x
    "ssm_d": "D",
    "ssm_dt": "dt_bias",
    "ssm_ba": "in_proj_ba",
    "ssm_beta": "in_proj_b",
    "ssm_alpha": "in_proj_a",
    "ssm_conv1d": "conv1d",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
    "shortconv.conv": "conv",
    "shortconv.in_proj": "in_proj",
    "shortconv.out_proj": "out_proj",
}
_DELTAS = ("qwen3next", "qwen35", "qwen35moe")
_HAS_RECURRENT = (
    *(*_DELTAS, "lfm2", "lfm2moe", "granitehybrid", "falcon-h1", "mamba", "mamba2"),
    *("nemotron_h", "nemotron_h_moe"),
)
_DELTA = {"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"}
_LAST_NORM = {"token_embd_norm": "model.embedding_norm"}  # despite its name
_FUSED = {"ffn_up": "mlp.gate_up_proj"}
_OWN = {  # names that mean another part in files of an architecture
    **dict.fromkeys(("phi3", "chatglm", "glm4"), _FUSED),
    **dict.fromkeys(_DELTAS, _DELTA),
    **dict.fromkeys(("lfm2", "lfm2moe"), _LAST_NORM),
    "deepseek2": _LATENT,
    "mamba": {"ssm_dt": "mixer.dt_proj"},
}
_NAME = re.compile(
    r"(?:blk\.(?P<layer>\d{1,5})\.)?(?P<part>(?:shortconv\.)?\w+)(?:\.(?P<ending>weight|bias|scale))?"
)
_DRAFTING = re.compile(r"blk\.(?P<layer>\d{1,5})\.nextn\.(?P<rest>[\w.]+)")  # of MTP layers


def hf_name(header: GgufHeader, prefix: str, name: str) -> str:
    """The Hugging Face name of a tensor of a file of the architecture `prefix`."""
    if drafting := _DRAFTING.fullmatch(name):
        return f"model.layers.{int(drafting['layer'])}.nextn.{drafting['rest']}"
    names, match = _names_of(prefix), _NAME.fullmatch(name)
    table = _table(prefix, bool(match and match["layer"]))
    is_whole = match is not None and (match["ending"] is not None or match["part"] in _SINGLE)
    if match is None or not is_whole or match["part"] not in table:
        raise UnsupportedModelError(
            f"{header.path} has a tensor {name!r} that no {prefix} model has"
        )
    part, outer = match["part"], names.layer.format(int(match["layer"])) if match["layer"] else ""
    if prefix == "falcon" and "blk.0.attn_norm_2.weight" in header.tensors:  # 40B
        part = {"attn_norm": "ffn_norm", "attn_norm_2": "attn_norm"}.get(part, part)
    if match["ending"] == "scale":
        scales = {"ffn_gate_inp": names.experts.router_scale, "ffn_down_exps": names.experts.factor}
        return outer + scales.get(part, table[part])
    is_bare = part in _BARE and (prefix, part) != ("mamba", "ssm_dt")
    return f"{outer}{table[part]}" + ("" if is_bare else f".{match['ending'] or 'weight'}")


def _names_of(prefix: str) -> Names:
    names: Names = resolve(MODELS, ARCHITECTURES[prefix][0]).names
    return names


@cache
def _table(prefix: str, is_inner: bool) -> dict[str, str]:
    """Names of parts of a layer, or of those outside, without their endings."""
    names = _names_of(prefix)
    table = _inner(names) if is_inner else _outer(names)
    if prefix in _HAS_RECURRENT:
        table |= {theirs: names.recurrent + ours for theirs, ours in _RECURRENT.items()}
    return table | _OWN.get(prefix, {})


def _outer(names: Names) -> dict[str, str]:
    return {
        "token_embd": names.embed.removesuffix(".weight"),
        "token_embd_norm": names.embed_norm,
        "position_embd": names.positions.removesuffix(".weight"),
        "output_norm": names.final_norm,
        "output": names.head.removesuffix(".weight"),
        "per_layer_token_embd": names.table.removesuffix(".weight"),
        "per_layer_model_proj": names.table_project,
        "per_layer_proj_norm": names.table_norm,
        # No parameters: what each rotary frequency is divided by.
        "rope_freqs": "rope_freqs",
        "rope_factors_short": "rope_freqs_short",
        "rope_factors_long": "rope_freqs_long",
    }


def _inner(names: Names) -> dict[str, str]:
    experts, parts = names.experts, ("gate", "up", "down")
    has_out_norm = names.attn_out_norm != "attn_out_norm"
    return {
        "attn_norm": names.attn_norm,
        "attn_norm_2": names.attn_norm,
        "attn_q": names.q,
        "attn_k": names.k,
        "attn_v": names.v,
        "attn_qkv": names.qkv,
        "attn_output": names.out,
        "attn_q_norm": names.q_norm,
        "attn_k_norm": names.k_norm,
        "attn_sinks": names.sinks,
        # Before the MLP, where what attention gives is not normed.
        "post_attention_norm": names.attn_out_norm if has_out_norm else names.mlp_norm,
        "ffn_norm": names.mlp_norm,
        "ffn_gate": names.gate,
        "ffn_up": names.up,
        "ffn_down": names.down,
        "post_ffw_norm": names.mlp_out_norm,
        "layer_output_scale": names.scale,
        "inp_gate": names.input_gate,
        "proj": names.input_project,
        "post_norm": names.input_norm,
        # The router, and tensors that hold all experts; see arrange.py.
        "ffn_gate_inp": "mlp.gate",
        **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in parts},
        "ffn_gate_up_exps": experts.all_up,
        "ffn_gate_inp_shexp": experts.shared_gate,
        **{f"ffn_{part}_shexp": f"{experts.shared}{part}_proj" for part in parts},
        "exp_probs_b": experts.choice_bias,
        "pre_ffw_norm_2": experts.norm,
        "post_ffw_norm_1": experts.mlp_out_norm,
        "post_ffw_norm_2": experts.out_norm,
    }
