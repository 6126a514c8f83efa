"""GGUF blocks whose levels stand in tables: rows of a table, gathered, and the blocks' scales.

The tables are the gguf package's. Its own functions give the same bits, at a tenth of the speed.

Shape letters: B blocks, S sub-blocks that share a scale, Q indices of a block, W its weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]
Scales = tuple[Floats, Floats]

_DELTA = np.float32(0.125)  # what IQ1's levels are moved by, up or down
_MXFP4, _IQ4 = "MXFP4", "IQ4_NL"  # their 16 levels are tables of their own


@cache
def _table(name: str) -> Floats:
    """The levels of a format: one number for each index, or several."""
    from gguf import quants  # not at the top: most files do not need it, and it takes a while

    quant = getattr(quants, name)
    if name in (_MXFP4, _IQ4):
        return np.array(quant.kvalues, np.float32)
    quant.init_grid()
    grid: Floats = quant.grid.reshape(quant.grid_shape).astype(np.float32)
    if name in ("IQ1_S", "IQ1_M"):
        return np.concatenate((grid + _DELTA, grid - _DELTA))
    return grid


@cache
def _signs() -> Floats:
    """8 factors for every byte: -1 where its bit is set, the lowest first."""
    bits = np.arange(256, dtype=np.uint8)[:, None] >> np.arange(8, dtype=np.uint8) & 1
    return 1 - 2 * bits.astype(np.float32)


@cache
def _even_signs() -> Floats:
    """The same for numbers of 7 bits: the eighth makes the number of minus signs even."""
    number = np.arange(128, dtype=np.uint8)
    odd = np.bitwise_xor.reduce(number[:, None] >> np.arange(7, dtype=np.uint8) & 1, axis=1)
    signs: Floats = _signs()[number | odd << 7]
    return signs


def _gather(table: Floats, index: Array, out_BW: Floats) -> None:
    shape = (*index.shape, *table.shape[1:])
    np.take(table, index, axis=0, out=out_BW.reshape(shape), mode="clip")


def _sign(out_BW: Floats, table: Floats, index: Array) -> None:
    out_8 = out_BW.reshape(*index.shape, 8)
    out_8 *= np.take(table, index, axis=0, mode="clip")


def _odd(count_BS: Array) -> Floats:
    """Scales that count halves from a half on, twice as large."""
    return (2 * count_BS.astype(np.int32) + 1).astype(np.float32)


def half(blocks: Bytes, first: int = 0) -> Floats:
    """The fp16 number at byte `first` of each block, [B, 1]."""
    return _ints(blocks, first, first + 2, np.float16).astype(np.float32)


def _ints(blocks: Bytes, first: int, last: int, dtype: Any) -> Array:
    found: Array = np.ascontiguousarray(blocks[:, first:last]).view(dtype)
    return found


def _fields(some: Array, count: int, width: int) -> Array:
    """`count` fields of `width` bits of every number, the lowest first."""
    shifts = np.arange(0, count * width, width, dtype=some.dtype)
    found: Array = (some[..., None] >> shifts & (1 << width) - 1).reshape(len(some), -1)
    return found


def _nibble_levels(name: str, blocks: Bytes, first: int, out_BW: Floats) -> None:
    """16 bytes hold 32 weights: those of the low nibbles, then those of the high ones."""
    codes = blocks[:, first:].reshape(len(blocks), -1, 1, 16)
    shifts = np.array([0, 4], np.uint8)[:, None]
    _gather(_table(name), (codes >> shifts & 15).reshape(len(blocks), -1), out_BW)


# Each writes the blocks' levels, and returns their d, [B, 1], and how often a sub-block takes it.


def _iq4_nl(blocks: Bytes, out_BW: Floats) -> Scales:  # d:2 q:16
    _nibble_levels(_IQ4, blocks, 2, out_BW)
    d_B1 = half(blocks)
    return d_B1, np.ones_like(d_B1)


def _iq4_xs(blocks: Bytes, out_BW: Floats) -> Scales:  # d:2 high bits:2 low nibbles:4 q:128
    _nibble_levels(_IQ4, blocks, 8, out_BW)
    high_BS = _fields(_ints(blocks, 2, 4, np.uint16), 8, 2)
    count_BS = _fields(blocks[:, 4:8], 2, 4) | high_BS << 4
    return half(blocks), count_BS.astype(np.float32) - 32


def _mxfp4(blocks: Bytes, out_BW: Floats) -> Scales:  # e:1 (half of 2^(e - 127)) q:16
    _nibble_levels(_MXFP4, blocks, 1, out_BW)
    exponent = blocks[:, :1].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x200000) << exponent, (exponent - 1) << 23)
    d_B1 = bits.astype(np.uint32).view(np.float32)
    return d_B1, np.ones_like(d_B1)


def _iq2_xxs(blocks: Bytes, out_BW: Floats) -> Scales:  # d:2 then 8 times q:4 signs and scale:4
    parts = blocks[:, 2:].reshape(len(blocks), 8, 8)
    _gather(_table("IQ2_XXS"), parts[:, :, :4].reshape(len(blocks), -1), out_BW)
    word_BS = np.ascontiguousarray(parts[:, :, 4:]).view(np.uint32)[:, :, 0]
    _sign(out_BW, _even_signs(), _fields(word_BS, 4, 7))
    return half(blocks), _odd(word_BS >> 28)


def _iq3_xxs(blocks: Bytes, out_BW: Floats) -> Scales:  # d:2 q:64 signs and scales:32
    _gather(_table("IQ3_XXS"), blocks[:, 2:66], out_BW)
    word_BS = _ints(blocks, 66, 98, np.uint32)
    _sign(out_BW, _even_signs(), _fields(word_BS, 4, 7))
    return half(blocks), _odd(word_BS >> 28)


def _iq2_xs(blocks: Bytes, out_BW: Floats) -> Scales:  # d:2 q and signs:64 scales:8
    word_BQ = _ints(blocks, 2, 66, np.uint16)
    _gather(_table("IQ2_XS"), word_BQ & 511, out_BW)
    _sign(out_BW, _even_signs(), word_BQ >> 9)
    return half(blocks), _odd(_fields(blocks[:, 66:74], 2, 4))


def _iq2_s(blocks: Bytes, out_BW: Floats) -> Scales:  # d:2 q:32 signs:32 high bits:8 scales:8
    high_BQ = _fields(blocks[:, 66:74], 4, 2).astype(np.uint16)
    _gather(_table("IQ2_S"), blocks[:, 2:34] | high_BQ << 8, out_BW)
    _sign(out_BW, _signs(), blocks[:, 34:66])
    return half(blocks), _odd(_fields(blocks[:, 74:82], 2, 4))


def _iq3_s(blocks: Bytes, out_BW: Floats) -> Scales:  # d:2 q:64 high bits:8 signs:32 scales:4
    high_BQ = _fields(blocks[:, 66:74], 8, 1).astype(np.uint16)
    _gather(_table("IQ3_S"), blocks[:, 2:66] | high_BQ << 8, out_BW)
    _sign(out_BW, _signs(), blocks[:, 74:106])
    return half(blocks), _odd(_fields(blocks[:, 106:110], 2, 4))


def _iq1_s(blocks: Bytes, out_BW: Floats) -> Scales:  # d:2 q:32 high bits, scale and delta:16
    word_BS = _ints(blocks, 34, 50, np.uint16)
    high_BQ = _fields(word_BS, 4, 3) | np.repeat(word_BS >> 15, 4, axis=1) << 3
    _gather(_table("IQ1_S"), blocks[:, 2:34] | high_BQ << 8, out_BW)
    return half(blocks), _odd(word_BS >> 12 & 7)


def _iq1_m(blocks: Bytes, out_BW: Floats) -> Scales:  # q:32 high bits and delta:16 scales and d:8
    high_BQ = _fields(blocks[:, 32:48], 2, 4).astype(np.uint16)
    _gather(_table("IQ1_M"), blocks[:, :32] | high_BQ << 8, out_BW)
    word_B4 = _ints(blocks, 48, 56, np.uint16)
    unit_B4 = word_B4 >> 12 << np.arange(0, 16, 4, dtype=np.uint16)
    unit = np.bitwise_or.reduce(unit_B4, axis=1, keepdims=True).view(np.float16)
    return unit.astype(np.float32), _odd(_fields(word_B4, 4, 3))


FUNCTIONS: dict[str, Callable[[Bytes, Floats], Scales]] = {
    "IQ1_M": _iq1_m, "IQ1_S": _iq1_s, "IQ2_S": _iq2_s, "IQ2_XS": _iq2_xs, "IQ2_XXS": _iq2_xxs,
    "IQ3_S": _iq3_s, "IQ3_XXS": _iq3_xxs, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4,
}  # fmt: skip
# What a scale is taken by, of formats whose scales count halves.
UNITS = {"IQ2_XXS": 0.125, "IQ2_XS": 0.125, "IQ2_S": 0.125, "IQ3_XXS": 0.25}


@cache
def levels(name: str) -> Floats:
    """All levels of a format, upwards."""
    table = _table(_IQ4 if name.startswith("IQ4") else name)
    has_signs = name.startswith(("IQ2", "IQ3"))
    return np.unique(np.concatenate((table, -table)) if has_signs else table)
