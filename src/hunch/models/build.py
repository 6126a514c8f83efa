"""Decoder layers from a spec and a source of tensors: shared by targets and trained drafters."""

from __future__ import annotations

from dataclasses import dataclass

from hunch.layers.attention import Attention, Heads
from hunch.layers.block import Block, PostNormBlock
from hunch.layers.experts import Experts
from hunch.layers.mlp import MLP, GatedMLP, PlainMLP
from hunch.models.experts import EXPERT_NAMES, ExpertNames, build_experts
from hunch.models.source import Source
from hunch.models.spec import ModelSpec
from hunch.parallel.group import Group, shard_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """A family's tensor names; the defaults are Llama's. Names of a layer stand after `layer`."""

    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    attn_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    experts: ExpertNames = EXPERT_NAMES


LLAMA_NAMES = Names()


def local_heads(spec: ModelSpec, group: Group, window: int | None = None) -> Heads:
    """The heads one rank of the group holds."""
    return Heads(
        num_heads=shard_size(spec.num_heads, group, "attention heads"),
        num_kv_heads=shard_size(spec.num_kv_heads, group, "KV heads"),
        head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5,
        window=window,
    )


def build_attention(
    spec: ModelSpec,
    source: Source,
    prefix: str,
    layer: int,
    *,
    names: Names = LLAMA_NAMES,
    input_width: int | None = None,
) -> Attention:
    """`layer` is the KV layer; `input_width` differs from the model's where two inputs join."""
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    window = spec.windows[layer] if spec.windows else None
    q_norm = k_norm = None
    if spec.has_qk_norm:
        q_norm = source.rms_norm(prefix + names.q_norm, spec.head_dim, spec.norm_eps)
        k_norm = source.rms_norm(prefix + names.k_norm, spec.head_dim, spec.norm_eps)
    return Attention(
        source.linear(
            (prefix + names.q, prefix + names.k, prefix + names.v),
            (q_size, kv_size, kv_size),
            input_width or spec.width,
            has_bias=spec.has_qkv_bias,
        ),
        source.row_linear(prefix + names.out, spec.width, q_size, has_bias=spec.has_out_bias),
        local_heads(spec, source.group, window),
        layer,
        q_norm,
        k_norm,
    )


def build_mlp(
    spec: ModelSpec, source: Source, prefix: str, layer: int, *, names: Names = LLAMA_NAMES
) -> MLP | Experts:
    if spec.experts is not None and spec.experts.layers[layer]:
        return build_experts(spec, source, prefix, names.experts)
    bias = spec.has_mlp_bias
    up_names = (prefix + names.gate, prefix + names.up) if spec.is_gated else (prefix + names.up,)
    up = source.linear(up_names, (spec.ffn_width,) * len(up_names), spec.width, has_bias=bias)
    down = source.row_linear(prefix + names.down, spec.width, spec.ffn_width, has_bias=bias)
    kind = GatedMLP if spec.is_gated else PlainMLP
    return kind(up, down, spec.activation)


def build_block(
    spec: ModelSpec,
    source: Source,
    prefix: str,
    layer: int,
    *,
    names: Names = LLAMA_NAMES,
    input_width: int | None = None,
    has_attn_norm: bool = True,
) -> Block:
    """One decoder layer whose tensors are named `prefix` + the family's names."""
    kind = PostNormBlock if spec.is_post_norm else Block
    attn_norm = None
    if has_attn_norm:
        attn_norm = source.norm(prefix + names.attn_norm, spec.width, spec.norm_eps, spec.norm)
    return kind(
        attn_norm,
        build_attention(spec, source, prefix, layer, names=names, input_width=input_width),
        source.norm(prefix + names.mlp_norm, spec.width, spec.norm_eps, spec.norm),
        build_mlp(spec, source, prefix, layer, names=names),
    )
