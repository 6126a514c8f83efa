"""A part of a network: plain attributes that hold tensors and other parts.

Leaner than torch.nn.Module: no hooks, no registration, attributes at the speed of Python's own. A
trainer finds the tensors by `named_tensors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from hunch.kernels.quant import Quantised


class Part:
    """Base of every layer and network."""

    def named_tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Every tensor, named by the path of attributes that leads to it."""
        for name, value in vars(self).items():
            yield from _walk(f"{prefix}{name}", value)

    def parts(self) -> Iterator[Part]:
        """This part and every part in it."""
        yield self
        for value in vars(self).values():
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, Part):
                    yield from part.parts()

    @property
    def weight_bytes(self) -> int:
        """Memory of the tensors; a shared one counts once."""
        seen = {t.data_ptr(): t.numel() * t.element_size() for _, t in self.named_tensors()}
        return sum(seen.values())


def _walk(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Part):
        yield from value.named_tensors(f"{name}.")
    elif isinstance(value, Quantised):
        for key, tensor in value.tensors().items():
            yield f"{name}.{key}", tensor
    elif isinstance(value, list):  # lists hold parts, nothing else
        for index, part in enumerate(value):
            yield from _walk(f"{name}.{index}", part)
