"""What every kind of weight file offers, and the progress bar of a slow load."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hunch.hub.gguf_file import parts_of
from hunch.kernels.quant import Codes
from hunch.models.weights.blocks import codes_of
from hunch.models.weights.dequant import FORMATS, dequantise

Rows = slice | Tensor  # of a matrix: a range, or one by one


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix as the file holds it: rows of quantised blocks, in Hugging Face's row order."""

    format: str  # a name of dequant.FORMATS, such as "Q4_1"
    shape: tuple[int, int]  # [out, in], in weights; a stack of matrices is one with all rows
    data: Tensor  # uint8 [out, bytes of a row]; still in the file where the order allows it
    release: Callable[[], None]  # releases the file's pages, once the blocks were copied

    def take(self, rows: Rows) -> Packed:
        """Some of its rows, or all in another order."""
        data = self.data[rows]
        return Packed(self.format, (len(data), self.shape[1]), data, self.release)

    def take_columns(self, first: int, last: int) -> Packed | None:
        """Some of its columns; None where they do not start and end with a block."""
        num_out, num_in = self.shape
        size, num_bytes = FORMATS[self.format][0], self.data.shape[1]
        if first % size or last % size:
            return None
        data = self.data[:, first * num_bytes // num_in : last * num_bytes // num_in].contiguous()
        return Packed(self.format, (num_out, last - first), data, self.release)

    def blocks(self) -> Tensor:
        """Its rows as blocks of the format, uint8 [out, bytes of a row]."""
        return self.data

    def numbers(self, first: int, last: int) -> Tensor:
        """Rows [first, last) in float32."""
        return dequantise(self.format, self.data[first:last], self.shape[1])

    def codes(self, device: torch.device | str = "cpu") -> Codes | None:
        """Codes and scales, of the same numbers; None for a type that has no such form."""
        return codes_of(self.format, self.data.to(device))


class Weights(Protocol):
    """A model's tensors under Hugging Face names, read from the file when asked for."""

    path: Path
    config: dict[str, Any]  # as in config.json; made from the metadata of a GGUF file
    metadata: Mapping[str, Any]  # a GGUF file's metadata (tokenizer, template); else empty
    nbytes: int  # of all tensors, as stored

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor: ...

    def packed(self, name: str) -> Packed | None:
        """The matrix still quantised; None where the file holds plain numbers."""
        ...


class WeightsOver:
    """Base of `Weights` over others: other tensors, of the same files."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights
        self.path: Path = weights.path
        self.config: dict[str, Any] = weights.config
        self.metadata: Mapping[str, Any] = weights.metadata
        self.nbytes = weights.nbytes

    def names(self) -> list[str]:
        return self.weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)


@runtime_checkable
class ReadsParts(Protocol):
    """Weights that can read a part of a tensor without the rest of it."""

    def part(
        self, name: str, dim: int, part: tuple[int, int], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """[first, last) of a dimension."""


def part_of(
    weights: Weights, name: str, dim: int, part: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    """[first, last) of a dimension; only that is read, if the weights can do so."""
    if isinstance(weights, ReadsParts):
        return weights.part(name, dim, part, dtype)
    return weights.tensor(name, dtype).narrow(dim, part[0], part[1] - part[0])


def read_ahead(path: Path) -> int:
    """Ask the system to read a model's files, side by side, before they are mapped page by page.

    No more than fit into free memory, else what was read first would be dropped first. Only the
    system's cache grows, which it shrinks when others need memory. Returns the bytes asked for.
    """
    if not hasattr(os, "posix_fadvise") or not path.exists():
        return 0
    files = parts_of(path) if path.is_file() else sorted(path.glob("*.safetensors"))
    room = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    asked = 0
    for file in filter(Path.is_file, files):
        size = file.stat().st_size
        if asked + size > room:
            break
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, size, os.POSIX_FADV_WILLNEED)
        asked += size
    return asked


def iterate(names: Iterable[str], *, title: str = "loading", delay: float = 1.0) -> Iterator[str]:
    """The same names, with a progress bar on the terminal once it took longer than `delay`."""
    todo = list(names)
    started = time.perf_counter()
    for done, name in enumerate(todo):
        if time.perf_counter() - started > delay and sys.stderr.isatty():
            yield from _with_bar(todo, done, title)
            return
        yield name


def _with_bar(todo: list[str], done: int, title: str) -> Iterator[str]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=len(todo), completed=done)
        for name in todo[done:]:
            yield name
            bar.advance(task)
