"""Ranks that hold one model together, and how they join the parts of a result.

Shape letters: S slices of a sum, T packed tokens, D width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hunch.errors import ConfigError

Share = tuple[int, int]  # [first, last) of something that is split

UNITS = (256, 128, 64, 32)  # a split at multiples of these cuts no block of quantised weights


class Exchange(NamedTuple):
    """What ranks exchange at one place of a pass."""

    num_numbers: int  # of each rank's part
    dtype: torch.dtype
    is_broadcast: bool = False


class Group(Protocol):
    """Ranks 0 to size - 1. Every rank calls the same methods in the same order."""

    rank: int
    size: int
    is_captured: bool  # captured steps can contain its exchanges
    num_made: int  # exchanges so far in which this rank took part

    def all_reduce(self, part: Tensor) -> Tensor:
        """The sum of every rank's part, added in rank order so that all ranks get the same bits."""

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        """Every rank's part, joined along the last dimension in rank order: on rank 0 alone.

        `sizes` are the parts' last dimensions. Other ranks get back their own part.
        """

    def all_slices(self, part_STD: Tensor) -> Tensor:
        """Every rank's slices of a sum, rank after rank, for a kernel that adds them in order."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Rank 0's tensor on every rank; written into what the others give."""

    def withdraw(self, exchange: Exchange) -> None:
        """Take part in an exchange with a part that is not a number; see `nothing`."""


class SingleGroup:
    """One device: nothing to join."""

    rank = 0
    size = 1
    is_captured = True
    num_made = 0

    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        return part

    def all_slices(self, part_STD: Tensor) -> Tensor:
        return part_STD

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    def withdraw(self, exchange: Exchange) -> None:
        return None


class Memory(Protocol):
    """See `kernels/native_shared.py`; parts are contiguous."""

    rank: int
    size: int

    def gather(self, part: Tensor) -> Tensor: ...
    def sum(self, part: Tensor) -> Tensor: ...
    def broadcast(self, tensor: Tensor) -> None: ...


SINGLE: Group = SingleGroup()


def added(parts: Tensor) -> Tensor:
    """The sum along the first dimension, added in order."""
    total = parts[0]
    for other in parts[1:]:
        total = total + other
    return total


def nothing(exchange: Exchange, device: torch.device | str = "cpu") -> Tensor:
    """The part of a rank that has withdrawn: not a number, or 0 in exchanges of whole numbers."""
    value = torch.nan if exchange.dtype.is_floating_point else 0
    return torch.full((exchange.num_numbers,), value, dtype=exchange.dtype, device=device)


def padded(part: Tensor, size: int) -> Tensor:
    """A part padded along its last dimension to the longest of all ranks."""
    if part.shape[-1] == size:
        return part
    longer = part.new_zeros(*part.shape[:-1], size)
    longer[..., : part.shape[-1]] = part
    return longer


def joined(parts: Tensor, sizes: Sequence[int]) -> Tensor:
    """Padded parts joined along the last dimension, rank after rank."""
    return torch.cat([p[..., :size] for p, size in zip(parts, sizes, strict=True)], dim=-1)


class DistGroup:
    """Processes joined by torch.distributed (gloo on CPUs, nccl on GPUs)."""

    is_captured = False

    def __init__(
        self, process_group: dist.ProcessGroup, device: torch.device, *, through_host: bool = False
    ) -> None:
        """`through_host`: tensors of a GPU are sent through the CPU's memory."""
        self._group, self._device, self.num_made = process_group, device, 0
        self._through_host = through_host
        self.rank = process_group.rank()
        self.size = process_group.size()

    def all_reduce(self, part: Tensor) -> Tensor:
        return added(self._all(part))

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        # A gather to one rank alone is no faster on either backend.
        parts = self._all(padded(part, max(sizes)))
        return part if self.rank else joined(parts, sizes)

    def all_slices(self, part_STD: Tensor) -> Tensor:
        return self._all(added(part_STD))

    def broadcast(self, tensor: Tensor) -> Tensor:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        sent = tensor.cpu() if self._through_host else tensor.contiguous()
        self._group.broadcast([sent], options).wait()
        self.num_made += 1
        if sent is not tensor:
            tensor.copy_(sent)
        return tensor

    def withdraw(self, exchange: Exchange) -> None:
        part = nothing(exchange, self._device)
        if exchange.is_broadcast:
            self.broadcast(part)
        else:
            self._all(part)

    def _all(self, part: Tensor) -> Tensor:
        """Every rank's part, [rank, ...]."""
        sent = part.cpu() if self._through_host else part.contiguous()
        parts = sent.new_empty(self.size, *sent.shape)
        self._group._allgather_base(parts.view(-1), sent.view(-1)).wait()
        self.num_made += 1
        return parts.to(part.device)


