"""Recurrent layers by a GPU's kernels.

Shape letters: T packed tokens, P the same padded, W numbers of the layer's first product: the
recurrence's inputs, then Z of the gate, as many as tokens read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from hunch.kernels import gpu_short_conv
from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_fold import fold, gate
from hunch.kernels.gpu_recurrence import keep, padded_taps
from hunch.kernels.kv_store import KVCache
from hunch.layers.linear import Linear
from hunch.layers.recurrent import GatedDelta, Mamba, Recurrent, ShortConv


class FusedRecurrent(Protocol):
    """A recurrent layer over the same weights."""

    inputs: Linear

    def read(self, y_PW: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        """The input of the layer's last product, PZ."""


# Nothing is allocated after states change: a lack of memory must not leave them changed.
class FusedFold:
    """`GatedDelta` or `Mamba` over the same weights."""

    def __init__(self, net: GatedDelta | Mamba) -> None:
        self.shape, self.layer, self.inputs = net.shape, net.layer, net.inputs
        self.norm, self.eps = net.norm_D if isinstance(net, GatedDelta) else net.norm_Z, net.eps
        self.weights = replace(net.weights, conv_JC=padded_taps(net.conv_JC))

    def read(self, y_PW: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        states, shape = kv.states, self.shape
        assert states is not None
        size = (len(attn.pos_T), shape.value_width)
        read_TZ = torch.empty(size, dtype=torch.float32, device=y_PW.device)
        out_PZ = y_PW.new_empty(len(y_PW), shape.value_width)
        fold(y_PW, shape, self.weights, states, self.layer, attn, read_TZ)
        gate_PZ = y_PW[:, shape.num_inputs :]
        gate(read_TZ, gate_PZ, shape, self.norm, self.eps, attn.slot_T, out_PZ)
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
        out_PZ = y_PW.new_zeros(len(y_PW), self.shape.width)  # zeros for padding
        gpu_short_conv.mix(y_PW, self.shape, self.weights, states, self.layer, attn, out_PZ)
        keep(y_PW, states, self.layer, attn)
        return out_PZ


def fused_recurrent(layer: Recurrent) -> FusedRecurrent:
    if isinstance(layer, GatedDelta | Mamba):
        return FusedFold(layer)
    assert isinstance(layer, ShortConv)
    return FusedConv(layer)
