"""Devices that hold one model together: who we are, and how parts of a result are joined."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hunch.errors import ConfigError


class Group(Protocol):
    """Ranks 0 to size - 1. Every rank calls the same methods in the same order."""

    rank: int
    size: int

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of every rank's part, added in rank order so that all ranks get the same bits."""

    def all_gather(self, part: Tensor) -> Tensor:
        """Every rank's part, joined along the last dimension in rank order."""


class SingleGroup:
    """One device: nothing to join."""

    rank = 0
    size = 1

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def all_gather(self, part: Tensor) -> Tensor:
        return part


SINGLE: Group = SingleGroup()


class DistGroup:
    """Processes joined by torch.distributed (gloo on CPUs, nccl on GPUs)."""

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group  # None: all processes
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)

    def all_reduce(self, part: Tensor) -> Tensor:
        parts = self._gather(part)
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        return total

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._gather(part), dim=-1)

    def _gather(self, part: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return parts


def shard_size(size: int, group: Group, what: str) -> int:
    """How much of `size` one rank holds."""
    if size % group.size:
        raise ConfigError(
            f"tensor_parallel_size={group.size} does not divide the model's {what} ({size})"
        )
    return size // group.size


def shard(tensor: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's equal part of `tensor` along `dim`."""
    if group.size == 1:
        return tensor
    size = shard_size(tensor.shape[dim], group, f"dimension of {tuple(tensor.shape)}")
    return tensor.narrow(dim, group.rank * size, size)
