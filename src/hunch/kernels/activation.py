"""What stands between the two products of an MLP.

Shape letters: T packed tokens, F inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

# Hugging Face's names of `hidden_act`.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "swish": functional.silu,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
CLIP_LIMIT, CLIP_SLOPE = 7.0, 1.702  # of "clipped"


def sigmoid(x: Tensor) -> Tensor:
    """The same bits wherever in a tensor a number stands; torch's own rounds a tensor's last few
    in another way."""
    return 1 / (1 + torch.exp(-x))


def clipped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's: both within limits, gate by a sigmoid of its own, up plus one."""
    gate, up = gate.clamp(max=CLIP_LIMIT), up.clamp(-CLIP_LIMIT, CLIP_LIMIT)
    return (up + 1) * gate * torch.sigmoid(CLIP_SLOPE * gate)


# Functions of gate and up together; any other activation is of the gate alone, times up.
GATED_ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"clipped": clipped}
# How kernels are told: names that mean the same are one.
KERNEL_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "clipped": "clipped",
}


def gated_ref(gate_up_TF: Tensor, activation: str = "silu") -> Tensor:
    """The specification, in float64: the first half, activated, times the second."""
    return gated(gate_up_TF.double(), activation).to(gate_up_TF.dtype)


def gated(gate_up_TF: Tensor, activation: str = "silu") -> Tensor:
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    if activation in GATED_ACTIVATIONS:
        return GATED_ACTIVATIONS[activation](gate_TF, up_TF)
    return torch.mul(ACTIVATIONS[activation](gate_TF), up_TF)
