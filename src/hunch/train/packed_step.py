"""A step of training over a pack: on a GPU one graph from the tokens to the changed tensors.

A step of a few thousand tokens has some hundred launches that take longer to make than to run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hunch.step.capture import Graph, new_pool
from hunch.train.kept import Kept
from hunch.train.optimiser import Optimiser
from hunch.train.packs import Pack, PackInputs
from hunch.train.student import Student


class PackedSteps:
    """Teaches a student what the target said of packs of one shape."""

    def __init__(
        self,
        student: Student,
        optimiser: Optimiser,
        kept: Kept,
        num_tokens: int,
        greedy_share: float,
    ) -> None:
        """`greedy_share` of each opinion goes to the token that the target chose."""
        self.student, self.optimiser, self.kept = student, optimiser, kept
        self.greedy_share = greedy_share
        self.shape = kept.laid.shape(num_tokens)
        self.device = student.target.device
        self._flat = torch.zeros(sum(self.shape.sizes), dtype=torch.int32, device=self.device)
        self._graph: Graph | None = None

    def packs(self, seed: int, epoch: int) -> Iterator[Pack]:
        return self.kept.laid.packs(self.shape, seed, epoch)

    def learn(self, pack: Pack, late: float) -> Tensor:
        """The loss on a pack, along whose gradient the optimiser goes."""
        if self.device.type != "cuda":  # nothing is gained by a fixed shape
            flat = torch.from_numpy(pack.flat(pack.shape))
            return self._step(PackInputs(flat, pack.shape), late)
        flat = torch.from_numpy(pack.flat(self.shape))
        self._flat.copy_(flat.pin_memory(), non_blocking=True)
        if self.student.is_loss_changing:
            return self._step(PackInputs(self._flat, self.shape), late)
        if self._graph is None:
            self._graph = Graph(
                lambda: self._step(PackInputs(self._flat, self.shape), late),
                self.device,
                new_pool(self.device),
            )
        else:
            self._graph.replay()
        found: Tensor = self._graph.outputs
        return found

    def _step(self, inputs: PackInputs, late: float) -> Tensor:
        opinions = self.kept.opinions(inputs.at_M).toward(inputs.label_M, self.greedy_share)
        loss = self.student.loss_on_pack(inputs, opinions, late)
        tensors = self.student.tensors
        grads = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        self.optimiser.move(dict(zip(tensors, grads, strict=True)))
        return loss.detach()
