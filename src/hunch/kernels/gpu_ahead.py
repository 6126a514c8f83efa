"""Weights of the products to come, asked for while the memory has little else to do.

Between products stand kernels that read next to nothing: norms, rotation, attention of a few rows.
They have some programs more than they need, which ask the memory for the first bytes of the weights
that come next, and end. Nothing is computed from what they bring: no result depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_launch import EARLY, HAS_EARLY_START, cdiv
from hunch.kernels.quant import Weight

UNIT = 1024  # bytes a thread asks for
MAX_ROWS = 64  # above, products have more to do than to read
_UNIT = tl.constexpr(UNIT)


@dataclass(frozen=True, slots=True)
class Ahead:
    """The first bytes of some tensors, in units."""

    parts: tuple[Tensor, ...]
    counts: tuple[int, ...]

    def num_programs(self, num_threads: int) -> int:
        return cdiv(sum(self.counts), num_threads)


def ahead_of(num_rows: int, *wanted: tuple[Weight, int]) -> Ahead | None:
    """The first bytes of each weight, at most as many as given; None for many rows, and where
    kernels cannot start early."""
    if not (HAS_EARLY_START and wanted) or num_rows > MAX_ROWS:
        return None
    parts: list[Tensor] = []
    counts: list[int] = []
    for weight, max_bytes in wanted:
        tensors = [weight] if isinstance(weight, Tensor) else [weight.data_SNW, weight.scale_GN]
        share = min(1.0, max_bytes / weight.nbytes)
        parts += tensors
        counts += [int(tensor.nbytes * share) // UNIT for tensor in tensors]
    return Ahead(tuple(parts), tuple(counts))


@triton.jit
def bring(parts, counts, share, THREADS: tl.constexpr):
    """One program's share."""
    if EARLY:
        unit = share * THREADS + tl.arange(0, THREADS)
        place = unit.to(tl.int64) * 0
        is_in = unit < 0
        for at in tl.static_range(len(parts)):
            is_here = (unit >= 0) & (unit < counts[at])
            own = parts[at].to(tl.int64) + unit.to(tl.int64) * _UNIT
            place = tl.where(is_here, own, place)
            is_in |= is_here
            unit -= counts[at]
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.u32 p, $2, 0; mov.u32 $0, 0;"
            "@p cp.async.bulk.prefetch.L2.global [$1], 1024; }",
            "=r,l,r",
            [place, is_in.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
