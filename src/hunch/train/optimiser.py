"""The optimiser: Muon for matrices inside the network, Adam for norms, embeddings and heads.

Muon steps along the nearest orthogonal matrix of the momentum, so that every direction moves alike;
its step is scaled to the size Adam's usually has, and one learning rate serves both (arXiv
2502.16982). A step is a share of the matrix that it changes. The matrices of some families are
twelve times as large as those of others (root mean squares of 0.19 and 0.015 in two models of up to
half a billion parameters): a step that teaches the one in minutes would wipe out what the other
began with.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

_MOMENTUM, _BETA2, _EPS = 0.95, 0.95, 1e-10
_BETA1 = 0.9
_STEP_SIZE = 0.2  # root mean square of Adam's usual step, in learning rates
_USUAL = 0.19  # root mean square of the matrices that learning rates were tuned on
_NOTHING = 1e-4  # a matrix with smaller numbers counts as untrained
_MAX_NORM = 1.0  # of Adam's gradient


class Optimiser:
    """Steps named leaf tensors in place."""

    def __init__(self, tensors: dict[str, Tensor], plain: Collection[str] = ()) -> None:
        self.tensors = tensors
        self.num_steps = 0
        self.first = {name: torch.zeros_like(t) for name, t in tensors.items()}
        # Matrices that are stepped together: of one shape, once tall ones are transposed.
        self.by_shape: dict[tuple[int, ...], list[str]] = {}
        self.plain: list[str] = []
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and name not in plain:
                self.by_shape.setdefault(tuple(sorted(tensor.shape)), []).append(name)
            else:
                self.plain.append(name)
        self.second = {name: torch.zeros_like(tensors[name]) for name in self.plain}
        matrices = [name for names in self.by_shape.values() for name in names]
        self.scale = {name: _scale(tensors[name]) for name in matrices}
        self.device = next(iter(tensors.values())).device
        self._rate, self._plain_rate = (torch.zeros((), device=self.device) for _ in range(2))

    def set_rates(self, lr: float, plain_lr: float | None = None) -> None:
        """Set how far the next step goes: for matrices, and for the rest."""
        self.num_steps += 1
        late = math.sqrt(1 - _BETA2**self.num_steps) / (1 - _BETA1**self.num_steps)
        self._rate.fill_(-lr)
        self._plain_rate.fill_(-(lr if plain_lr is None else plain_lr) * late)

    @torch.no_grad()
    def move(self, grads: Mapping[str, Tensor | None]) -> None:
        """Take one step along these gradients, as far as the rates say."""
        found = {
            name: torch.zeros_like(self.tensors[name]) if grad is None else grad
            for name, grad in grads.items()
        }
        if self.plain:
            self._move_plain([found[name] for name in self.plain])
        for names in self.by_shape.values():
            self._move_matrices(names, [found[name] for name in names])

    def _move_plain(self, own: list[Tensor]) -> None:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(own)))
        own = list(torch._foreach_mul(own, (_MAX_NORM / (norm + 1e-6)).clamp(max=1.0)))
        first = [self.first[name] for name in self.plain]
        second = [self.second[name] for name in self.plain]
        torch._foreach_lerp_(first, own, 1 - _BETA1)
        torch._foreach_mul_(second, _BETA2)
        torch._foreach_addcmul_(second, own, own, 1 - _BETA2)
        size = torch._foreach_sqrt(second)
        torch._foreach_add_(size, _EPS)
        steps = torch._foreach_div(first, size)
        torch._foreach_mul_(steps, self._plain_rate)
        torch._foreach_add_([self.tensors[name] for name in self.plain], steps)

    def _move_matrices(self, names: list[str], own: list[Tensor]) -> None:
        first = [self.first[name] for name in names]
        torch._foreach_mul_(first, _MOMENTUM)
        torch._foreach_add_(first, own)
        ahead = torch._foreach_add(own, first, alpha=_MOMENTUM)
        update = orthogonal(torch.stack([_flat(matrix) for matrix in ahead]))
        size = _STEP_SIZE * math.sqrt(max(own[0].shape))
        tensors = [_flat(self.tensors[name]) for name in names]
        steps = list(update.to(tensors[0].dtype).unbind(0))
        torch._foreach_mul_(steps, [size * self.scale[name] for name in names])
        torch._foreach_mul_(steps, self._rate)
        torch._foreach_add_(tensors, steps)

    def state(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps, "first": self.first, "second": self.second}

    def load(self, state: dict[str, Any]) -> None:
        self.num_steps = int(state["num_steps"])
        for ours, theirs in ((self.first, state["first"]), (self.second, state["second"])):
            for name, tensor in ours.items():
                tensor.copy_(theirs[name])


def _scale(matrix: Tensor) -> float:
    """The size of its steps, relative to those of the matrices that rates were tuned on.

    Zeros do not count, so a padded matrix learns like the one it was made from.
    """
    used = matrix.detach().float()
    size = float((used.square().sum() / used.count_nonzero().clamp(min=1)).sqrt())
    return (size if size > _NOTHING else matrix.shape[1] ** -0.5) / _USUAL


def _flat(matrix: Tensor) -> Tensor:
    """The matrix, transposed if it has more rows than columns."""
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def orthogonal(g_NAB: Tensor) -> Tensor:
    """About the nearest matrices with orthonormal rows, of which there are no more than columns: a
    Newton-Schulz iteration. Sums are part of the products, as steps of a few thousand tokens take
    as long as their launches."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x: Tensor = g_NAB.bfloat16() if g_NAB.is_cuda else g_NAB
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x
