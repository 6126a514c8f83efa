"""A gated delta net by a GPU's kernels.

Shape letters: T packed tokens, P the same padded, W numbers of the layer's first product: the
recurrence's inputs, then Z of the gate, as many as tokens read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.delta import DeltaWeights
from hunch.kernels.gpu_delta import MAX_TAPS, fold, gated_norm, keep
from hunch.kernels.kv_store import KVCache
from hunch.layers.recurrent import GatedDelta


class FusedDelta:
    """`GatedDelta` over the same weights."""

    def __init__(self, delta: GatedDelta) -> None:
        self.shape, self.layer, self.inputs = delta.shape, delta.layer, delta.inputs
        self.norm_D, self.eps = delta.norm_D, delta.eps
        conv_JC = delta.conv_JC
        nothing = conv_JC.new_zeros(MAX_TAPS - len(conv_JC), conv_JC.shape[1])
        conv_JC = torch.cat((nothing, conv_JC))
        self.weights = DeltaWeights(conv_JC, delta.rate_N, delta.bias_N)

    def read(self, y_PW: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        """What the layer's last product takes, PZ."""
        states, shape = kv.states, self.shape
        assert states is not None
        size = (len(attn.pos_T), shape.value_width)
        read_TZ = torch.empty(size, dtype=torch.float32, device=y_PW.device)
        out_PZ = y_PW.new_empty(len(y_PW), shape.value_width)
        # Nothing is allocated from here on: without memory, states must not change unnoticed.
        fold(y_PW, shape, self.weights, states, self.layer, attn, read_TZ)
        gate_PZ = y_PW[:, shape.num_inputs :]
        gated_norm(read_TZ, gate_PZ, self.norm_D, self.eps, attn.slot_T, out_PZ)
        keep(y_PW, states, self.layer, attn)
        return out_PZ
