"""What stands between the two products of an MLP.

Shape letters: T packed tokens, F inner width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional

_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def sigmoid(x: Tensor) -> Tensor:
    """The same bits wherever in a tensor a number stands; torch's own rounds a tensor's last few
    in another way."""
    return 1 / (1 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x): the same bits wherever in a tensor a number stands, on a CPU too."""
    if x.device.type != "cpu" or x.requires_grad or x.dtype == torch.float64:
        return functional.silu(x)
    y = x.float()
    return (y / (1 + torch.exp(-y))).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """x * (1 + tanh(u)) / 2, which is x * sigmoid(2u), by the sigmoid above."""
    y = x if x.dtype == torch.float64 else x.float()
    return (y * sigmoid(1.5957691216057308 * y * (1 + 0.044715 * y * y))).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """x * (1 + erf(x / sqrt 2)) / 2 to 3e-7: erf by Abramowitz and Stegun, 7.1.26, as torch's own
    rounds by place. In float64, where nobody asks for bits, it is torch's."""
    if x.dtype == torch.float64:
        return functional.gelu(x)
    y = x.float()
    size = y.abs()
    t = 1 / (1 + 0.3275911 * 0.7071067811865476 * size)
    poly = torch.zeros_like(t)
    for factor in _ERF:
        poly = poly * t + factor
    rest = poly * t * torch.exp(-0.5 * y * y)  # 1 - erf(|x| / sqrt 2)
    return (functional.relu(y) - 0.5 * size * rest).to(x.dtype)


def relu2(x: Tensor) -> Tensor:
    return functional.relu(x).square()


XIELU_BETA, XIELU_EPS = 0.5, -1e-6  # as they are in every layer of every model


def xielu(x: Tensor, rise: Tensor, fall: Tensor) -> Tensor:
    """Apertus's: a parabola above 0 and an exponential below, each by a learned number."""
    y = x if x.dtype == torch.float64 else x.float()
    below = (torch.exp(y.clamp(max=XIELU_EPS)) - 1 - y) * fall
    return (torch.where(y > 0, rise * y * y, below) + XIELU_BETA * y).to(x.dtype)


# Hugging Face's names of `hidden_act`.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "swish": silu,
    "relu": functional.relu,
    "relu2": relu2,
    "gelu": gelu,
    "gelu_new": gelu_tanh,
    "gelu_pytorch_tanh": gelu_tanh,
    "gelu_tanh": gelu_tanh,
}
CLIP_LIMIT, CLIP_SLOPE = 7.0, 1.702  # of "clipped"


def clipped(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's: both within limits, gate by a sigmoid of its own, up plus one."""
    gate, up = gate.clamp(max=CLIP_LIMIT), up.clamp(-CLIP_LIMIT, CLIP_LIMIT)
    return (up + 1) * gate * sigmoid(CLIP_SLOPE * gate)


# Functions of gate and up together; any other activation is of the gate alone, times up.
GATED_ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"clipped": clipped}
# How kernels are told: names that mean the same are one.
KERNEL_NAMES = {name: name for name in (*ACTIVATIONS, *GATED_ACTIVATIONS)}
KERNEL_NAMES |= {"swish": "silu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}


def gated_ref(gate_up_TF: Tensor, activation: str = "silu") -> Tensor:
    """The specification, in float64: the first half, activated, times the second."""
    return gated(gate_up_TF.double(), activation).to(gate_up_TF.dtype)


_rounds_once: ContextVar[bool] = ContextVar("rounds_once", default=False)


@contextmanager
def rounded_once() -> Iterator[None]:
    """In this context a GPU uses training's kernels though nothing is taught: they go over memory
    less often, and round otherwise than serving does."""
    token = _rounds_once.set(True)
    try:
        yield
    finally:
        _rounds_once.reset(token)


def is_taught(x: Tensor) -> bool:
    """Whether it is for a GPU's kernels of training."""
    return x.is_cuda and (x.requires_grad or _rounds_once.get())


def gated(gate_up_TF: Tensor, activation: str = "silu") -> Tensor:
    is_2d = gate_up_TF.dim() == 2
    if is_2d and is_taught(gate_up_TF) and KERNEL_NAMES[activation] == "silu":
        from hunch.kernels.gpu_teach import gate

        return gate(gate_up_TF)
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=-1)
    if activation in GATED_ACTIVATIONS:
        return GATED_ACTIVATIONS[activation](gate_TF, up_TF)
    return torch.mul(ACTIVATIONS[activation](gate_TF), up_TF)
