"""Decoder layers from a spec and a source of tensors: shared by targets and trained drafters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.layers.attention import Attention, Heads
from hunch.layers.block import Block, ParallelBlock, PostNormBlock
from hunch.layers.experts import Experts
from hunch.layers.inputs import InputGate, TokenTable
from hunch.layers.mlp import MLP, GatedMLP, PlainMLP, XieluMLP
from hunch.layers.norm import HeadNorm, LayerNorm, Norm, RMSNorm
from hunch.layers.rope import head_order
from hunch.models.experts import EXPERT_NAMES, ExpertNames, build_beside, build_experts
from hunch.models.source import Source
from hunch.models.spec import ModelSpec
from hunch.parallel.group import Group, Share, head_spans


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """A family's tensor names; the defaults are Llama's. Names of a layer stand after `layer`."""

    # Prefixes of all but the output matrix: ours, then those in wrapped or bare files.
    roots: tuple[str, ...] = (
        *("model.", "model.language_model.", "language_model.model.", "model.text_model."),
        *("thinker.model.", ""),
    )
    embed: str = "model.embed_tokens.weight"
    positions: str = "model.embed_positions.weight"
    final_norm: str = "model.norm"
    head: str = "lm_head.weight"
    layer: str = "model.layers.{}."
    attn_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"  # "", as k_norm: heads are normed without weights
    k_norm: str = "self_attn.k_norm"
    embed_norm: str = "model.embed_norm"
    read_norm: str = "self_attn.attn_sub_norm"  # of the outputs of all heads
    inner_norm: str = "mlp.ffn_sub_norm"  # of the input of an MLP's last product
    attn_out_norm: str = "attn_out_norm"  # of attention's output, before it is added
    sinks: str = "self_attn.sinks"
    attn_gate: str = "self_attn.attn_gate"  # in files a part of q, head by head
    recurrent: str = "linear_attn."  # prefix of a gated delta net's parts
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    rise: str = "mlp.act_fn.alpha_p"  # of an activation that is learned, above 0 and below
    fall: str = "mlp.act_fn.alpha_n"
    experts: ExpertNames = EXPERT_NAMES
    mlp_out_norm: str = "mlp_out_norm"
    # A table with a vector of every token for every layer, and a layer's use of it.
    table: str = "model.embed_tokens_per_layer.weight"
    table_project: str = "model.per_layer_model_projection"
    table_norm: str = "model.per_layer_projection_norm"
    input_gate: str = "per_layer_input_gate"
    input_project: str = "per_layer_projection"
    input_norm: str = "post_per_layer_input_norm"
    scale: str = "layer_scalar"  # of the stream at a layer's end
    # How files fuse or add to them; see arrange.py.
    qkv: str = "self_attn.qkv_proj"
    gate_up: str = "mlp.gate_up_proj"
    project_in: str = "project_in"  # of an embedding narrower than the model
    project_out: str = "project_out"
    aliases: tuple[tuple[str, str], ...] = ()  # some files' names for a layer's parts, and ours
    unread: str = ""  # a pattern of tensors that text does not need


LLAMA_NAMES = Names()


def local_heads(spec: ModelSpec, group: Group, layer: int | None = None) -> Heads:
    """The heads one rank of the group holds: of a layer, or what all layers share."""
    spec = spec if layer is None else spec.at(layer)
    q_part, kv_part = head_spans(spec.num_heads, spec.num_kv_heads, group)
    return Heads(
        num_heads=q_part[1] - q_part[0],
        num_kv_heads=kv_part[1] - kv_part[0],
        head_dim=spec.head_dim,
        scale=spec.attn_scale or spec.head_dim**-0.5,
        cap=spec.attn_cap,
        clip=spec.qkv_clip,
        window=spec.windows[layer] if layer is not None and spec.windows else None,
        rope=0 if layer is None else spec.rope_index(layer),
        is_reader=layer is not None and spec.is_reader(layer),
    )


def head_rows(spec: ModelSpec, group: Group) -> tuple[Share, Share]:
    """The rows of q, and of k and v, that one rank of the group holds."""
    parts = head_spans(spec.num_heads, spec.num_kv_heads, group)
    (q_first, q_last), (kv_first, kv_last) = parts
    size = spec.head_dim
    return (q_first * size, q_last * size), (kv_first * size, kv_last * size)


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
    heads, spec = local_heads(spec, source.group, layer), spec.at(layer)
    heads = replace(heads, late_H=_late_norm(spec, source, prefix, names))
    if spec.alibi is not None:
        own = slice(*head_spans(spec.num_heads, spec.num_kv_heads, source.group)[0])
        alibi_NL = spec.alibi.table(own, heads.scale, spec.max_len).to(source.device)
        heads = replace(heads, alibi_NL=alibi_NL)
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q_part, kv_part = head_rows(spec, source.group)
    sinks_N = gate = None
    if spec.has_sinks:
        part = head_spans(spec.num_heads, spec.num_kv_heads, source.group)[0]
        sinks_N = source.take(prefix + names.sinks, spec.num_heads, split=0, part=part).float()
    if spec.has_attn_gate:
        gate = source.linear(
            (prefix + names.attn_gate,), (q_size,), input_width or spec.width,
            has_bias=spec.has_qkv_bias, parts=(q_part,),
        )  # fmt: skip
    num_products = 1 if heads.is_reader else 3
    return Attention(
        source.linear(
            (prefix + names.q, prefix + names.k, prefix + names.v)[:num_products],
            (q_size, kv_size, kv_size)[:num_products],
            input_width or spec.width,
            has_bias=spec.has_qkv_bias,
            parts=(q_part, kv_part, kv_part)[:num_products],
        ),
        source.row_linear(
            prefix + names.out, spec.width, q_size, has_bias=spec.has_out_bias, part=q_part
        ),
        heads,
        spec.place_of(layer),
        *_head_norms(spec, source, prefix, names, is_reader=heads.is_reader),
        sinks_N,
        gate,
        _layer_norms(spec, source, prefix, names),
        _inner_norm(spec, source, prefix + names.read_norm, q_size),
    )


def refuse_split(spec: ModelSpec, source: Source, does: str) -> None:
    """Raise if ranks have parts of what must be whole."""
    if source.group.size > 1:
        raise UnsupportedModelError(
            f"{spec.architecture} {does}, which processes that each have some of them cannot: "
            "leave tensor_parallel_size at 1"
        )


def _inner_norm(spec: ModelSpec, source: Source, name: str, width: int) -> RMSNorm | None:
    if not spec.has_inner_norms:
        return None
    refuse_split(spec, source, "norms what all heads have read at once")
    return source.rms_norm(name, width, spec.norm_eps)


def _head_norms(
    spec: ModelSpec, source: Source, prefix: str, names: Names, *, is_reader: bool
) -> tuple[RMSNorm | None, RMSNorm | None, RMSNorm | None]:
    """The norms of q, k and v."""
    if not spec.has_qk_norm or spec.is_qk_norm_centred:
        return None, None, None

    is_whole = spec.is_qk_norm_whole
    if is_whole:
        refuse_split(spec, source, "norms all heads of q and k at once")

    def norm(name: str, num_heads: int = 1) -> RMSNorm:
        size = spec.head_dim * (num_heads if is_whole else 1)
        eps = spec.qk_norm_eps or spec.norm_eps
        if not name:
            return RMSNorm(torch.ones(size, dtype=source.dtype, device=source.device), eps)
        return source.rms_norm(prefix + name, size, eps, is_whole=spec.is_norm_shifted)

    if is_reader:
        return norm(names.q_norm), None, None
    if spec.is_qk_norm_late:  # rotating does not change what they divide by; see _late_norm
        return norm(""), norm(""), None
    q_norm, k_norm = norm(names.q_norm, spec.num_heads), norm(names.k_norm, spec.num_kv_heads)
    return q_norm, k_norm, norm("") if spec.has_v_norm else None


def _layer_norms(
    spec: ModelSpec, source: Source, prefix: str, names: Names
) -> tuple[HeadNorm, HeadNorm] | None:
    """The norms of q and k. Some files have a tensor for each head."""
    if not (spec.has_qk_norm and spec.is_qk_norm_centred):
        return None
    size, order = spec.head_dim, head_order_of(spec)
    q_part, kv_part = head_spans(spec.num_heads, spec.num_kv_heads, source.group)

    def read(name: str, ending: str, num_heads: int, part: Share) -> Tensor:
        if not spec.is_qk_norm_own:
            rows_NH = source.take(f"{name}.{ending}", size)[None]
        elif "{}" in name:
            each = [source.take(f"{name.format(head)}.{ending}", size) for head in range(num_heads)]
            rows_NH = torch.stack(each)[slice(*part)]
        else:
            rows_NH = source.take(f"{name}.{ending}", num_heads, size)[slice(*part)]
        return rows_NH if order is None or not rows_NH.numel() else rows_NH[:, order]

    def norm(name: str, num_heads: int, part: Share) -> HeadNorm:
        bias_NH = read(name, "bias", num_heads, part) if spec.has_qk_norm_bias else None
        return HeadNorm(read(name, "weight", num_heads, part), bias_NH, spec.norm_eps)

    return (
        norm(prefix + names.q_norm, spec.num_heads, q_part),
        norm(prefix + names.k_norm, spec.num_kv_heads, kv_part),
    )


def head_order_of(spec: ModelSpec) -> list[int] | None:
    """The order of a head's numbers on disk; None: it is the kernels' own."""
    dim = spec.rope.dim if spec.rope else 0
    return head_order(spec.head_dim, dim, spec.is_rope_interleaved)


def _late_norm(spec: ModelSpec, source: Source, prefix: str, names: Names) -> Tensor | None:
    """Weights of norms of rotated heads: those of keys are multiplied into the queries', as scores
    need only their product."""
    if not (spec.has_qk_norm and spec.is_qk_norm_late):
        return None
    q_H, k_H = (
        source.floats(f"{prefix}{name}.weight", spec.head_dim)
        for name in (names.q_norm, names.k_norm)
    )
    return q_H * k_H


def build_mlp(
    spec: ModelSpec, source: Source, prefix: str, layer: int, *, names: Names = LLAMA_NAMES
) -> MLP | Experts:
    experts = spec.experts
    if experts is not None and experts.layers[layer] and not experts.is_beside:
        return build_experts(spec, source, prefix, names.experts)
    spec, bias = spec.at(layer), spec.has_mlp_bias
    up_names = (prefix + names.gate, prefix + names.up) if spec.is_gated else (prefix + names.up,)
    up = source.linear(up_names, (spec.ffn_width,) * len(up_names), spec.width, has_bias=bias)
    down = source.row_linear(prefix + names.down, spec.width, spec.ffn_width, has_bias=bias)
    if spec.activation == "xielu":
        rise_1, fall_1 = (source.floats(prefix + name, 1) for name in (names.rise, names.fall))
        return XieluMLP(up, down, rise_1, fall_1)
    if spec.is_gated:
        norm = _inner_norm(spec, source, prefix + names.inner_norm, spec.ffn_width)
        return GatedMLP(up, down, spec.activation, norm)
    return PlainMLP(up, down, spec.activation)


def build_block(
    spec: ModelSpec,
    source: Source,
    prefix: str,
    layer: int,
    *,
    names: Names = LLAMA_NAMES,
    input_width: int | None = None,
    has_attn_norm: bool = True,
    block_class: type[Block] = Block,
) -> Block:
    """One decoder layer whose tensors are named `prefix` + the family's names."""
    experts = spec.experts
    block_class = ParallelBlock if spec.is_parallel else block_class
    block_class = PostNormBlock if spec.is_post_norm else block_class
    is_beside = experts is not None and experts.is_beside and experts.layers[layer]

    def norm(name: str, is_there: bool) -> Norm | None:
        return build_norm(spec, source, prefix + name) if is_there else None

    return block_class(
        norm(names.attn_norm, has_attn_norm and spec.has_input_norms),
        build_attention(spec, source, prefix, layer, names=names, input_width=input_width),
        norm(names.mlp_norm, spec.has_mlp_norm and spec.has_input_norms),
        build_mlp(spec, source, prefix, layer, names=names),
        attn_out_norm=norm(names.attn_out_norm, spec.has_branch_norms),
        mlp_out_norm=norm(names.mlp_out_norm, spec.has_branch_norms),
        residual_scale=spec.residual_scale,
        beside=build_beside(spec, source, prefix, names.experts) if is_beside else None,
        inputs=build_gate(spec, source, prefix, names),
        scale_1=source.take(prefix + names.scale, 1) if spec.has_layer_scale else None,
    )


