"""Where a network's tensors come from: a file, or nowhere, for shapes alone.

A network asks its source for each tensor by name and shape, so that one construction serves
loading, checking a file before it is read, and tests, whose sources make up tensors.
Shape letters: K inputs, N outputs, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hunch.errors import ModelFormatError
from hunch.kernels.quant import Codes, Weight, can_pack, join, pack
from hunch.kernels.quantise import quantise
from hunch.layers.linear import Linear, RowLinear
from hunch.layers.norm import LayerNorm, RMSNorm
from hunch.models.staging import to_device
from hunch.models.weights.base import Weights, part_of
from hunch.parallel.group import SINGLE, Group, Share, span

Shape = tuple[int, ...]
AnyLinear = TypeVar("AnyLinear", bound=Linear)

EXPAND, KEEP = "expand", "keep"  # how matrices are held: as numbers, as the file has them
HOLDS = (EXPAND, KEEP, "int4", "int8", "fp8")  # or rounded when they are loaded
Asked = tuple[str, tuple[int, int], Share | None]  # a matrix: its name, shape, this rank's part
_TABLE_HOLD = {"int4": "int8"}  # the output matrix suffers most in 4 bits


class Source:
    """Base: how tensors become layers. A subclass says how one tensor is read."""

    def __init__(
        self, dtype: torch.dtype, device: torch.device | str = "cpu", group: Group = SINGLE
    ) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.group = group
        self.hold = EXPAND

    def codes(self, name: str, shape: Shape) -> Codes | None:
        """The whole matrix in few bits, if the file holds it so."""
        return None

    def read(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """The whole tensor in any place; `dtype` is what a file's numbers are converted to."""
        raise NotImplementedError

    def read_part(self, name: str, shape: Shape, dim: int, part: Share) -> Tensor:
        """The rows or columns of a part; only these are read, if the file allows it."""
        return self.read(name, shape).narrow(dim, part[0], part[1] - part[0])

    def take(
        self, name: str, *shape: int, split: int | None = None, part: Share | None = None
    ) -> Tensor:
        """This rank's part of a tensor (all of it without `split`), on the device that uses it."""
        if split is None or self.group.size == 1:
            tensor = self.read(name, shape)
        else:
            part = part or span(shape[split], self.group)
            tensor = self.read_part(name, shape, split, part)
        return to_device(tensor, self.device, self.dtype)

    def floats(self, name: str, *shape: int) -> Tensor:
        """The whole tensor in float32, whatever the model's precision."""
        return self.read(name, shape, torch.float32).to(self.device, torch.float32)

    def rms_norm(self, name: str, width: int, eps: float, *, is_whole: bool = False) -> RMSNorm:
        """`is_whole`: in float32, as 1 + w must not be rounded to fewer bits than w was."""
        read = self.floats if is_whole else self.take
        return RMSNorm(read(f"{name}.weight", width), eps)

    def layer_norm(self, name: str, width: int, eps: float, *, has_bias: bool = True) -> LayerNorm:
        bias_D = self.take(f"{name}.bias", width) if has_bias else None
        return LayerNorm(self.take(f"{name}.weight", width), bias_D, eps)

    def linear(
        self,
        names: tuple[str, ...],
        sizes: tuple[int, ...],
        num_in: int,
        *,
        has_bias: bool = False,
        is_split: bool = True,
        parts: Sequence[Share | None] | None = None,
    ) -> Linear:
        """One layer for several matrices of the same input; each rank has a part of every one.

        `parts`: which rows of each, if shares are not equal.
        """
        split = 0 if is_split else None
        matrices = list(zip(names, sizes, parts or [None] * len(names), strict=True))
        biases = [
            self.take(f"{n}.bias", s, split=split, part=p) for n, s, p in matrices if has_bias
        ]
        weight = self.matrix([(f"{n}.weight", (s, num_in), p) for n, s, p in matrices], split)
        return self.kept(Linear(weight, _join(biases) if biases else None))

    def row_linear(
        self, name: str, num_out: int, num_in: int, *, has_bias: bool, part: Share | None = None
    ) -> RowLinear:
        """A layer whose inputs are split over the group."""
        weight = self.matrix([(f"{name}.weight", (num_out, num_in), part)], 1)
        bias_N = self.take(f"{name}.bias", num_out) if has_bias else None
        return self.kept(RowLinear(weight, bias_N, self.group))

    def kept(self, layer: AnyLinear) -> AnyLinear:
        """The layer in the form in which this source's network keeps layers."""
        return layer

    def head(self, name: str, vocab_size: int, width: int, *, has_bias: bool = False) -> Linear:
        """The output matrix, each rank with a part of the vocabulary."""
        weight = self.matrix([(name, (vocab_size, width), None)], 0, is_table=True)
        bias_V = self.take(bias_of(name), vocab_size, split=0) if has_bias else None
        return Linear(weight, bias_V)

    def tied_head(self, name: str, table_VD: Tensor) -> Linear:
        """The embedding as the output matrix, too. In few bits it is a second, smaller copy."""
        if self.hold == EXPAND:
            return Linear(table_VD)
        shape = (table_VD.shape[0], table_VD.shape[1])
        held = self._held([(name, shape, None)], None, is_table=True)
        return Linear(table_VD if held is None else held)

    def matrix(self, some: list[Asked], split: int | None, is_table: bool = False) -> Weight:
        """This rank's rows (or columns) of several matrices, one after the other, as they are
        held."""
        held = self._held(some, split, is_table)
        return self._numbers(some, split) if held is None else held

    def _numbers(self, some: list[Asked], split: int | None) -> Tensor:
        return _join(
            [self.take(name, *shape, split=split, part=part) for name, shape, part in some]
        )

    def _held(self, some: list[Asked], split: int | None, is_table: bool) -> Weight | None:
        """The matrix in few bits; None where it is to be numbers."""
        hold = _TABLE_HOLD.get(self.hold, self.hold) if is_table else self.hold
        if hold == EXPAND:
            return None
        codes = self._joined_codes(some, split)
        if codes is not None and hold in (KEEP, codes.format):
            return pack(codes, self.dtype, self.device)
        if hold == KEEP:
            return None
        rounded = [
            quantise(self.take(name, *shape, split=split, part=part), hold)
            for name, shape, part in some
        ]
        joined = join(rounded)
        assert joined is not None, "matrices of the same inputs are rounded alike"
        return pack(joined, self.dtype, self.device)

    def _joined_codes(self, some: list[Asked], split: int | None) -> Codes | None:
        found = []
        for name, shape, part in some:
            codes = self.codes(name, shape)
            if codes is not None and split is not None and self.group.size > 1:
                first, last = part or span(shape[split], self.group)
                codes = codes.columns(first, last) if split else codes.rows(first, last)
            if codes is None:
                return None  # all of a layer's matrices, or none of them
            found.append(codes)
        joined = join(found)
        return joined if joined is not None and can_pack(joined) else None


