"""Joins parts of ranks of one machine through the GPUs' own memory, without the host.

Each rank has a buffer in its GPU's memory that the other processes map into their address space
(CUDA's memory handles, by the driver's own interface). `kernels/gpu_exchange.py` says how the
buffers are used.

Shape letters: S slices of a sum, T packed tokens, D width, R ranks, W 32-bit words of a part.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hunch.errors import EngineError
from hunch.kernels.gpu_exchange import (
    MAX_WORDS,
    PEERS_DIED,
    TIMED_OUT,
    Exchange,
    buffer_words,
)
from hunch.parallel import group
from hunch.parallel.group import added, joined, padded

HANDLE_BYTES = 64  # of CUDA's memory handles
PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: the buffer may be on another GPU
NAME_BYTES = 64  # of an identifier of a machine

Share = Callable[[bytes], list[bytes]]  # returns every rank's bytes, by rank


class SharedGroup:
    """A group (see `group.py`) whose exchanges captured steps can contain."""

    is_captured = True

    def __init__(self, exchange: Exchange) -> None:
        self.rank, self.size, self._exchange = exchange.rank, exchange.size, exchange
        self._all, self._first = range(self.size), range(1)
        self.num_made, self._device = 0, exchange.device

    def all_reduce(self, part: Tensor) -> Tensor:
        return added(self._gathered(part, self._all, self._all))

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor:
        parts = self._gathered(padded(part, max(sizes)), self._all, self._first)
        return part if self.rank else joined(parts, sizes)

    def all_slices(self, part_STD: Tensor) -> Tensor:
        size, part_SW = part_STD.shape[1:], part_STD.flatten(1)
        out_RW = self._exchange.gather(part_SW, writers=self._all, readers=self._all)
        self.num_made += 1
        return out_RW.view(-1, *size)

    def broadcast(self, tensor: Tensor) -> Tensor:
        found = self._gathered(tensor, self._first, self._all[1:])
        if self.rank:
            tensor.copy_(found[0])
        return tensor

    def withdraw(self, exchange: group.Exchange) -> None:
        """Withdraw in pieces, as long parts are sent in pieces: that takes little memory."""
        per_word = 4 // min(exchange.dtype.itemsize, 4)
        words_each = max(exchange.dtype.itemsize // 4, 1)
        num_words = -(-exchange.num_numbers // per_word) * words_each
        piece = exchange._replace(num_numbers=min(num_words, MAX_WORDS) // words_each * per_word)
        word_W = _words(group.nothing(piece, self._device))
        for start in range(0, num_words, MAX_WORDS):
            part_1W = word_W[None, : num_words - start]
            self._exchange.gather(part_1W, writers=self._all, readers=self._all[:0])
        self.num_made += 1

    def _gathered(self, part: Tensor, writers: range, readers: range) -> Tensor:
        """The writers' parts, [R, ...], on the readers."""
        word_W = _words(part.contiguous())
        out_RW = self._exchange.gather(word_W[None], writers=writers, readers=readers)
        self.num_made += 1
        flat_R = out_RW if part.dtype == torch.float32 else out_RW.view(part.dtype)
        return flat_R[:, : part.numel()].view(len(out_RW), *part.shape)


def _words(part: Tensor) -> Tensor:
    """The part's bits as a row of 32-bit words: of float32, which sums add, or else of int32."""
    flat, per_word = part.view(-1), 4 // min(part.itemsize, 4)
    if part.dtype == torch.float32:
        return flat
    if flat.numel() % per_word:
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % per_word)])
    return flat.view(torch.int32)


