"""Quantised blocks to numbers: by their codes (blocks.py) where a format has that form, by tables
(lookups.py) where its levels stand in one, others of 2 and 3 bits here, the rest by the gguf
package.

Shape letters: B blocks, S sub-blocks of a block, W weights of a (sub-)block.
A format's comment is its layout in bytes; products are taken in the order ggml takes them, so the
numbers are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hunch.hub.gguf_file import TYPES
from hunch.models.weights import lookups
from hunch.models.weights.blocks import codes_of
from hunch.models.weights.lookups import Bytes, Floats, Scales, half

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 21  # weights turned into numbers at once


def dequantise(
    block_format: str, rows: Tensor, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows of blocks (uint8 [rows, bytes of a row]) as [rows, width] numbers."""
    if block_format in PLAIN:
        return rows.view(PLAIN[block_format]).to(dtype)
    out = torch.empty(len(rows), width, dtype=dtype)
    step = max(1, _CHUNK // width)
    for first in range(0, len(rows), step):
        some = rows[first : first + step]
        codes = codes_of(block_format, some)
        out[first : first + step] = (
            _by_blocks(block_format, some).view(-1, width) if codes is None else codes.numbers()
        )
    return out


def _by_blocks(block_format: str, rows: Tensor) -> Tensor:
    """Formats that are never held as they are."""
    block, block_bytes = FORMATS[block_format]
    blocks_B = rows.numpy().reshape(-1, block_bytes)
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged file may hold infinities
        if block_format == "Q2_K":
            numbers_BW = np.empty((len(blocks_B), block), np.float32)
            _q2_k(blocks_B, numbers_BW)
        elif block_format in LEVELLED:
            numbers_BW, d_B1, count_BS = levels_of(block_format, blocks_B)
            scale_BS = d_B1 * (count_BS * np.float32(lookups.UNITS.get(block_format, 1)))
            numbers_BW.reshape(*scale_BS.shape, -1)[...] *= scale_BS[:, :, None]
        else:
            numbers_BW = _by_gguf(block_format, blocks_B)
    return torch.from_numpy(numbers_BW)


def _by_gguf(block_format: str, blocks: Bytes) -> Floats:
    """Formats of three levels."""
    import gguf  # not at the top: most files do not need it, and it takes a while

    numbers: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[block_format])
    return numbers


def levels_of(block_format: str, blocks_B: Bytes) -> tuple[Floats, Floats, Floats]:
    """Weights without their scales, [B, W]; d, [B, 1]; how many times a sub-block takes it."""
    levels_BW = np.empty((len(blocks_B), FORMATS[block_format][0]), np.float32)
    return levels_BW, *LEVELLED[block_format](blocks_B, levels_BW)


_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
_BITS = np.arange(8, dtype=np.uint8).reshape(8, 1)


def _unpack_pairs(qs_B64: Bytes) -> Bytes:
    """2-bit numbers, [B, 256]: 32 bytes hold 4 runs of 32 weights, lowest bits first."""
    return ((qs_B64.reshape(-1, 2, 1, 32) >> _PAIRS) & np.uint8(3)).reshape(-1, 256)


def _q2_k(blocks: Bytes, out_BW: Floats) -> None:  # scales:16 (low: d, high: m) q:64 d:2 m:2
    scales_BS = blocks[:, :16]
    out_BSW = out_BW.reshape(-1, 16, 16)
    out_BSW[...] = _unpack_pairs(blocks[:, 16:80]).reshape(-1, 16, 16)
    out_BSW *= (half(blocks, 80) * (scales_BS & 15))[:, :, None]
    out_BSW -= (half(blocks, 82) * (scales_BS >> 4))[:, :, None]


def _q3_k(blocks: Bytes, out_BW: Floats) -> Scales:  # high bits:32 q:64 scales:12 (6 bits) d:2
    packed = blocks[:, 96:108]
    low_BS = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), axis=1)
    high_BS = ((packed[:, None, 8:] >> _PAIRS) & 3).reshape(-1, 16)
    count_BS = (low_BS | high_BS << 4).astype(np.float32) - 32
    # A weight whose high bit is *clear* is 4 less; bit i of byte w is for weight 32 i + w.
    high_BW = (((blocks[:, None, :32] >> _BITS) & 1) << 2).reshape(-1, 256)
    out_BW[...] = _unpack_pairs(blocks[:, 32:96]) | high_BW
    out_BW -= 4
    return half(blocks, 108), count_BS


FORMATS = {  # name -> (weights per block, bytes per block)
    name: (block, block_bytes) for name, block, block_bytes in TYPES.values() if name not in PLAIN
}
LEVELLED: dict[str, Callable[[Bytes, Floats], Scales]] = {"Q3_K": _q3_k, **lookups.FUNCTIONS}
