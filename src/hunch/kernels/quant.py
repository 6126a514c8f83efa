"""Matrices held in few bits: how they are stored, and the numbers they stand for.

A weight is (code - offset) * scale + minimum, computed in float32 and rounded once to the precision
of the products. That rounded matrix is the specification: a product with the codes has the bits of
a product with it. Scales belong to `group` inputs of one output; where a format stores them in few
bits too, they count units, and a unit belongs to UNIT_GROUP inputs.

`Codes` is what a file's format is read into, one byte per code; `Quantised` what stays in memory.
Its words of 16 bits stand in spans of inputs, so that programs of any height read whole lines. A
word has a code of each part of its span (four quarters for 4 bits, two halves for 8), the first
part's in the lowest bits: two words in a register become two numbers by one shift and one mask.
Blocks of 32 words stand in the order of a tensor core's registers (`words`): what a thread
multiplies, it reads in one piece of 16 bytes.

Shape letters: N outputs, K inputs, G groups, U units, S spans, W words of an output's span, P parts
of a span.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hunch.kernels.slices import SPAN, slice_of, split_of
from hunch.kernels.words import num_parts, pack_words, unpack_words

# int4: 0 to 15, int8: -128 to 127; fp4: e2m1, fp8: e4m3; and codes that number a book's entries.
CODE_FORMATS = ("int4", "fp4", "nf4", "fp4_bnb", "int8", "fp8")
UNIT_GROUP = 256
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; 8 to 15 are their negatives
_TWELFTHS = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # as fp4_bnb numbers them
BOOKS = {  # of float32; both are bitsandbytes'
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4_bnb": tuple(sign * value / 12 for sign in (1, -1) for value in _TWELFTHS),
}  # fmt: skip
UNITS_BIAS = 1 << 15  # counts that may be negative are stored plus this
_HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}
_CHUNK = 1 << 22  # weights turned into float32 at once


@dataclass(slots=True, kw_only=True)
class Codes:
    """A matrix as its file means it: one byte per weight, scales by row."""

    format: str  # one of CODE_FORMATS
    code_NK: Tensor  # uint8; the bits of int8 or e4m3 for the 8-bit formats
    group: int  # inputs of a scale
    scale_NG: Tensor  # float, or whole numbers of units
    offset: int = 0  # subtracted from every code
    zero_NG: Tensor | None = None  # whole numbers (int8 for int8): subtracted in its place
    # Added; float, or whole numbers of units to subtract. A code times its scale must then be exact
    # in float32, as it is in every format read: products multiply and add in one rounding.
    minimum_NG: Tensor | None = None
    unit_NU: Tensor | None = None
    min_unit_NU: Tensor | None = None
    order_K: Tensor | None = None  # the input that column k multiplies; None: the k-th

    @property
    def shape(self) -> tuple[int, int]:
        return self.code_NK.shape[0], self.code_NK.shape[1]

    def rows(self, first: int, last: int) -> Codes:
        """Outputs [first, last)."""
        return self.take(slice(first, last))

    def take(self, rows: slice | Tensor) -> Codes:
        """Some outputs, or all in another order."""
        return replace(self, **{n: t[rows] for n, t in self._by_row().items()})

    def columns(self, first: int, last: int) -> Codes | None:
        """Inputs [first, last); None where they are no whole groups, nor a part of the only one."""
        if self.order_K is not None:
            return None
        if self.scale_NG.shape[1] == 1:
            return replace(self, code_NK=self.code_NK[:, first:last], group=last - first)
        flat = self.flat() if first % UNIT_GROUP or last % UNIT_GROUP else self
        if first % flat.group or (last % flat.group and last < self.shape[1]):
            return None
        size = {"code_NK": 1, "unit_NU": UNIT_GROUP, "min_unit_NU": UNIT_GROUP}
        cut = {}
        for name, tensor in flat._by_row().items():
            step = size.get(name, flat.group)
            cut[name] = tensor[:, first // step : -(-last // step)]
        return replace(flat, **cut)

    def flat(self) -> Codes:
        """The same numbers with scales in float32, not in units."""
        if self.unit_NU is None:
            return self
        per = UNIT_GROUP // self.group
        scale_NG = self.scale_NG.float() * _spread(self.unit_NU, per, self.scale_NG.shape[1])
        minimum_NG = None
        if self.minimum_NG is not None:
            assert self.min_unit_NU is not None
            unit_NG = _spread(self.min_unit_NU, per, self.scale_NG.shape[1])
            minimum_NG = -(self.minimum_NG.float() * unit_NG)
        return replace(
            self, scale_NG=scale_NG, minimum_NG=minimum_NG, unit_NU=None, min_unit_NU=None
        )

    def widened(self, group: int) -> Codes:
        """The same numbers with codes of 8 bits, and scales for `group` inputs, in float32."""
        assert self.format in ("int4", "int8")
        flat, zero_NG, code_NK = self.flat(), self.zero_NG, self.code_NK
        if self.offset:
            code_NK = (code_NK.view(torch.int8) - self.offset).view(torch.uint8)
        repeat = self.group // group
        if zero_NG is not None:
            zero_NG = zero_NG.view(torch.int8).repeat_interleave(repeat, 1)
        minimum_NG = flat.minimum_NG
        if minimum_NG is not None:
            minimum_NG = minimum_NG.float().repeat_interleave(repeat, 1)
        return Codes(
            format="int8",
            code_NK=code_NK,
            group=group,
            scale_NG=flat.scale_NG.float().repeat_interleave(repeat, 1),
            zero_NG=zero_NG,
            minimum_NG=minimum_NG,
            order_K=self.order_K,
        )

    def _by_row(self) -> dict[str, Tensor]:
        names = ("code_NK", "scale_NG", "zero_NG", "minimum_NG", "unit_NU", "min_unit_NU")
        found = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def numbers(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix itself, [N, K], its inputs in their own order."""
        out_NK = torch.empty(self.shape, dtype=dtype, device=self.code_NK.device)
        step = max(1, _CHUNK // self.shape[1])
        for first in range(0, len(out_NK), step):
            part = self.rows(first, min(first + step, len(out_NK)))
            out_NK[first : first + step] = part._some_numbers()
        if self.order_K is None:
            return out_NK
        return torch.empty_like(out_NK).index_copy_(1, self.order_K.to(out_NK.device), out_NK)

    def _some_numbers(self) -> Tensor:
        flat, num_in = self.flat(), self.shape[1]
        value_NK = _values(self.format, self.code_NK)
        if self.offset:
            value_NK -= self.offset
        if flat.zero_NG is not None:
            value_NK -= _spread(flat.zero_NG, self.group, num_in)
        value_NK *= _spread(flat.scale_NG, self.group, num_in)
        if flat.minimum_NG is not None:
            value_NK += _spread(flat.minimum_NG, self.group, num_in)
        return value_NK


def _spread(some_NG: Tensor, times: int, size: int) -> Tensor:
    """Every entry for `times` columns, in float32."""
    return some_NG.float().repeat_interleave(times, 1)[:, :size]


def _values(code_format: str, code_NK: Tensor) -> Tensor:
    if code_format == "fp4":
        both = torch.tensor([*FP4, *(-value for value in FP4)], device=code_NK.device)
        return both[code_NK.long()]
    if code_format in BOOKS:
        return torch.tensor(BOOKS[code_format], device=code_NK.device)[code_NK.long()]
    if code_format == "fp8":
        return code_NK.view(torch.float8_e4m3fn).float()
    return (code_NK.view(torch.int8) if code_format == "int8" else code_NK).float()


def join(parts: list[Codes]) -> Codes | None:
    """The rows of several matrices of the same inputs; None where no one form holds them all."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    if not all(_is_same_order(first, part) for part in parts):
        return None
    if any(_form(part) != _form(first) for part in parts):
        if any(part.format not in ("int4", "int8") for part in parts):
            return None
        group = min(part.group for part in parts)
        if any(part.group % group for part in parts):
            return None
        parts = [_with_all(part.widened(group), parts) for part in parts]
    cut = {name: torch.cat([getattr(p, name) for p in parts]) for name in parts[0]._by_row()}
    return replace(parts[0], **cut)


def _form(codes: Codes) -> tuple[object, ...]:
    return (codes.format, codes.group, codes.offset, *codes._by_row())


def _with_all(codes: Codes, others: list[Codes]) -> Codes:
    """Zeros for what only others have."""
    nothing_NG = torch.zeros_like(codes.scale_NG)
    if codes.minimum_NG is None and any(other.minimum_NG is not None for other in others):
        codes = replace(codes, minimum_NG=nothing_NG)
    if codes.zero_NG is None and any(other.zero_NG is not None for other in others):
        codes = replace(codes, zero_NG=nothing_NG.to(torch.int8))
    return codes


def _is_same_order(a: Codes, b: Codes) -> bool:
    if a.order_K is None or b.order_K is None:
        return a.order_K is b.order_K
    return torch.equal(a.order_K, b.order_K)


@dataclass(slots=True, kw_only=True)
class Quantised:
    """A matrix held in few bits, as the products read it. It stands for [N, K] of `dtype`."""

    format: str  # of its codes
    shape: tuple[int, int]
    dtype: torch.dtype
    group: int
    offset: int
    data_SNW: Tensor
    scale_GN: Tensor  # float; or, with `paired`, int32: a scale's 16 bits and another's above
    # Above scales in float16 or bfloat16: offsets ("f16", "bf16") or minima in float16 ("minimum").
    # "units": counts of both, scales plus UNITS_BIAS; units of both are pairs too.
    paired: str = ""
    is_small: bool = False  # scales are paired with their offset and below 1
    has_zero: bool = False  # groups have zero points, wherever they are
    has_minimum: bool = False
    zero_GN: Tensor | None = None
    minimum_GN: Tensor | None = None
    unit_UN: Tensor | None = None
    min_unit_UN: Tensor | None = None
    order_K: Tensor | None = None

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def device(self) -> torch.device:
        return self.data_SNW.device

    @property
    def span(self) -> int:
        """Inputs whose codes stand together."""
        return self.data_SNW.shape[2] * num_parts(self.format)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        names = [name for name in self.__dataclass_fields__ if name[-1].isupper()]
        found = {name: getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def rows(self, ids_C: Tensor) -> Quantised:
        """The matrix of some outputs."""
        ids_C = ids_C.to(self.device)
        cut = {n: t.index_select(1, ids_C) for n, t in self.tensors().items() if n != "order_K"}
        return replace(self, shape=(len(ids_C), self.shape[1]), **cut)

    def codes(self) -> Codes:
        """The codes again, one byte each."""
        scale_GN, zero_GN, minimum_GN = self.scale_GN, self.zero_GN, self.minimum_GN
        unit_UN, min_unit_UN = self.unit_UN, self.min_unit_UN
        if self.paired in _HALVES:
            scale_GN, zero_GN = _parted(scale_GN, _HALVES[self.paired]), scale_GN >> 16
        elif self.paired == "minimum":
            scale_GN, minimum_GN = (_parted(some, torch.float16) for some in _both(scale_GN))
        elif self.paired == "units":
            assert unit_UN is not None
            scale_GN, minimum_GN = (scale_GN & 0xFFFF) - UNITS_BIAS, scale_GN >> 16
            unit_UN, min_unit_UN = (_parted(some, torch.float16) for some in _both(unit_UN))
            if not self.has_minimum:
                minimum_GN = min_unit_UN = None
        return Codes(
            format=self.format,
            code_NK=unpack_words(self.format, self.data_SNW)[:, : self.shape[1]],
            group=self.group,
            offset=0 if self.paired in _HALVES else self.offset,
            scale_NG=scale_GN.T,
            zero_NG=None if zero_GN is None else zero_GN.T,
            minimum_NG=None if minimum_GN is None else minimum_GN.T,
            unit_NU=None if unit_UN is None else unit_UN.T,
            min_unit_NU=None if min_unit_UN is None else min_unit_UN.T,
            order_K=self.order_K,
        )

    def dense(self) -> Tensor:
        """The matrix it stands for: a new tensor, [N, K]."""
        return self.codes().numbers(self.dtype)


Weight = Tensor | Quantised


def slices_of(weight: Weight) -> int:
    """Slices of a product's sum that stay apart."""
    bits = 16 // num_parts(weight.format) if isinstance(weight, Quantised) else 16
    return split_of(weight.shape[0], weight.shape[1], bits)


def pack(codes: Codes, dtype: torch.dtype, device: torch.device | str) -> Quantised:
    """The codes as they stay in memory."""

    def turned(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        # Bytes beside the words would make the compiler multiply in another order of inputs.
        wide = torch.int16 if tensor.dtype in (torch.uint8, torch.int8) else tensor.dtype
        return tensor.to(device, wide).T.contiguous()

    codes = _fitting(codes)
    scale_GN, zero_GN = turned(codes.scale_NG), turned(codes.zero_NG)
    minimum_GN, unit_UN = turned(codes.minimum_NG), turned(codes.unit_NU)
    min_unit_UN = turned(codes.min_unit_NU)
    assert scale_GN is not None
    paired, is_small = "", False
    if unit_UN is not None:
        if unit_UN.dtype == torch.float16 and zero_GN is None:
            paired = "units"
            scale_GN = _joined(scale_GN.int() + UNITS_BIAS, minimum_GN)
            unit_UN = _joined(unit_UN.view(torch.int16), _bits(min_unit_UN))
            minimum_GN = min_unit_UN = None
    elif minimum_GN is not None:
        if scale_GN.dtype == minimum_GN.dtype == torch.float16 and zero_GN is None:
            paired = "minimum"
            scale_GN, minimum_GN = _joined(_bits(scale_GN), _bits(minimum_GN)), None
    elif scale_GN.dtype in _HALVES.values():
        paired = "f16" if scale_GN.dtype == torch.float16 else "bf16"
        is_small = bool((scale_GN.abs() < 1).all())
        offset_GN = torch.full_like(scale_GN, codes.offset) if zero_GN is None else zero_GN
        scale_GN, zero_GN = _joined(_bits(scale_GN), offset_GN), None
    return Quantised(
        format=codes.format,
        shape=codes.shape,
        dtype=dtype,
        group=codes.group,
        offset=codes.offset,
        data_SNW=pack_words(codes.format, codes.code_NK.to(device), _num_words(codes)),
        scale_GN=scale_GN,
        paired=paired,
        is_small=is_small,
        has_zero=codes.zero_NG is not None,
        zero_GN=zero_GN,
        has_minimum=codes.minimum_NG is not None,
        minimum_GN=minimum_GN,
        unit_UN=unit_UN,
        min_unit_UN=min_unit_UN,
        order_K=None if codes.order_K is None else codes.order_K.to(device),
    )


def _bits(some: Tensor | None) -> Tensor | None:
    return None if some is None else some.view(torch.int16)


def _joined(low: Tensor | None, high: Tensor | None) -> Tensor:
    """Two of 16 bits in one word, which is the least that is read ahead; no high one is zero."""
    assert low is not None
    word = low.int() & 0xFFFF
    return word if high is None else word | (high.int() << 16)


def _both(pair: Tensor) -> tuple[Tensor, Tensor]:
    return pair, pair >> 16


def _parted(pair: Tensor, dtype: torch.dtype) -> Tensor:
    """The low 16 bits."""
    return pair.to(torch.int16).view(dtype)


def can_pack(codes: Codes) -> bool:
    """Whether a span's part has one scale: groups of 16 or more, a power of two, or one in all."""
    is_power = codes.group & (codes.group - 1) == 0
    return codes.scale_NG.shape[1] == 1 or (codes.group >= 16 and is_power)


def _fitting(codes: Codes) -> Codes:
    """One group for a whole row counts as large as its padding."""
    if codes.scale_NG.shape[1] > 1 or codes.unit_NU is not None:
        return codes
    size = 1 << max(codes.shape[1] - 1, 15).bit_length()
    return replace(codes, group=max(size, SPAN))


def _num_words(codes: Codes) -> int:
    """Words of a span: all codes of a part share one scale, and no span lies in two slices of a
    product's sum."""
    num_out, num_in = codes.shape
    parts = num_parts(codes.format)
    slice_k = slice_of(num_in, split_of(num_out, num_in, 16 // parts))
    longest = SPAN if slice_k % SPAN == 0 else SPAN // 2
    return int(min(codes.group, longest // parts))
