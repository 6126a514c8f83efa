"""Quantised blocks to numbers: one function per common ggml format, vectorised over blocks; the
others by the gguf package.

Shape letters: B blocks, S sub-blocks of a block, W weights of a (sub-)block.
Each format's comment is its layout in bytes; products are taken in the order ggml takes them, so
the numbers are the same to the last bit. In numpy, not torch: the arrays are small, and waking
torch's other threads for each step takes longer than the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hunch.hub.gguf_file import TYPES

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Floats = np.ndarray[Any, np.dtype[np.float32]]

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK = 1 << 17  # weights turned into numbers at once: the scratch memory stays in the cache


def dequantise(
    block_format: str, rows: Tensor, width: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows of blocks (uint8 [rows, bytes of a row]) as [rows, width] numbers."""
    if block_format in PLAIN:
        return rows.view(PLAIN[block_format]).to(dtype)
    block, block_bytes = FORMATS[block_format]
    out = torch.empty(len(rows), width, dtype=dtype)
    step = max(1, _CHUNK // width)
    for first in range(0, len(rows), step):
        blocks_B = rows[first : first + step].numpy().reshape(-1, block_bytes)
        target = out[first : first + step]
        numbers_BW = np.empty((len(blocks_B), block), np.float32)
        if dtype == torch.float32:
            numbers_BW = target.numpy().reshape(-1, block)
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged file may hold infinities
            if block_format in _FUNCTIONS:
                _FUNCTIONS[block_format](blocks_B, numbers_BW)
            else:
                numbers_BW[...] = _by_gguf(block_format, blocks_B)
        if dtype != torch.float32:
            target.copy_(torch.from_numpy(numbers_BW).view(-1, width))
    return out


def _by_gguf(block_format: str, blocks: Bytes) -> Floats:
    """Formats whose levels are looked up in tables: the gguf package has those."""
    import gguf  # not at the top: most files need it not, and it takes a while

    numbers: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[block_format])
    return numbers


def _half(blocks: Bytes, first: int) -> Floats:
    """The fp16 number at byte `first` of each block, [B, 1]."""
    return np.ascontiguousarray(blocks[:, first : first + 2]).view(np.float16).astype(np.float32)


def _unpack_nibbles(qs: Bytes, out: Any) -> None:
    """Low nibbles to the first half of the last axis, high nibbles to the second."""
    half = qs.shape[-1]
    out[..., :half] = qs & 15
    out[..., half:] = qs >> 4


def _q8_0(blocks: Bytes, out_BW: Floats) -> None:  # d:2 q:32 (int8)
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out_BW)


def _q4_0(blocks: Bytes, out_BW: Floats) -> None:  # d:2 q:16
    _unpack_nibbles(blocks[:, 2:], out_BW)
    out_BW -= 8
    out_BW *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out_BW: Floats) -> None:  # d:2 m:2 q:16
    _unpack_nibbles(blocks[:, 4:], out_BW)
    out_BW *= _half(blocks, 0)
    out_BW += _half(blocks, 2)


def _add_fifth_bits(qh_B4: Bytes, out_BW: Floats) -> None:
    """32 bits per block, bit w for weight w."""
    out_BW += np.unpackbits(qh_B4, axis=1, bitorder="little") << 4


def _q5_0(blocks: Bytes, out_BW: Floats) -> None:  # d:2 high bits:4 q:16
    _unpack_nibbles(blocks[:, 6:], out_BW)
    _add_fifth_bits(blocks[:, 2:6], out_BW)
    out_BW -= 16
    out_BW *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out_BW: Floats) -> None:  # d:2 m:2 high bits:4 q:16
    _unpack_nibbles(blocks[:, 8:], out_BW)
    _add_fifth_bits(blocks[:, 4:8], out_BW)
    out_BW *= _half(blocks, 0)
    out_BW += _half(blocks, 2)


_PAIRS = np.array([0, 2, 4, 6], np.uint8).reshape(4, 1)
_BITS = np.arange(8, dtype=np.uint8).reshape(8, 1)


def _unpack_pairs(qs_B64: Bytes) -> Bytes:
    """2-bit numbers, [B, 256]: 32 bytes hold 4 runs of 32 weights, lowest bits first."""
    return ((qs_B64.reshape(-1, 2, 1, 32) >> _PAIRS) & np.uint8(3)).reshape(-1, 256)


