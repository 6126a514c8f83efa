"""One decoder layer's weights in the form that a GPU's fused kernels take.

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
    out: Linear  # of an MLP that is alone, its `down`
    number: int  # of the cache's layer
    qkv: Linear | None = None  # None: there is `latent` or `recurrent`, or an MLP alone
    heads: Heads | None = None  # None: there is `recurrent`, or an MLP alone
    head_norms: tuple[Tensor, Tensor] | None = None
    sinks_N: Tensor | None = None
    attn_out_norm: RowNorm | None = None  # of what is added to the stream
    mlp_norm: RowNorm | None = None  # None: the stream, or what attention read if parallel
    gate_up: Linear | None = None  # up alone where there is no gate; None, as down: experts
    activation: str = ""  # one of KERNEL_NAMES' values
    is_gated: bool = True
    down: Linear | None = None
    mlp_out_norm: RowNorm | None = None
    residual_scale: float = 1.0  # of what is added to the stream
    is_post_norm: bool = False  # norms stand after the sums
    is_parallel: bool = False  # the MLP reads the stream of before attention
    experts: FusedExperts | None = None
    latent: FusedLatent | None = None
    recurrent: FusedRecurrent | None = None
    recurrent_out: Linear | None = None  # where it attends too
    attn_gate: Linear | None = None  # of the heads' outputs
    is_v_normed: bool = False
    inputs: InputGate | None = None  # its use of a table
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
    layer = Layer(
        attn_norm=row_norm(block.attn_norm),
        out=attn.out,
        number=attn.layer,
        mlp_norm=row_norm(block.mlp_norm),
        activation=KERNEL_NAMES[mlp.activation],
        residual_scale=block.residual_scale,
    )
    if isinstance(attn, LatentAttention):
        layer.heads, layer.latent = attn.heads, FusedLatent(attn)
    else:
        layer.recurrent = fused_recurrent(attn)
    if isinstance(mlp, Experts):
        layer.experts = FusedExperts(mlp, timing)
    elif isinstance(mlp, GatedMLP):
        layer.gate_up, layer.down = mlp.gate_up, mlp.down
    return layer


def _half_layer(block: HalfBlock, timing: Timing) -> Layer:
    """Layers that are one half alone."""
    norm, half = row_norm(block.norm), block.half
    if isinstance(half, Experts):
        assert half.shared is not None
        return Layer(
            attn_norm=norm,
            out=half.shared.down,
            number=0,
            activation=KERNEL_NAMES[half.activation],
            experts=FusedExperts(half, timing),
            is_half=True,
        )
    if isinstance(half, GatedMLP | PlainMLP):
        return Layer(
            attn_norm=norm,
            out=half.down,
            number=0,
            gate_up=half.gate_up if isinstance(half, GatedMLP) else half.up,
            activation=KERNEL_NAMES[half.activation],
            is_gated=isinstance(half, GatedMLP),
            down=half.down,
            is_half=True,
        )
    layer = Layer(attn_norm=norm, out=half.out, number=half.layer, is_gated=False, is_half=True)
    if isinstance(half, Recurrent):
        layer.recurrent = fused_recurrent(half)
    else:
        layer.qkv, layer.heads, layer.head_norms = half.qkv, half.heads, _head_norms(half)
        layer.sinks_N, layer.attn_gate = half.sinks_N, half.gate
    return layer


def layer_of(block: Block | LatentBlock | RecurrentBlock | HalfBlock, timing: Timing) -> Layer:
    if isinstance(block, HalfBlock):
        return _half_layer(block, timing)
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
    # Layers that read others' keys have no norm of keys.
    return attn.q_norm.weight_D, (attn.k_norm or attn.q_norm).weight_D


def row_norm(norm: Norm | None) -> RowNorm | None:
    """A norm as the kernels take it."""
    if norm is None or isinstance(norm, RMSNorm):
        return None if norm is None else RowNorm(norm.weight_D)
    return RowNorm(norm.weight_D, norm.bias_D, is_centred=True)
