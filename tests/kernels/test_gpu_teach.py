"""Kernels of taught layers against torch's own gradients."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from gpu_inputs import DEVICE
from hunch.kernels import gpu_teach
from hunch.kernels.activation import gated
from hunch.kernels.rope import rope, rotation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gate_and_its_gradient_are_those_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    found = []
    for way in (gpu_teach.gate, lambda z: gated(z.cpu()).to(DEVICE)):
        torch.manual_seed(0)
        z = torch.randn(5, 2 * 130).to(DEVICE, dtype).requires_grad_()
        y = way(z)
        (y.float() * torch.arange(130, device=DEVICE)).sum().backward()
        found.append((y.detach(), z.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("width", "count"), [(16, 3), (48, 3), (16, 19)])
def test_heads_turn_and_their_gradients_turn_back(width: int, count: int) -> None:
    torch.manual_seed(0)
    angles = torch.rand(9, width // 2)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    turns = rotation(table, torch.tensor([0, 4, 8, 8]))
    cos, sin = turns.cos_T1H.to(DEVICE), turns.sin_T1H.to(DEVICE)
    weight = torch.randn(4, count, width).to(DEVICE)
    found = []
    for way in (gpu_teach.turn, lambda x, *at: rope(x.cpu(), *(a.cpu() for a in at)).to(DEVICE)):
        torch.manual_seed(1)
        heads = torch.randn(4, count + 2, width).to(DEVICE).requires_grad_()
        y = way(heads[:, :count], cos, sin)  # as q and k lie before v
        (y * weight).sum().backward()
        found.append((y.detach(), heads.grad))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
