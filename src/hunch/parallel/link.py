"""The connection of ranks: who they are, groups of them, and orders from rank 0 to the others.

Orders are rows of whole numbers, never pickled objects: nothing that arrives can be more than data.
Ranks that hunch starts itself find each other through a file in a folder that only their user can
read, and are connected over the loopback interface.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed

from hunch.errors import ConfigError
from hunch.kernels import native_library
from hunch.parallel.group import SINGLE, DistGroup, Group, Line, NearGroup

log = logging.getLogger("hunch")

Numbers = npt.NDArray[np.int64]

dist: Any = torch.distributed  # its stubs lack much of what it has

JOIN_SECONDS = 300  # in which ranks must find each other
FOREVER = timedelta(days=365)  # a rank waits for its next order as long as there are no requests
HEAD = 512  # numbers of an order that are sent together with its length
TEXT_BYTES = 1024  # of a rank's answer to an order
MAX_AHEAD = 64  # orders that were sent and not read yet
SHARE_GPUS = "HUNCH_RANKS_SHARE_GPUS"  # set to 1: several ranks on one GPU, for tests
EXCHANGE = "HUNCH_RANKS_EXCHANGE"  # set to "messages": not through memory that ranks share


class Link:
    """One rank's end of the connection. All ranks call `group` and `tell_rank_0` in the same
    order."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        device: torch.device,
        folder: Path | None = None,  # which ranks of this machine share
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._store, self._folder = store, folder
        self._orders = self._gloo("orders", rank, size)
        self._groups: dict[tuple[int, int], Group] = {}
        self._buffers: list[Any] = []  # of GPUs, shared with other ranks
        self._waiting: Any = None  # whether they may still wait for each other there
        self._memories: list[Any] = []  # of the CPU, shared with other ranks
        self._lines: dict[int, Line] = {}
        self._head = np.zeros(HEAD, dtype=np.int64)
        self.is_ahead = False  # rank 0 continues before the others have read what it sent
        self._sent: deque[tuple[Any, Numbers]] = deque()  # what must be kept until they have

    @staticmethod
    def in_folder(folder: Path, rank: int, size: int, device: torch.device) -> Link:
        """Ranks on this machine that share a folder."""
        store = dist.FileStore(str(folder / "ranks"), size)
        store.set_timeout(timedelta(seconds=JOIN_SECONDS))
        return Link(store, rank, size, device, folder)

    @staticmethod
    def of_torchrun(device: torch.device) -> Link:
        """Ranks that torchrun started, on one machine or several."""
        store, rank, size = next(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN_SECONDS)))
        return Link(store, rank, size, device)

    def group(self, size: int, first: int = 0) -> Group:
        """A group of `size` ranks from `first` on; only these may call this."""
        if size == 1:
            return SINGLE
        if (size, first) not in self._groups:
            made = self._shared(size, first) or self._near(size, first)
            self._groups[size, first] = made or self._joined(size, first)
        return self._groups[size, first]

    def _joined(self, size: int, first: int) -> Group:
        made, through_host = self._processes(f"group {size} {first}", self.rank - first, size)
        return DistGroup(made, self.device, through_host=through_host)

    def _shared(self, size: int, first: int) -> Group | None:
        """A group through GPU memory that all these ranks map; None: not all of them can."""
        if self.device.type != "cuda" or os.environ.get(EXCHANGE) == "messages":
            return None
        from hunch.kernels.gpu_exchange import Exchange  # needs Triton
        from hunch.parallel.shared import SharedBuffers, SharedGroup, Waiting

        torch.cuda.set_device(self.device)
        rank = self.rank - first
        gloo = self._gloo(f"buffers {size} {first}", rank, size)
        buffers = SharedBuffers.open(rank, size, self.device, partial(_share, gloo, size))
        if buffers is None:
            log.warning("ranks cannot map each other's GPU memory: their steps are not captured")
            return None
        self._waiting = self._waiting or Waiting(self.device)
        self._buffers.append(buffers)
        exchange = Exchange(rank, buffers.addresses, self._waiting.stop_1, self.device)
        return SharedGroup(exchange)

    def _near(self, size: int, first: int) -> Group | None:
        """A group through memory of this machine's CPU; None, on every rank: not possible."""
        by_messages = os.environ.get(EXCHANGE) == "messages" or not native_library.is_available()
        if self.device.type != "cpu" or self._folder is None or by_messages:
            return None
        from hunch.kernels.native_shared import SharedMemory

        file, rank = self._folder / f"group-{size}-{first}", self.rank - first
        if rank and self._store.get(file.name) != b"made":
            return None
        try:
            memory = SharedMemory(file, rank, size)
        except OSError as error:
            if rank:
                raise
            log.warning("ranks exchange by messages, not through memory: %s", error)
            self._store.set(file.name, "not made")
            return None
        self._store.set(file.name, "made")
        self._memories.append(memory)
        return NearGroup(memory)

    def stop_waiting(self) -> None:
        """Stop kernels from waiting for a rank that is gone."""
        for memory in self._memories:
            memory.end()
        if self._waiting is not None:
            self._waiting.end()

    def check(self) -> None:
        """Raise if ranks have waited in vain."""
        if self._waiting is not None:
            self._waiting.check()

    def close(self) -> None:
        """Close this end: the others are gone, or about to leave."""
        self.stop_waiting()
        if self._buffers:
            torch.cuda.synchronize(self.device)
        while self._buffers:
            self._buffers.pop().close()

    def line(self, size: int) -> Line:
        """A line between any two of the first `size` ranks, all of which must call this."""
        if size not in self._lines:
            made, through_host = self._processes(f"line {size}", self.rank, size)
            self._lines[size] = Line(made, self.device, through_host=through_host)
        return self._lines[size]

    def _processes(self, name: str, rank: int, size: int) -> tuple[Any, bool]:
        """A process group for tensors, and whether they are sent through the CPU's memory."""
        if self.device.type == "cuda" and not shares_gpus():
            return self._nccl(name, rank, size), False
        return self._gloo(name, rank, size), self.device.type == "cuda"

    def _gloo(self, name: str, rank: int, size: int) -> Any:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = FOREVER
        if self._folder is not None:
            interface = "lo0" if sys.platform == "darwin" else "lo"
            options._devices = [dist.ProcessGroupGloo.create_device(interface=interface)]
        else:
            options._devices = [dist.ProcessGroupGloo.create_default_device()]
        return dist.ProcessGroupGloo(dist.PrefixStore(name, self._store), rank, size, options)

    def _nccl(self, name: str, rank: int, size: int) -> Any:
        torch.cuda.set_device(self.device)
        store = dist.PrefixStore(name, self._store)
        return dist.ProcessGroupNCCL(store, rank, size, dist.ProcessGroupNCCL.Options())

    # --- orders -----------------------------------------------------------------------------------

    def send(self, order: Numbers) -> None:
        """Send an order from rank 0 to all others."""
        head = np.zeros_like(self._head) if self.is_ahead else self._head
        head[0], num_first = len(order), min(len(order), HEAD - 1)
        head[1 : 1 + num_first] = order[:num_first]
        self._broadcast(head)
        if len(order) > num_first:
            self._broadcast(np.ascontiguousarray(order[num_first:]))

    def receive(self) -> Numbers:
        """Wait for the next order."""
        self._broadcast(self._head)
        length = int(self._head[0])
        order = np.empty(length, dtype=np.int64)
        num_first = min(length, HEAD - 1)
        order[:num_first] = self._head[1 : 1 + num_first]
        if length > num_first:
            rest = np.empty(length - num_first, dtype=np.int64)
            self._broadcast(rest)
            order[num_first:] = rest
        return order

    def _broadcast(self, numbers: Numbers) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self._orders.broadcast([torch.from_numpy(numbers)], options)
        if not self.is_ahead:
            work.wait()
            return
        self._sent.append((work, numbers))
        while self._sent and (self._sent[0][0].is_completed() or len(self._sent) > MAX_AHEAD):
            self._sent.popleft()[0].wait()

    def tell_rank_0(self, text: str) -> list[str]:
        """Give rank 0 a text of every rank; returns them by rank."""
        own = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        data = text.encode()[:TEXT_BYTES]
        own[: len(data)] = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[
            : len(data)
        ]
        every = [torch.empty_like(own) for _ in range(self.size)]
        self._orders.allgather([every], [own]).wait()
        return [bytes(t.tolist()).rstrip(b"\0").decode(errors="ignore") for t in every]