def _q2_k(blocks: Bytes, out_BW: Floats) -> None:  # scales:16 (low: d, high: m) q:64 d:2 m:2
    scales_BS = blocks[:, :16]
    out_BSW = out_BW.reshape(-1, 16, 16)
    out_BSW[...] = _unpack_pairs(blocks[:, 16:80]).reshape(-1, 16, 16)
    out_BSW *= (_half(blocks, 80) * (scales_BS & 15))[:, :, None]
    out_BSW -= (_half(blocks, 82) * (scales_BS >> 4))[:, :, None]


def _q3_k(blocks: Bytes, out_BW: Floats) -> None:  # high bits:32 q:64 scales:12 (6 bits) d:2
    packed = blocks[:, 96:108]
    low_BS = np.concatenate((packed[:, :8] & 15, packed[:, :8] >> 4), axis=1)
    high_BS = ((packed[:, None, 8:] >> _PAIRS) & 3).reshape(-1, 16)
    scales_BS = (low_BS | high_BS << 4).astype(np.float32) - 32
    # A weight whose high bit is *clear* is 4 less; bit i of byte w is for weight 32 i + w.
    high_BW = (((blocks[:, None, :32] >> _BITS) & 1) << 2).reshape(-1, 256)
    out_BW[...] = _unpack_pairs(blocks[:, 32:96]) | high_BW
    out_BW -= 4
    out_BSW = out_BW.reshape(-1, 16, 16)
    out_BSW *= (_half(blocks, 108) * scales_BS)[:, :, None]


def _six_bit_scales(packed_B12: Bytes) -> tuple[Bytes, Bytes]:
    """8 scales and 8 minima of 6 bits each, [B, 8] both: the last four keep their high bits in
    the top two bits of the first eight bytes."""
    first, second, last = packed_B12[:, :4], packed_B12[:, 4:8], packed_B12[:, 8:]
    scales = np.concatenate((first & 63, (last & 15) | (first >> 6 << 4)), axis=1)
    minima = np.concatenate((second & 63, (last >> 4) | (second >> 6 << 4)), axis=1)
    return scales, minima


def _scale_k(blocks: Bytes, out_BSW: Floats) -> None:
    scales_BS, minima_BS = _six_bit_scales(blocks[:, 4:16])
    out_BSW *= (_half(blocks, 0) * scales_BS)[:, :, None]
    out_BSW -= (_half(blocks, 2) * minima_BS)[:, :, None]


def _q4_k(blocks: Bytes, out_BW: Floats) -> None:  # d:2 m:2 scales:12 q:128 (32 low, 32 high, ...)
    _unpack_nibbles(blocks[:, 16:].reshape(-1, 4, 32), out_BW.reshape(-1, 4, 64))
    _scale_k(blocks, out_BW.reshape(-1, 8, 32))


def _q5_k(blocks: Bytes, out_BW: Floats) -> None:  # d:2 m:2 scales:12 high bits:32 q:128
    _unpack_nibbles(blocks[:, 48:].reshape(-1, 4, 32), out_BW.reshape(-1, 4, 64))
    out_BSW = out_BW.reshape(-1, 8, 32)
    # Bit s of byte w is for weight w of sub-block s.
    out_BSW += ((blocks[:, None, 16:48] >> _BITS) & 1) << 4
    _scale_k(blocks, out_BSW)


def _q6_k(blocks: Bytes, out_BW: Floats) -> None:  # low nibbles:128 high bits:64 scales:16 d:2
    # Each half of 128 weights: 64 bytes of nibbles (all low ones first), 32 bytes of bit pairs.
    _unpack_nibbles(blocks[:, :128].reshape(-1, 2, 64), out_BW.reshape(-1, 2, 128))
    out_BW += _unpack_pairs(blocks[:, 128:192]) << 4
    out_BW -= 32
    scales_BS = blocks[:, 192:208].view(np.int8)
    out_BSW = out_BW.reshape(-1, 16, 16)
    out_BSW *= (_half(blocks, 208) * scales_BS)[:, :, None]


FORMATS = {  # name -> (weights per block, bytes per block)
    name: (block, block_bytes) for name, block, block_bytes in TYPES.values() if name not in PLAIN
}
_FUNCTIONS: dict[str, Callable[[Bytes, Floats], None]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
