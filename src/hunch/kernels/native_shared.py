"""Memory that processes of one machine map, through which the C++ kernels join their parts."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from pathlib import Path

import torch
from torch import Tensor

from hunch.kernels.native_library import library


class SharedMemory:
    """One process's end of it. All processes call the same methods in the same order."""

    def __init__(self, file: Path, rank: int, size: int) -> None:
        """Rank 0 makes the file first; the others find it."""
        lib, self.rank, self.size = library(), rank, size
        num_bytes = lib.hunch_shared_bytes(size)
        if num_bytes == 0:
            raise OSError(f"{size} processes are too many for one piece of memory")
        if rank == 0:
            with file.open("xb") as made:
                if sys.platform == "darwin":
                    made.truncate(num_bytes)
                else:
                    os.posix_fallocate(made.fileno(), 0, num_bytes)  # raises where no room is left
        with file.open("r+b") as there:
            self._map = mmap.mmap(there.fileno(), num_bytes)  # kept: others may still look at it
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._place = self.address, rank, size
        self._gather, self._sum = lib.hunch_shared_gather, lib.hunch_shared_sum
        self._broadcast, self._end = lib.hunch_shared_broadcast, lib.hunch_shared_end

    def gather(self, part: Tensor) -> Tensor:
        """Every process's part, [rank, ...]."""
        parts = part.new_empty(self.size, *part.shape)
        num_bytes = part.numel() * part.itemsize
        self._check(self._gather(*self._place, part.data_ptr(), num_bytes, parts.data_ptr()))
        return parts

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all parts, float32, added in the order of the processes."""
        total = torch.empty_like(part)
        self._check(self._sum(*self._place, part.data_ptr(), part.numel(), total.data_ptr()))
        return total

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's, written into what the others give."""
        num_bytes = tensor.numel() * tensor.itemsize
        self._check(self._broadcast(*self._place, tensor.data_ptr(), num_bytes))

    def end(self) -> None:
        """A process is gone: nobody may wait for it any more, here or in another."""
        self._end(self.address)

    def _check(self, failed: int) -> None:
        if failed:
            raise RuntimeError("Connection closed by peer: another rank is gone")
