"""GGUF blocks of 16 levels or fewer as codes of 4 bits and a table, number for number.

Shape letters: B blocks of 256 weights, W their weights, S sub-blocks with a scale, Y bytes.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from hunch.models.weights import lookups
from hunch.models.weights.dequant import FORMATS, LEVELLED, levels_of
from hunch.models.weights.lookups import Floats

# Those whose scales are whole multiples of one d for 256 weights.
CODED = frozenset(name for name in LEVELLED if FORMATS[name][0] == 256)


@cache
def _steps(block_format: str) -> tuple[Floats, float]:
    """A coded format's levels as whole numbers, padded to 16, and what one of them is."""
    levels = np.arange(-4, 4) if block_format == "Q3_K" else lookups.levels(block_format)
    step = 0.125 if block_format.startswith("IQ1") else 1.0
    found = np.zeros(16, np.float32)
    found[: len(levels)] = levels / step
    return found, step


def coded_levels(block_format: str) -> tuple[Tensor, float]:
    """The 16 levels, int8, of what `coded` returns, and the unit they are counted in."""
    levels, step = _steps(block_format)
    return torch.from_numpy(levels.astype(np.int8)), step * lookups.UNITS.get(block_format, 1)


def coded(block_format: str, rows: Tensor) -> Tensor:
    """Rows of blocks as d:2 scales:16 (int8) q:128, 32 weights in 16 bytes as Q4_0 has them."""
    blocks_B = rows.numpy().reshape(-1, FORMATS[block_format][1])
    levels_BW, d_B1, count_BS = levels_of(block_format, blocks_B)
    levels, step = _steps(block_format)
    code_of = np.zeros(256, np.uint8)
    code_of[levels.astype(np.int8).view(np.uint8)] = np.arange(16)
    codes = code_of[(levels_BW / step).astype(np.int8).view(np.uint8)].reshape(-1, 8, 2, 16)
    nibbles_BY = (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(len(blocks_B), 128)
    scales_BS = np.repeat(count_BS, 16 // count_BS.shape[1], axis=1).astype(np.int8)
    parts = (d_B1.astype(np.float16).view(np.uint8), scales_BS.view(np.uint8), nibbles_BY)
    return torch.from_numpy(np.concatenate(parts, axis=1)).view(len(rows), -1)
