"""A training step over a pack; on a GPU it is one CUDA graph, from the tokens to the new weights.

A step of a few thousand tokens launches some hundred kernels, and launching them one by one takes
longer than running them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hunch.step.capture import Graph, new_pool
from hunch.train.kept import Kept
from hunch.train.optimiser import Optimiser
from hunch.train.packs import Pack, PackInputs
from hunch.train.student import StepInputs, Student


class PackedSteps:
    """Trains a student on the target's opinions of packs, which all have one shape."""

    def __init__(
        self,
        student: Student,
        optimiser: Optimiser,
        kept: Kept,
        num_tokens: int,
        greedy_share: float,
    ) -> None:
        """`greedy_share`: the share of each opinion that is given to the token the target chose."""
        self.student, self.optimiser, self.kept = student, optimiser, kept
        self.greedy_share = greedy_share
        self.shape = kept.laid.shape(num_tokens, student.anchors)
        self.device, self.can_capture = student.target.device, student.can_capture
        self._flat = torch.zeros(sum(self.shape.sizes), dtype=torch.int32, device=self.device)
        self._late = torch.zeros((), device=self.device)
        self._loss = torch.zeros((), device=self.device)  # of the last step, captured or not
        self._graph: Graph | None = None

    def fit(self, num_tokens: int) -> None:
        """Set how many tokens packs have from now on, if steps are not captured."""
        assert not self.can_capture
        self.shape = self.kept.laid.shape(num_tokens, self.student.anchors)

    def packs(self, seed: int, epoch: int) -> Iterator[Pack]:
        return map(self.kept.placed, self.kept.laid.packs(self.shape, seed, epoch))

    def learn(self, pack: Pack, late: float) -> Tensor:
        """Take one optimiser step on a pack; returns the loss, which the next step overwrites.

        late: goes from 0 to 1 during training, for losses that change.
        """
        self._late.fill_(late)
        if not self.can_capture:  # without graphs, no fixed shape is needed
            return self._step(pack.inputs(self.device))
        flat = torch.from_numpy(pack.flat(self.shape))
        self._flat.copy_(flat.pin_memory(), non_blocking=True)
        if self._graph is None:
            self._graph = Graph(
                lambda: self._step(PackInputs(self._flat, self.shape)),
                self.device,
                new_pool(self.device),
            )
        else:
            self._graph.replay()
        return self._loss

    def _step(self, inputs: PackInputs) -> Tensor:
        opinions, states = self.kept.opinions(inputs), self.kept.states(inputs)
        if self.greedy_share:
            opinions = opinions.toward(inputs.label_M, self.greedy_share * inputs.is_own_M)
        loss = self.student.loss_on(StepInputs(inputs, states, opinions, self._late)).loss
        tensors = self.student.tensors
        grads = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        self.optimiser.move(dict(zip(tensors, grads, strict=True)))
        return self._loss.copy_(loss.detach())
