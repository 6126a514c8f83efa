"""Copies a network's numbers over another's of the same shape, in memory that captured steps
read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from hunch.errors import ModelFormatError


@torch.no_grad()
def copy_network(old: Any, new: Any) -> int:
    """Copy every tensor of `new` over that of `old`; returns how many differ in their memory.

    Both were built by the same code from files of one shape, so that their tensors come in the same
    order. Tensors that both share, such as a target's tables, are left alone.
    """
    ours, theirs = list(tensors_of(old)), list(tensors_of(new))
    is_same = len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=False)
    )
    if not is_same:
        raise ModelFormatError("the new network has another shape than the one that drafts")
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.data_ptr() != b.data_ptr()]
    for a, b in pairs:
        a.copy_(b)
    return len(pairs)


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Tensors in an object of ours and in those it holds, each once, in the order of attributes."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    if isinstance(value, Tensor):
        seen.add(id(value))
        yield value
        return
    inside: list[Any] = []
    if isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value)
    elif type(value).__module__.startswith("hunch."):
        inside = list(getattr(value, "__dict__", {}).values())
        if not inside and is_dataclass(value):
            inside = [getattr(value, field.name) for field in fields(value)]
    if inside:
        seen.add(id(value))
        for part in inside:
            yield from tensors_of(part, seen)