class SharedBuffers:
    """This rank's buffer and those of the others, as this process sees them."""

    def __init__(self, driver: Driver, own: int, others: list[int], addresses: list[int]) -> None:
        self._driver, self._own, self._others = driver, own, others
        self.addresses = addresses

    @staticmethod
    def open(rank: int, size: int, device: torch.device, share: Share) -> SharedBuffers | None:
        """The buffers; None, on every rank: some cannot map each other's memory."""
        driver, own, handle = Driver.find(), 0, bytes(HANDLE_BYTES)
        if driver is not None:
            with torch.cuda.device(device):
                torch.cuda.synchronize()  # so that the context exists
                own, handle = driver.allocate(4 * buffer_words(size))
        answers = share(_machine() + handle)
        is_near = all(one[:NAME_BYTES] == answers[0][:NAME_BYTES] for one in answers)
        handles = [one[NAME_BYTES : NAME_BYTES + HANDLE_BYTES] for one in answers]
        addresses: list[int] = []
        if driver is not None and own and is_near and all(map(any, handles)):
            with torch.cuda.device(device):
                addresses = [
                    own if other == rank else driver.open(handle)
                    for other, handle in enumerate(handles)
                ]
        others = [address for address in addresses if address not in (0, own)]
        is_open = bool(addresses) and all(addresses)
        opened = SharedBuffers(driver, own, others, addresses) if driver is not None else None
        if all(one[:1] == b"1" for one in share(b"1" if is_open else b"0")):
            return opened
        if opened is not None:
            opened.close()
        return None

    def close(self) -> None:
        """Release the buffers, which no kernel may use any more."""
        while self._others:
            self._driver.close(self._others.pop())
        if self._own:
            self._driver.free(self._own)
        self._own = 0


def _machine() -> bytes:
    """An identifier of this machine."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = boot.read_text().strip() if boot.exists() else socket.gethostname()
    return name.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * HANDLE_BYTES),)


class Driver:
    """The part of CUDA's driver that torch lacks: memory that other processes can map."""

    def __init__(self, library: Any) -> None:
        self._library = library
        address, size = ctypes.c_uint64, ctypes.c_size_t
        library.cuMemAlloc_v2.argtypes = [ctypes.POINTER(address), size]
        library.cuMemsetD32_v2.argtypes = [address, ctypes.c_uint, size]
        library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), address]
        library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(address), _Handle, ctypes.c_uint]
        library.cuIpcCloseMemHandle.argtypes = [address]
        library.cuMemFree_v2.argtypes = [address]

    @staticmethod
    def find() -> Driver | None:
        try:
            return Driver(ctypes.CDLL("libcuda.so.1"))
        except (OSError, AttributeError):
            return None

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        """Zeroed memory of the current device and its handle; 0 if that fails."""
        buffer, handle = ctypes.c_uint64(), _Handle()
        if self._library.cuMemAlloc_v2(ctypes.byref(buffer), num_bytes):
            return 0, bytes(HANDLE_BYTES)
        failed = self._library.cuMemsetD32_v2(buffer, 0, num_bytes // 4)
        torch.cuda.synchronize()
        if failed or self._library.cuIpcGetMemHandle(ctypes.byref(handle), buffer):
            self.free(buffer.value)
            return 0, bytes(HANDLE_BYTES)
        return buffer.value, ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        """Map another process's buffer; 0 if that fails."""
        buffer, given = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(given), handle, HANDLE_BYTES)
        failed = self._library.cuIpcOpenMemHandle_v2(ctypes.byref(buffer), given, PEER_ACCESS)
        return 0 if failed else buffer.value

    def close(self, buffer: int) -> None:
        self._library.cuIpcCloseMemHandle(buffer)

    def free(self, buffer: int) -> None:
        self._library.cuMemFree_v2(buffer)


class Waiting:
    """Whether the ranks' kernels may still wait for each other: a word that all of them look at."""

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.stop_1 = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)

    def end(self) -> None:
        """A rank has died: end all waiting. Results of kernels must not be used from then on."""
        self.stop_1[0] = PEERS_DIED

    def check(self) -> None:
        if int(self.stop_1) == TIMED_OUT:
            raise EngineError("a rank waited in vain for the others in the middle of a step")
