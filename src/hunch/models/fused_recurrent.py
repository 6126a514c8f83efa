"""Recurrent layers by a GPU's kernels.

Shape letters: T packed tokens, P the same padded, W numbers of the layer's first product: the
recurrence's inputs, then Z of the gate, as many as tokens read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from hunch.kernels import gpu_delta, gpu_short_conv, gpu_ssm
from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_recurrence import keep, padded_taps
from hunch.kernels.kv_store import KVCache
from hunch.layers.linear import Linear
from hunch.layers.recurrent import GatedDelta, Mamba, Recurrent, ShortConv


class FusedRecurrent(Protocol):
    """A recurrent layer over the same weights."""

    inputs: Linear

    def read(self, y_PW: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        """What the layer's last product takes, PZ."""


# In all of them nothing is allocated once states change: without memory, they must not change
# unnoticed.
class FusedDelta:
    """`GatedDelta` over the same weights."""

    def __init__(self, delta: GatedDelta) -> None:
        self.shape, self.layer, self.inputs = delta.shape, delta.layer, delta.inputs
        self.norm_D, self.eps = delta.norm_D, delta.eps
        self.weights = replace(delta.weights, conv_JC=padded_taps(delta.conv_JC))

    def read(self, y_PW: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        states, shape = kv.states, self.shape
        assert states is not None
        size = (len(attn.pos_T), shape.value_width)
        read_TZ = torch.empty(size, dtype=torch.float32, device=y_PW.device)
        out_PZ = y_PW.new_empty(len(y_PW), shape.value_width)
        gpu_delta.fold(y_PW, shape, self.weights, states, self.layer, attn, read_TZ)
        gate_PZ = y_PW[:, shape.num_inputs :]
        gpu_delta.gated_norm(read_TZ, gate_PZ, self.norm_D, self.eps, attn.slot_T, out_PZ)
        keep(y_PW, states, self.layer, attn)
        return out_PZ


class FusedMamba:
    """`Mamba` over the same weights."""

    def __init__(self, mamba: Mamba) -> None:
        self.shape, self.layer, self.inputs = mamba.shape, mamba.layer, mamba.inputs
        self.norm_Z, self.eps = mamba.norm_Z, mamba.eps
        self.weights = replace(mamba.weights, conv_JC=padded_taps(mamba.conv_JC))

    def read(self, y_PW: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        states, shape = kv.states, self.shape
        assert states is not None
        size = (len(attn.pos_T), shape.value_width)
        read_TZ = torch.empty(size, dtype=torch.float32, device=y_PW.device)
        out_PZ = y_PW.new_empty(len(y_PW), shape.value_width)
        gpu_ssm.fold(y_PW, shape, self.weights, states, self.layer, attn, read_TZ)
        gate_PZ = y_PW[:, shape.num_inputs :]
        gpu_ssm.gate(read_TZ, gate_PZ, shape, self.norm_Z, self.eps, attn.slot_T, out_PZ)
        keep(y_PW, states, self.layer, attn)
        return out_PZ


class FusedConv:
    """`ShortConv` over the same weights."""

    def __init__(self, conv: ShortConv) -> None:
        self.shape, self.layer, self.inputs = conv.shape, conv.layer, conv.inputs
        self.weights = replace(conv.weights, conv_JD=padded_taps(conv.conv_JD))

    def read(self, y_PW: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        states = kv.states
        assert states is not None
        out_PZ = y_PW.new_zeros(len(y_PW), self.shape.width)  # padding reads nothing
        gpu_short_conv.mix(y_PW, self.shape, self.weights, states, self.layer, attn, out_PZ)
        keep(y_PW, states, self.layer, attn)
        return out_PZ


def fused_recurrent(layer: Recurrent) -> FusedRecurrent:
    if isinstance(layer, GatedDelta):
        return FusedDelta(layer)
    if isinstance(layer, Mamba):
        return FusedMamba(layer)
    assert isinstance(layer, ShortConv)
    return FusedConv(layer)
