"""A drafter's layers on the CPU's own kernels: all of a step behind one call.

Where it fits, a network of models/heads hands its parts over to this; the torch code beside them is
the specification. Matrices are shared, not copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hunch.kernels.native import NativeNetwork
from hunch.kernels.native_library import is_available
from hunch.kernels.native_matrix import FLOAT, INT8, NativeMatrix
from hunch.kernels.native_structs import LayerStruct, NativePart
from hunch.layers.block import Block
from hunch.layers.experts import Experts
from hunch.layers.linear import Linear
from hunch.layers.mlp import GatedMLP
from hunch.layers.norm import RMSNorm
from hunch.models.heads.files import NativeLinear, Table
from hunch.models.heads.step import MARGIN, StepNet
from hunch.models.native import NativeDecoder, is_supported, numbers_of

_PANEL = 32  # another matrix may begin after a multiple of these rows


def build_network(
    net: StepNet,
    target: NativeDecoder,
    blocks: list[Any],
    *,
    project: Linear | None,
    lm_head: Linear | None,
    final_norm: RMSNorm | None = None,
    **join: Any,
) -> NativeNetwork | None:
    """The network `net` describes, or None where the kernels cannot compute it."""
    spec = net.spec
    if not is_available() or not all(map(_fits, blocks)):
        return None
    linears = [project, lm_head, *(linear for block in blocks for linear in _linears(block))]
    if any(linear is not None and not isinstance(linear, NativeLinear) for linear in linears):
        return None
    if not is_supported(spec) or spec.ffn_width % _PANEL:
        return None
    table = target.embedding
    if isinstance(net.embed, Table):
        matrix_format = INT8 if target.is_quantised else FLOAT
        table = NativeMatrix.from_floats(
            net.embed.weight_VD, matrix_format, torch.get_num_threads()
        )
        net.embed = table.rows  # one copy is enough
        net.matrix_bytes += table.nbytes
    weights: dict[str, Any] = {
        name: _floats(part.weight_D) if isinstance(part, RMSNorm) else part
        for name, part in join.items()
    }
    # Logits only choose a draft: what scales or bounds them is left out.
    numbers: dict[str, Any] = {
        **numbers_of(spec, blocks[0].attn.heads),
        "max_len": spec.max_len + MARGIN,
        "embed_scale": 1.0,
        "logits_scale": 1.0,
        "logits_cap": 0.0,
    }
    return NativeNetwork(
        [_layer(block, place) for place, block in enumerate(blocks)],
        **numbers,
        embedding=table,
        head=lm_head.matrix if isinstance(lm_head, NativeLinear) else target.head,
        final_norm=None if final_norm is None else _floats(final_norm.weight_D),
        rope=net.rope.table_LH.contiguous(),
        kv_dtype=net.kv_dtype,
        num_threads=torch.get_num_threads(),
        joins=1,
        project=project.matrix if isinstance(project, NativeLinear) else None,
        project_bias=None if project is None else _floats(project.bias_N),
        **weights,
    )


def _linears(block: Block) -> list[Linear]:
    mlp = block.mlp
    assert not isinstance(mlp, Experts)  # _fits looked
    up = mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up
    return [block.attn.qkv, block.attn.out, up, mlp.down]


def _native(linear: Linear) -> NativeLinear:
    assert isinstance(linear, NativeLinear)  # build_network looked
    return linear


def _fits(block: Any) -> bool:
    if not isinstance(block, Block):
        return False  # torch computes latent attention of a head
    norms = (block.attn_norm, block.mlp_norm)
    return (
        type(block) is Block
        and block.attn_out_norm is None
        and block.mlp_norm is not None
        and isinstance(block.mlp, GatedMLP)
        and block.attn.gate is None
        and all(norm is None or isinstance(norm, RMSNorm) for norm in norms)
    )


def _layer(block: Block, place: int) -> NativePart:
    """q, k and v stay one matrix, as do gate and up: each begins at a row of it."""
    attn = block.attn
    qkv, out, up, down = (_native(linear) for linear in _linears(block))
    q_size = attn.heads.num_heads * attn.heads.head_dim
    kv_size = attn.heads.num_kv_heads * attn.heads.head_dim
    ffn_width = up.matrix.num_out // 2
    biases = {"out_bias": _floats(out.bias_N), "down_bias": _floats(down.bias_N)}
    if qkv.bias_N is not None:
        parts = _split(qkv.bias_N, (q_size, kv_size, kv_size))
        biases |= dict(zip(("q_bias", "k_bias", "v_bias"), parts, strict=True))
    if up.bias_N is not None:
        parts = _split(up.bias_N, (ffn_width, ffn_width))
        biases |= dict(zip(("gate_bias", "up_bias"), parts, strict=True))
    norm = block.attn_norm
    return NativePart(
        LayerStruct,
        q=qkv.matrix,
        k=qkv.matrix,
        v=qkv.matrix,
        out=out.matrix,
        gate=up.matrix,
        up=up.matrix,
        down=down.matrix,
        k_row=q_size,
        v_row=q_size + kv_size,
        up_row=ffn_width,
        **biases,
        attn_norm=_floats(norm.weight_D) if isinstance(norm, RMSNorm) else None,
        mlp_norm=_floats(None if block.mlp_norm is None else block.mlp_norm.weight_D),
        q_norm=None if attn.q_norm is None else _floats(attn.q_norm.weight_D),
        k_norm=None if attn.k_norm is None else _floats(attn.k_norm.weight_D),
        window=attn.heads.window or 0,
        place=place,
        stream_scale=1.0,
    )


def _split(bias_N: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    return [part.float().clone() for part in bias_N.split_with_sizes(sizes)]


def _floats(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float().contiguous()