def bias_of(weight: str) -> str:
    """The name of the bias beside a matrix."""
    return f"{weight.removesuffix('.weight')}.bias"


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)


class FileSource(Source):
    """Tensors of a file, under Hugging Face's names with or without their `model.` in front."""

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        group: Group = SINGLE,
        hold: str = EXPAND,
    ) -> None:
        super().__init__(dtype, device, group)
        assert hold in HOLDS
        self.weights, self.hold = weights, hold
        self._names = set(weights.names())
        self.expanded: set[str] = set()  # types of matrices that no kernel multiplies with

    def find(self, name: str) -> str | None:
        """The file's name for a tensor; None: it does not have it."""
        for candidate in (name, name.removeprefix("model.")):
            if candidate in self._names:
                return candidate
        return None

    def read(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        return self.weights.tensor(self._checked(name, shape), dtype or self.dtype)

    def read_part(self, name: str, shape: Shape, dim: int, part: Share) -> Tensor:
        return part_of(self.weights, self._checked(name, shape), dim, part, self.dtype)

    def codes(self, name: str, shape: Shape) -> Codes | None:
        packed = self.weights.packed(self._checked(name, shape))
        if packed is None:
            return None
        codes = packed.codes(self.device)
        if codes is None:
            self.expanded.add(packed.format)
        return codes

    def _checked(self, name: str, shape: Shape) -> str:
        found = self.find(name)
        if found is None:
            raise ModelFormatError(f"the model's files lack the tensor {name}")
        if tuple(self.weights.shape(found)) != shape:
            raise ModelFormatError(
                f"tensor {found} has shape {tuple(self.weights.shape(found))}, expected {shape}"
            )
        return found


class ShapeSource(Source):
    """Remembers what was asked for and reads nothing.

    Its tensors are empty ones on the CPU: the first operation on a meta tensor makes torch import
    its symbolic mathematics, which takes seconds.
    """

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self.shapes: dict[str, Shape] = {}

    def take(
        self, name: str, *shape: int, split: int | None = None, part: Share | None = None
    ) -> Tensor:
        self.shapes[name] = shape
        return torch.empty(0)

    def floats(self, name: str, *shape: int) -> Tensor:
        return self.take(name, *shape)
