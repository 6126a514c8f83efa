"""Reads a file's tensors as matrices of the CPU's own kernels: as the file has them, or rounded."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from hunch.config import say_once
from hunch.kernels.build import num_cores
from hunch.kernels.native_matrix import EXACT_FORMAT, FLOAT, INT4, INT8, TABLE, NativeMatrix
from hunch.models.source import FileSource
from hunch.models.spec import ModelSpec
from hunch.models.weights.base import Packed
from hunch.models.weights.coded import CODED, coded, coded_levels

_EXPANDED = 1 << 20  # weights that a thread holds as floats while they are packed


class Reader:
    """Reads a file's tensors in the kernels' form, in the requested precision."""

    def __init__(self, source: FileSource, dtype: str, num_threads: int | None) -> None:
        self.source, self.dtype, self.num_threads = source, dtype, num_threads

    def tensor(self, name: str) -> Tensor:
        """A copy of a tensor: a view would keep the whole file in memory."""
        return self._floats(name).clone(memory_format=torch.contiguous_format)

    def _floats(self, name: str) -> Tensor:
        found = self.source.find(name)
        assert found is not None  # check_tensors has checked it
        return self.source.weights.tensor(found, torch.float32)

    def norm(self, name: str, spec: ModelSpec) -> Tensor:
        """The weight of a norm of the stream."""
        return self.tensor(f"{name}.weight") if spec.has_norm_weight else torch.ones(spec.width)

    def matrix(self, name: str, *, is_table: bool = False) -> NativeMatrix:
        """`is_table`: an embedding or output matrix, which 4 bits would hurt most."""
        return self.stack([name], is_table=is_table)

    def _format(self, is_packed: bool, exact: int | None, is_table: bool) -> int:
        if self.dtype == "auto":
            return exact if exact is not None else INT8 if is_packed else FLOAT
        return {"int8": INT8, "int4": INT8 if is_table else INT4, "float32": FLOAT}[self.dtype]

    def floats(self, name: str) -> NativeMatrix:
        """A matrix that is never rounded."""
        return NativeMatrix.from_floats(self._floats(name), FLOAT, self.num_threads)

    def turned(self, name: str, num_heads: int) -> NativeMatrix:
        """A matrix per head, each transposed: [head][in][out] from a file's [head][out][in]."""
        found = self.source.find(name)
        assert found is not None
        weight = self._floats(name)
        weight = weight.view(num_heads, -1, weight.shape[1]).transpose(1, 2).flatten(0, 1)
        matrix_format = self._format(self.source.weights.packed(found) is not None, None, False)
        return NativeMatrix.from_floats(weight, matrix_format, self.num_threads)

    def stack(self, names: list[str], *, is_table: bool = False) -> NativeMatrix:
        """The rows of several tensors, stacked to one matrix."""
        weights = self.source.weights
        found = [there for name in names if (there := self.source.find(name)) is not None]
        assert len(found) == len(names)
        packed = [weights.packed(name) for name in found]
        formats = {None if pack is None else pack.format for pack in packed}
        exact = _exact_format(next(iter(formats))) if len(formats) == 1 else None
        matrix_format = self._format(any(packed), exact, is_table)
        sizes = [math.prod(weights.shape(name)[:-1]) for name in found]
        matrix = NativeMatrix(
            matrix_format, sum(sizes), weights.shape(found[0])[-1], self.num_threads
        )
        first = 0
        for name, pack, size in zip(names, packed, sizes, strict=True):
            if pack is None:
                matrix.put_floats(first, self._floats(name).flatten(0, -2))
            elif matrix_format == exact == TABLE:
                self._code(matrix, first, pack)
            elif matrix_format == exact:
                matrix.put_blocks(pack.format, first, pack.blocks())
                pack.release()
            else:
                self._expand(matrix, first, pack)
            first += size
        return matrix

    def _expand(self, matrix: NativeMatrix, first: int, packed: Packed) -> None:
        """Blocks as numbers, a part per thread: all of a vocabulary's would be gigabytes."""
        if self.dtype == "auto":
            say_once(
                f"the CPU's kernels do not hold {packed.format} as it is: its matrices become "
                "8-bit numbers, each at most 1/254 of its group's largest away"
            )
        self._in_parts(
            packed, lambda row, end: matrix.put_floats(first + row, packed.numbers(row, end))
        )

    def _code(self, matrix: NativeMatrix, first: int, packed: Packed) -> None:
        """Blocks of few levels as codes of 4 bits, number for number."""
        matrix.set_levels(*coded_levels(packed.format))

        def put(row: int, end: int) -> None:
            matrix.put_coded(first + row, coded(packed.format, packed.data[row:end]))

        self._in_parts(packed, put)

    def _in_parts(self, packed: Packed, put: Callable[[int, int], None]) -> None:
        """Let threads put parts of the rows, each from its first row to its end."""
        num_out, num_in = packed.shape
        step = max(16, _EXPANDED // num_in // 16 * 16)
        rows = range(0, num_out, step)
        with ThreadPoolExecutor(self.num_threads or num_cores()) as pool:
            list(pool.map(put, rows, [min(row + step, num_out) for row in rows]))
        packed.release()


def _exact_format(block_format: str | None) -> int | None:
    """The matrix format that holds a file's blocks number for number."""
    return TABLE if block_format in CODED else EXACT_FORMAT.get(block_format or "")