def build_gate(spec: ModelSpec, source: Source, prefix: str, names: Names) -> InputGate | None:
    """A layer's use of its vectors in the table."""
    inputs = spec.inputs
    if inputs is None:
        return None
    gate, project = prefix + names.input_gate, prefix + names.input_project
    return InputGate(
        source.linear((gate,), (inputs.width,), spec.width, is_split=False),
        source.linear((project,), (spec.width,), inputs.width, is_split=False),
        source.rms_norm(prefix + names.input_norm, spec.width, spec.norm_eps),
        spec.activation,
    )


def build_table(spec: ModelSpec, source: Source, names: Names) -> TokenTable | None:
    """The table with a vector of every token for every layer."""
    inputs = spec.inputs
    if inputs is None:
        return None
    size = spec.num_layers * inputs.width
    return TokenTable(
        source.take(names.table, inputs.vocab_size, size),
        source.linear((names.table_project,), (size,), spec.width, is_split=False),
        source.rms_norm(names.table_norm, inputs.width, spec.norm_eps),
        table_scale=inputs.width**0.5,
        project_scale=spec.width**-0.5,
    )


def build_rms_norms(
    spec: ModelSpec, source: Source, prefix: str, names: Names
) -> tuple[RMSNorm, RMSNorm]:
    """The norms before the two halves of a layer that supports no others."""
    attn_norm, mlp_norm = (
        build_norm(spec, source, prefix + name) for name in (names.attn_norm, names.mlp_norm)
    )
    assert isinstance(attn_norm, RMSNorm)
    assert isinstance(mlp_norm, RMSNorm)
    return attn_norm, mlp_norm


def build_norm(spec: ModelSpec, source: Source, name: str) -> Norm:
    """A norm of the residual stream, or of what is added to it."""
    if not spec.has_norm_weight:
        weight_D = torch.ones(spec.width, dtype=source.dtype, device=source.device)
        norm_class = RMSNorm if spec.norm == "rms" else partial(LayerNorm, bias_D=None)
        return norm_class(weight_D, eps=spec.norm_eps)
    if spec.norm == "rms":
        return source.rms_norm(name, spec.width, spec.norm_eps, is_whole=spec.is_norm_shifted)
    return source.layer_norm(name, spec.width, spec.norm_eps, has_bias=spec.has_norm_bias)
