"""Reads rows to a drafter's network on a device, by captured passes, before it drafts for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from hunch.kernels.attention import KVCache
from hunch.step.batch import pack_known
from hunch.step.graphs import PassGraphs
from hunch.step.rows import RowBuffers

SMALL, LARGE = 512, 2048  # tokens of a pass; a large one only where there are as many
PASSES = (16, 32, 64, 128, 256, SMALL, LARGE)  # captured at the start


class Reader:
    """The network's KV catches up with what is known; the drafter's is the last KV group."""

    def __init__(self, model: Any, kv: KVCache, rows: RowBuffers, pool: Any) -> None:
        self.rows = rows
        self.passes = PassGraphs(model, kv, (), rows.table.shape, rows.block_size, pool)

    def preparations(self) -> list[Callable[[], None]]:
        return [partial(self.passes.prepare, size) for size in PASSES]

    def read(self, ids: list[int]) -> None:
        """All that these rows know and the network has not seen."""
        rows = self.rows
        parts: list[tuple[int, int, int]] = []
        left = int((rows.known[ids] - rows.computed[-1, ids]).sum())
        room = LARGE if left >= LARGE else SMALL
        for row in ids:
            start, known = int(rows.computed[-1, row]), int(rows.known[row])
            while start < known:
                stop = min(known, start + room)
                parts.append((row, start, stop))
                room -= stop - start
                left -= stop - start
                start = stop
                if not room:
                    self.passes.forward(pack_known(rows, parts))
                    parts, room = [], LARGE if left >= LARGE else SMALL
            rows.computed[-1, row] = known
        if parts:
            self.passes.forward(pack_known(rows, parts))
