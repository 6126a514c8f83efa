"""A student's tensors as networks take them: float32 leaves, read in the precision of products."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hunch.models.source import Shape, Source


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
