"""One decoder layer's weights, as a GPU's fused kernels take them.

Shape letters: N heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hunch.kernels.activation import KERNEL_NAMES
from hunch.kernels.gpu_fused import RowNorm
from hunch.kernels.gpu_route import Timing
from hunch.layers.attention import Attention, Heads
from hunch.layers.block import Block, ParallelBlock, PostNormBlock
from hunch.layers.experts import Experts, ExpertsBeside
from hunch.layers.inputs import InputGate
from hunch.layers.latent import LatentAttention, LatentBlock
from hunch.layers.linear import Linear
from hunch.layers.mlp import GatedMLP, PlainMLP
from hunch.layers.norm import Norm, RMSNorm
from hunch.layers.recurrent import BothBlock, HalfBlock, Recurrent, RecurrentBlock
from hunch.models.fused_experts import FusedExperts
from hunch.models.fused_latent import FusedLatent
from hunch.models.fused_recurrent import FusedRecurrent, fused_recurrent


@dataclass(slots=True)
class Layer:
    """One layer's weights, as the kernels take them."""

    attn_norm: RowNorm | None  # None: the input comes as it is
    qkv: Linear | None  # None: there is `latent` or `recurrent`, or an MLP alone
    heads: Heads | None  # None: there is `recurrent`, or an MLP alone
    head_norms: tuple[Tensor, Tensor] | None
    sinks_N: Tensor | None
    out: Linear  # of an MLP that is alone, its `down`
    attn_out_norm: RowNorm | None  # of what is added to the stream
    mlp_norm: RowNorm | None  # None: the stream as it is, or what attention read if parallel
    gate_up: Linear | None  # up alone where there is no gate; None, as down: there are experts
    activation: str  # one of KERNEL_NAMES' values
    is_gated: bool
    down: Linear | None
    mlp_out_norm: RowNorm | None
    residual_scale: float  # of what is added to the stream
    is_post_norm: bool  # norms stand after the sums
    is_parallel: bool  # the MLP reads the stream of before attention
    number: int  # of the cache's layer
    experts: FusedExperts | None = None
    latent: FusedLatent | None = None
    recurrent: FusedRecurrent | None = None
    recurrent_out: Linear | None = None  # where it attends too
    attn_gate: Linear | None = None  # of what heads read
    is_v_normed: bool = False
    inputs: InputGate | None = None  # what it takes of a table
    stream_scale: float = 1.0  # of the stream at its end
    beside: ExpertsBeside | None = None  # norms of experts that stand beside gate_up and down
    is_half: bool = False  # it mixes tokens or has an MLP, not both

    def plain(self) -> list[Linear]:
        """Products that are rounded once."""
        q = self.qkv if self.latent is None else self.latent.q
        mixer = None if self.recurrent is None else self.recurrent.inputs
        asked = None if self.inputs is None else self.inputs.gate
        return [x for x in (q, mixer, self.attn_gate, self.gate_up, asked) if x is not None]

    def sliced(self) -> list[Linear]:
        """Products whose slices are added by the layer that reads them."""
        down = None if self.latent is None else self.latent.down
        given = None if self.inputs is None else self.inputs.project
        last = None if self.down is self.out else self.down
        all_of_them = (down, self.out, self.recurrent_out, last, given)
        return [x for x in all_of_them if x is not None]


def _other_layer(block: LatentBlock | RecurrentBlock, timing: Timing) -> Layer:
    """Layers whose first half is not plain attention."""
    attn, mlp = block.attn, block.mlp
    latent = attn if isinstance(attn, LatentAttention) else None
    recurrent = attn if isinstance(attn, Recurrent) else None
    dense = mlp if isinstance(mlp, GatedMLP) else None
    return Layer(
        attn_norm=row_norm(block.attn_norm),
        qkv=None,
        heads=None if latent is None else latent.heads,
        head_norms=None,
        sinks_N=None,
        out=attn.out,
        attn_out_norm=None,
        mlp_norm=row_norm(block.mlp_norm),
        gate_up=None if dense is None else dense.gate_up,
        activation=KERNEL_NAMES[mlp.activation],
        is_gated=True,
        down=None if dense is None else dense.down,
        mlp_out_norm=None,
        residual_scale=block.residual_scale,
        is_post_norm=False,
        is_parallel=False,
        number=attn.layer,
        experts=FusedExperts(mlp, timing) if isinstance(mlp, Experts) else None,
        latent=None if latent is None else FusedLatent(latent),
        recurrent=None if recurrent is None else fused_recurrent(recurrent),
    )