class NearGroup:
    """Processes of one machine that join parts in the CPU's memory, which all of them map."""

    is_captured = False

    def __init__(self, memory: Memory) -> None:
        self.rank, self.size, self._memory = memory.rank, memory.size, memory
        self.num_made = 0

    def all_reduce(self, part: Tensor) -> Tensor:
        part = part.contiguous()
        if part.dtype == torch.float32:
            total = self._memory.sum(part)
            self.num_made += 1
            return total
        return added(self._all(part))

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = self._all(padded(part, max(sizes)).contiguous())
        return part if self.rank else joined(parts, sizes)

    def all_slices(self, part_STD: Tensor) -> Tensor:
        return self._all(added(part_STD).contiguous())

    def broadcast(self, tensor: Tensor) -> Tensor:
        sent = tensor.contiguous()
        self._memory.broadcast(sent)
        self.num_made += 1
        if sent is not tensor:
            tensor.copy_(sent)
        return tensor

    def withdraw(self, exchange: Exchange) -> None:
        self._all(nothing(exchange))  # broadcasts and sums have the same pieces

    def _all(self, part: Tensor) -> Tensor:
        """Every rank's part, [rank, ...]."""
        parts = self._memory.gather(part)
        self.num_made += 1
        return parts


class Line:
    """Sends tensors from one rank to another. A sender continues at once."""

    # Messages that may wait to be received; a sender of more waits. They are more than passes under
    # way, so no rank waits here while rank 0 asks all of them something.
    MAX_SENT = 64

    def __init__(
        self, process_group: Any, device: torch.device, *, through_host: bool = False
    ) -> None:
        self._group, self._device, self._through_host = process_group, device, through_host
        self._sent: deque[tuple[Any, Tensor]] = deque()  # what must be kept until it was received

    def send(self, tensor: Tensor, rank: int) -> None:
        tensor = tensor.cpu() if self._through_host else tensor.contiguous()
        self._sent.append((self._group.send([tensor], rank, 0), tensor))
        while len(self._sent) > self.MAX_SENT:
            self._sent.popleft()[0].wait()

    def receive(self, shape: Sequence[int], dtype: torch.dtype, rank: int) -> Tensor:
        """The next tensor from `rank`, which is known to have this shape."""
        device = torch.device("cpu") if self._through_host else self._device
        tensor = torch.empty(*shape, dtype=dtype, device=device)
        self._group.recv([tensor], rank, 0).wait()
        return tensor.to(self._device)


def span(size: int, group: Group, what: str = "") -> Share:
    """The part of `size` that one rank holds; if they cannot be equal, the first are larger.

    It starts and ends at whole blocks of quantised weights where there are enough of them.
    """
    if size < group.size:
        raise ConfigError(
            f"tensor_parallel_size={group.size} is more than the model's {what or 'size'} ({size})"
        )
    smallest = UNITS[-1]
    is_enough = size % smallest == 0 and size // smallest >= group.size
    even = [unit for unit in UNITS if size % (unit * group.size) == 0]
    unit = even[0] if even else smallest if is_enough else 1
    return _share(size // unit, group, unit)


def _share(count: int, group: Group, unit: int = 1) -> Share:
    first = -(-count * group.rank // group.size)
    last = -(-count * (group.rank + 1) // group.size)
    return first * unit, last * unit


def spans(size: int, num_ranks: int) -> tuple[int, ...]:
    """How much of `size` each rank holds."""
    parts = [span(size, _Place(rank, num_ranks)) for rank in range(num_ranks)]
    return tuple(last - first for first, last in parts)


class _Place(SingleGroup):
    """A rank's place in a group, without the group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def head_spans(num_heads: int, num_kv_heads: int, group: Group) -> tuple[Share, Share]:
    """The heads and the KV heads that one rank holds.

    A rank holds the KV heads that its heads read. If there are fewer KV heads than ranks, several
    ranks hold the same one and share the heads that read it.
    """
    if group.size > num_heads:
        raise ConfigError(
            f"tensor_parallel_size={group.size} is more than the model's attention heads "
            f"({num_heads})"
        )
    readers = num_heads // num_kv_heads
    if group.size <= num_kv_heads:
        first, last = _share(num_kv_heads, group)
        return (first * readers, last * readers), (first, last)
    if group.size % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={group.size} must be a multiple of the model's KV heads "
            f"({num_kv_heads}) where it is more than them, or at most as many"
        )
    sharing = group.size // num_kv_heads
    kv_head, place = divmod(group.rank, sharing)
    first, last = _share(readers, _Place(place, sharing))
    return (kv_head * readers + first, kv_head * readers + last), (kv_head, kv_head + 1)
