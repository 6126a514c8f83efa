"""The host's rows as cells on the device: what changed is scattered there before a step.

Shape letters: X rows of the engine, L longest sequence, S stop ids.
"""

from __future__ import annotations

import numpy as np
import torch

from hunch.kernels.gpu_spec import Cells
from hunch.runner.rows import RowBuffers
from hunch.types import Capacity

MAX_STOPS = 8  # stop ids a row on the device can have
PINNED = 4096  # changes that fit the buffers from which copies need not wait
RING = 4  # buffers in turn: a step reads its own until the one after the next is written


class DeviceRows:
    """Rows change on the host when requests come and go; while they decode, on the device alone."""

    def __init__(self, capacity: Capacity, rows: RowBuffers, device: torch.device) -> None:
        num_rows, room = rows.tokens.shape
        self.rows, self.device = rows, device
        max_nodes = max(capacity.max_nodes, 1)
        self.cells = Cells.create(
            num_rows,
            room,
            rows.table.shape[1],
            max_nodes,
            MAX_STOPS,
            rows.block_size,
            device,
        )
        cells = self.cells
        self._at = {
            name: getattr(cells, name).storage_offset()
            for name in ("known_X", "end_X", "is_done_X", "count_X", "stop_XS", "table_XB")
        }
        self._tokens_at = cells.tokens_XL.storage_offset()
        self._is_stale = np.ones(num_rows, dtype=np.bool_)
        self._num_blocks = [0] * num_rows  # of each row's table, on the device
        is_pinned = device.type == "cuda"
        self._pinned = [
            torch.empty(2 * PINNED, dtype=torch.int64, pin_memory=is_pinned) for _ in range(RING)
        ]
        self._turn = 0

    def touch(self, row: int) -> None:
        """The host changed more of the row than its blocks."""
        self._is_stale[row] = True

    def update(self, rows: list[int]) -> list[int]:
        """Bring these rows up to date on the device; returns those the host had changed."""
        stale = [row for row in rows if self._is_stale[row]]
        places: list[np.ndarray] = []
        values: list[np.ndarray] = []
        num_blocks, on_device = self.rows.num_blocks, self._num_blocks
        for row in rows:
            if self._is_stale[row]:
                self._renew(row, places, values)
            if num_blocks[row] != on_device[row]:
                self._add_blocks(row, places, values)
        if places:
            self._scatter(np.concatenate(places), np.concatenate(values))
        return stale

    def _renew(self, row: int, places: list[np.ndarray], values: list[np.ndarray]) -> None:
        rows, at = self.rows, self._at
        request = rows.requests[row]
        if request is None:  # it ended in a step that the engine has not read yet
            places.append(np.array([at["is_done_X"] + row]))
            values.append(np.ones(1, dtype=np.int64))
            return
        known = int(rows.known[row])
        stops = np.full(MAX_STOPS, -1, dtype=np.int64)
        stops[: len(request.stop_ids)] = list(request.stop_ids)
        names = ("known_X", "end_X", "is_done_X", "count_X")
        places.append(np.array([at[name] + row for name in names]))
        values.append(np.array([known, int(rows.end[row]), 0, 0]))
        places.append(at["stop_XS"] + row * MAX_STOPS + np.arange(MAX_STOPS))
        values.append(stops)
        places.append(self._tokens_at + row * rows.tokens.shape[1] + np.arange(known))
        values.append(rows.tokens[row, :known].copy())
        self._is_stale[row] = False
        self._num_blocks[row] = 0

    def _add_blocks(self, row: int, places: list[np.ndarray], values: list[np.ndarray]) -> None:
        first, last = self._num_blocks[row], self.rows.num_blocks[row]
        places.append(
            self._at["table_XB"] + row * self.rows.table.shape[1] + np.arange(first, last)
        )
        values.append(self.rows.table[row, first:last].copy())
        self._num_blocks[row] = last

    def _scatter(self, places: np.ndarray, values: np.ndarray) -> None:
        count = len(places)
        if count > PINNED:
            changes = torch.from_numpy(np.stack([places, values])).to(self.device)
        else:
            self._turn = (self._turn + 1) % RING
            held = self._pinned[self._turn][: 2 * count].view(2, count)  # in one piece: no waiting
            np.stack([places, values], out=held.numpy())
            changes = held.to(self.device, non_blocking=True)
        self.cells.flat.index_copy_(0, changes[0], changes[1])
