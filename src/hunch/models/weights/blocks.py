"""A GGUF file's quantised blocks as codes and scales, without a number being rounded.

Types of 5 and 6 bits take a byte per code; types not here are expanded when they are loaded.

Shape letters: R rows, B blocks of a row, W weights of a block, G groups of a row, Y bytes of a
block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hunch.hub.gguf_file import TYPES
from hunch.kernels.quant import Codes

_BLOCK_BYTES = {name: size for name, _, size in TYPES.values()}


def codes_of(block_format: str, rows_RY: Tensor) -> Codes | None:
    """Rows of blocks, uint8 [rows, bytes of a row]; None for a type that has no such form."""
    if block_format not in _READERS:
        return None
    return _READERS[block_format](
        rows_RY.contiguous().view(len(rows_RY), -1, _BLOCK_BYTES[block_format])
    )


def _half(blocks_RBY: Tensor, first: int) -> Tensor:
    """The fp16 number at byte `first` of each block, [R, B]."""
    return blocks_RBY[:, :, first : first + 2].contiguous().view(torch.float16)[:, :, 0]


def _parted(some: Tensor, count: int) -> Tensor:
    """The last axis in `count` parts."""
    return some.reshape(*some.shape[:-1], count, -1)


def _nibbles(some: Tensor) -> Tensor:
    """Low nibbles of the last axis, then its high ones."""
    return torch.cat([some & 15, some >> 4], dim=-1)


def _bits(some: Tensor, count: int, width: int) -> Tensor:
    """`count` fields of `width` bits of every byte; a new axis, the last but one, counts them."""
    shifts = torch.arange(0, count * width, width, dtype=torch.uint8, device=some.device)
    return (some[..., None, :] >> shifts[:, None]) & ((1 << width) - 1)


def _signed(code: Tensor, offset: int) -> Tensor:
    """Codes of 8 bits whose offset is taken off."""
    return (code.view(torch.int8) - offset).view(torch.uint8)


def _q4_0(blocks: Tensor) -> Codes:  # d:2 q:16
    code = _nibbles(blocks[:, :, 2:]).flatten(1)
    return Codes(format="int4", code_NK=code, group=32, scale_NG=_half(blocks, 0), offset=8)


def _q4_1(blocks: Tensor) -> Codes:  # d:2 m:2 q:16
    return Codes(
        format="int4",
        code_NK=_nibbles(blocks[:, :, 4:]).flatten(1),
        group=32,
        scale_NG=_half(blocks, 0),
        minimum_NG=_half(blocks, 2),
    )


def _fifth_bits(some_RB4: Tensor) -> Tensor:
    """32 bits per block, bit w for weight w, as 16 or 0."""
    bits = (some_RB4[..., None] >> torch.arange(8, dtype=torch.uint8, device=some_RB4.device)) & 1
    return bits.flatten(2) << 4


def _q5_0(blocks: Tensor) -> Codes:  # d:2 high bits:4 q:16
    code = _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6])
    scale_NG = _half(blocks, 0)
    return Codes(format="int8", code_NK=_signed(code.flatten(1), 16), group=32, scale_NG=scale_NG)


def _q5_1(blocks: Tensor) -> Codes:  # d:2 m:2 high bits:4 q:16
    code = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8])
    return Codes(
        format="int8",
        code_NK=code.flatten(1),
        group=32,
        scale_NG=_half(blocks, 0),
        minimum_NG=_half(blocks, 2),
    )


def _q8_0(blocks: Tensor) -> Codes:  # d:2 q:32 (int8)
    code = blocks[:, :, 2:].flatten(1)
    return Codes(format="int8", code_NK=code, group=32, scale_NG=_half(blocks, 0))


def _with_units(code_format: str, code: Tensor, blocks: Tensor) -> Codes:
    """d:2 m:2, then 8 scales and 8 minima of 6 bits each: the last four have their high bits in
    the top two bits of the first eight bytes."""
    first, second, last = blocks[:, :, 4:8], blocks[:, :, 8:12], blocks[:, :, 12:16]
    scale = torch.cat([first & 63, (last & 15) | (first >> 6 << 4)], dim=2)
    minimum = torch.cat([second & 63, (last >> 4) | (second >> 6 << 4)], dim=2)
    return Codes(
        format=code_format,
        code_NK=code.flatten(1),
        group=32,
        scale_NG=scale.flatten(1),
        minimum_NG=minimum.flatten(1),
        unit_NU=_half(blocks, 0),
        min_unit_NU=_half(blocks, 2),
    )


def _q4_k(blocks: Tensor) -> Codes:  # d:2 m:2 scales:12 q:128 (32 low, 32 high, ...)
    return _with_units("int4", _nibbles(_parted(blocks[:, :, 16:], 4)), blocks)


def _q5_k(blocks: Tensor) -> Codes:  # d:2 m:2 scales:12 high bits:32 q:128
    code = _nibbles(_parted(blocks[:, :, 48:], 4)).flatten(2)
    high = _bits(blocks[:, :, 16:48], 8, 1).flatten(2) << 4
    return _with_units("int8", code | high, blocks)


def _q6_k(blocks: Tensor) -> Codes:  # low nibbles:128 high bits:64 scales:16 d:2
    code = _nibbles(_parted(blocks[:, :, :128], 2)).flatten(2)
    high = _bits(_parted(blocks[:, :, 128:192], 2), 4, 2).flatten(2) << 4
    return Codes(
        format="int8",
        code_NK=_signed((code | high).flatten(1), 32),
        group=16,
        scale_NG=blocks[:, :, 192:208].contiguous().view(torch.int8).flatten(1),
        unit_NU=_half(blocks, 208),
    )


_READERS: dict[str, Callable[[Tensor], Codes]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
