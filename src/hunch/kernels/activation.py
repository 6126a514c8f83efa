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
}


def gated_ref(gate_up_TF: Tensor, activation: str = "silu") -> Tensor:
    """The specification, in float64: the first half, activated, times the second."""
    gate_TF, up_TF = gate_up_TF.double().chunk(2, dim=-1)
    return (ACTIVATIONS[activation](gate_TF) * up_TF).to(gate_up_TF.dtype)


def gated(gate_up_TF: Tensor, activation: str = "silu") -> Tensor:
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    return torch.mul(ACTIVATIONS[activation](gate_TF), up_TF)