def _share(gloo: Any, size: int, data: bytes) -> list[bytes]:
    """Every rank's bytes, by rank; all have one length."""
    own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(size)]
    gloo.allgather([every], [own]).wait()
    return [bytes(one.tolist()) for one in every]


def shares_gpus() -> bool:
    return os.environ.get(SHARE_GPUS) == "1"


def torchrun_rank(size: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank, if torchrun started it with others; else None."""
    if "TORCHELASTIC_RUN_ID" not in environ or size == 1:
        return None
    started = int(environ["WORLD_SIZE"])
    if started != size:
        raise ConfigError(
            f"torchrun started {started} processes, tensor_parallel_size times "
            f"pipeline_parallel_size is {size}: they must be equal"
        )
    return int(environ["RANK"])


def rank_device(device_type: str, rank: int, size: int) -> torch.device:
    """The device of a rank: each has a GPU of its own."""
    if device_type == "cpu":
        return torch.device("cpu")
    place, count = int(os.environ.get("LOCAL_RANK", rank)), torch.cuda.device_count()
    if shares_gpus():
        return torch.device("cuda", place % count)
    num_here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if num_here > count:
        raise ConfigError(
            f"{size} ranks (tensor_parallel_size times pipeline_parallel_size) need {num_here} "
            f"GPUs on this machine, which has {count}"
        )
    return torch.device("cuda", place)
