"""Large tensors from a mapped file to a GPU: in pieces, through memory the GPU can fetch from.

All threads copy a piece, so that the file's pages are read side by side, while the GPU fetches the
piece before. This takes the memory of two pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

PIECE = 64 * 2**20  # bytes
SMALLEST = 2**20  # below, one plain copy is as fast


@dataclass(slots=True)
class Stage:
    """Two pieces of memory, and when the GPU is done with each."""

    pieces: list[Tensor]  # uint8
    events: list[torch.cuda.Event] = field(default_factory=list)  # none: copies are done at once

    def copy(self, source: Tensor, target: Tensor) -> None:
        """`target` is on the device, of the same type and size; both are contiguous."""
        given, taken = (x.view(-1).view(torch.uint8) for x in (source, target))
        size = len(self.pieces[0])
        for turn, first in enumerate(range(0, len(given), size)):
            piece = self.pieces[turn % 2]
            part = given[first : first + size]
            if self.events:
                self.events[turn % 2].synchronize()
            piece[: len(part)].copy_(part)
            taken[first : first + size].copy_(piece[: len(part)], non_blocking=True)
            if self.events:
                self.events[turn % 2].record()
        for event in self.events:
            event.synchronize()


@torch.inference_mode(False)  # the pieces outlive the block of code that first needs them
def new_pieces(size: int, is_pinned: bool) -> list[Tensor]:
    return [torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(2)]


@cache
def _stage(device: torch.device) -> Stage:
    with torch.cuda.device(device):
        pieces = new_pieces(PIECE, is_pinned=True)
        events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        return Stage(pieces, events)


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The tensor on the device that uses it, converted there."""
    num_bytes = tensor.numel() * tensor.element_size()
    if device.type != "cuda" or tensor.device.type != "cpu" or num_bytes < SMALLEST:
        return tensor.to(device, dtype)
    source = tensor.contiguous()
    target = torch.empty(source.shape, dtype=source.dtype, device=device)
    _stage(device).copy(source, target)
    return target.to(dtype)


def release() -> None:
    """Release the pieces' memory, once a model is loaded."""
    _stage.cache_clear()