def _half_layer(block: HalfBlock) -> Layer:
    """Layers that are one half alone."""
    half = block.half
    attn = half if isinstance(half, Attention) else None
    recurrent = half if isinstance(half, Recurrent) else None
    mlp = half if isinstance(half, GatedMLP | PlainMLP) else None
    return Layer(
        attn_norm=row_norm(block.norm),
        qkv=None if attn is None else attn.qkv,
        heads=None if attn is None else attn.heads,
        head_norms=None if attn is None else _head_norms(attn),
        sinks_N=None if attn is None else attn.sinks_N,
        out=half.down if isinstance(half, GatedMLP | PlainMLP) else half.out,
        attn_out_norm=None,
        mlp_norm=None,
        gate_up=mlp.gate_up if isinstance(mlp, GatedMLP) else None if mlp is None else mlp.up,
        activation="" if mlp is None else KERNEL_NAMES[mlp.activation],
        is_gated=isinstance(mlp, GatedMLP),
        down=None if mlp is None else mlp.down,
        mlp_out_norm=None,
        residual_scale=1.0,
        is_post_norm=False,
        is_parallel=False,
        number=0 if isinstance(half, GatedMLP | PlainMLP) else half.layer,
        recurrent=None if recurrent is None else fused_recurrent(recurrent),
        attn_gate=None if attn is None else attn.gate,
        is_half=True,
    )


def layer_of(block: Block | LatentBlock | RecurrentBlock | HalfBlock, timing: Timing) -> Layer:
    if isinstance(block, HalfBlock):
        return _half_layer(block)
    if isinstance(block, LatentBlock | RecurrentBlock):
        return _other_layer(block, timing)
    attn, mlp = block.attn, block.mlp
    mixer = block.recurrent if isinstance(block, BothBlock) else None
    experts = mlp if isinstance(mlp, Experts) else None
    experts = experts if block.beside is None else block.beside.experts
    up = mlp.gate_up if isinstance(mlp, GatedMLP) else mlp.up if isinstance(mlp, PlainMLP) else None
    return Layer(
        attn_norm=row_norm(block.attn_norm),
        qkv=attn.qkv,
        heads=attn.heads,
        head_norms=_head_norms(attn),
        sinks_N=attn.sinks_N,
        out=attn.out,
        attn_out_norm=row_norm(block.attn_out_norm),
        mlp_norm=row_norm(block.mlp_norm),
        gate_up=up,
        activation=KERNEL_NAMES[mlp.activation],
        is_gated=not isinstance(mlp, PlainMLP),
        down=None if isinstance(mlp, Experts) else mlp.down,
        mlp_out_norm=row_norm(block.mlp_out_norm),
        residual_scale=block.residual_scale,
        is_post_norm=isinstance(block, PostNormBlock),
        is_parallel=isinstance(block, ParallelBlock),
        number=attn.layer,
        experts=None if experts is None else FusedExperts(experts, timing),
        attn_gate=attn.gate,
        is_v_normed=attn.v_norm is not None,
        inputs=block.inputs,
        beside=block.beside,
        stream_scale=1.0 if block.scale_1 is None else float(block.scale_1),
        recurrent=None if mixer is None else fused_recurrent(mixer),
        recurrent_out=None if mixer is None else mixer.out,
    )


def _head_norms(attn: Attention) -> tuple[Tensor, Tensor] | None:
    if attn.q_norm is None:
        return None
    # Those who only read have no norm of keys.
    return attn.q_norm.weight_D, (attn.k_norm or attn.q_norm).weight_D


def row_norm(norm: Norm | None) -> RowNorm | None:
    """A norm as the kernels take it."""
    if norm is None or isinstance(norm, RMSNorm):
        return None if norm is None else RowNorm(norm.weight_D)
    return RowNorm(norm.weight_D, norm.bias_D, is_centred=True)
