"""A student's layer as one compiled function on a GPU: the same graph for every layer.

A layer's tensors come under names without its number, so that layers of a kind share one graph, and
sizes are left open, so that batches do too. Elsewhere, and where compiling fails, the function runs
as it stands.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hunch.models.source import Shape, Source
from hunch.models.spec import ModelSpec

log = logging.getLogger("hunch")

MAX_GRAPHS = 3  # compiled one after the other, each in seconds that learning lacks


class Masters(Source):
    """Float32 tensors as networks take them, in the precision that products have."""

    def __init__(
        self, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(dtype, device)
        self.tensors = tensors

    def read(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        tensor = self.tensors[name]
        assert tuple(tensor.shape) == shape, f"{name}: {tuple(tensor.shape)}, not {shape}"
        return tensor

    def below(self, prefix: str) -> Masters:
        """Those whose names begin so, without it."""
        own = {
            name.removeprefix(prefix): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(prefix)
        }
        return Masters(own, self.dtype, self.device)


class Compiled:
    """A function that is compiled where that pays; `is_plain` calls run as they stand."""

    def __init__(self, body: Callable[..., Tensor], device: torch.device) -> None:
        self.body = body
        self.fast: Callable[..., Tensor] | None = None
        if device.type == "cuda":
            self.fast = torch.compile(body, dynamic=True)

    def __call__(self, *given: Any, is_plain: bool = False) -> Tensor:
        if self.fast is None or is_plain:
            return self.body(*given)
        from torch._dynamo.exc import TorchDynamoException  # takes seconds, and is here by now
        from torch._dynamo.utils import counters

        try:
            found = self.fast(*given)
        except TorchDynamoException as error:
            self._give_up(str(error).strip().splitlines()[0])
            return self.body(*given)
        if counters["stats"]["unique_graphs"] > MAX_GRAPHS:
            self._give_up("sizes of batches ask for graphs of their own")
        return found

    def _give_up(self, why: str) -> None:
        log.warning("training goes on without compiled layers, more slowly: %s", why)
        self.fast = None


def first_like(spec: ModelSpec, layer: int) -> int:
    """The first layer that is built as this one is: theirs is one graph."""

    def kind(at: int) -> tuple[int | None, int, bool]:
        has_experts = spec.experts is not None and spec.experts.layers[at]
        return spec.windows[at], spec.rope_index(at), has_experts

    return next(at for at in range(layer + 1) if kind(at) == kind(layer))
