"""The host's rows as state on the device: what changed is written there before a step.

Shape letters: R rows of the step, X rows of the engine, L longest sequence, S stop ids, W room of
a buffer.
"""

from __future__ import annotations

import numpy as np
import torch

from hunch.kernels.gpu_transfer import update
from hunch.kernels.step import RowState
from hunch.step.rows import RowBuffers
from hunch.types import Capacity

MAX_STOPS = 64  # stop ids a row on the device can have
PINNED = 4096  # changes that fit the buffers which the device reads where they lie
RING = 4  # buffers in turn: a step reads its own until the one after the next is written


class DeviceRows:
    """Rows change on the host when requests come and go; while they decode, on the device alone."""

    def __init__(
        self, capacity: Capacity, rows: RowBuffers, width: int, device: torch.device
    ) -> None:
        num_rows, room = rows.tokens.shape
        self.rows, self.device = rows, device
        max_nodes = max(capacity.max_nodes, 1)
        self.state = RowState.create(
            num_rows,
            room,
            rows.table.shape[1],
            max_nodes,
            MAX_STOPS,
            rows.block_size,
            device,
        )
        state = self.state
        self._at = {
            name: getattr(state, name).storage_offset()
            for name in ("known_X", "end_X", "is_done_X", "count_X", "stop_XS", "table_XB")
        }
        self._tokens_at = state.tokens_XL.storage_offset()
        self._stale = set(range(num_rows))
        self._num_blocks = [0] * num_rows  # of each row's table, on the device
        # What a step's rows are and may do, for up to `width` of them.
        self.inputs_3R = torch.empty(3, width, dtype=torch.int64, device=device)
        self._sent: tuple[object, ...] = ()  # the inputs that the device holds
        room = 3 * width + 2 * PINNED
        self._buffers = [
            torch.empty(room, dtype=torch.int64, pin_memory=device.type == "cuda")
            for _ in range(RING)
        ]
        self._turn = 0
        self.update([], [], [], 0)  # so that the kernel is there when it is needed

    def touch(self, row: int) -> None:
        """The host changed more of the row than its blocks."""
        self._stale.add(row)

    def is_stale(self, row: int) -> bool:
        """Whether the host has changed it since its last captured step, or it had none."""
        return row in self._stale

    def update(
        self, rows: list[int], allowed: list[int], room: list[int], num_rows: int
    ) -> list[int]:
        """Bring a step's rows up to date on the device; returns those the host had changed.

        `allowed` nodes may be checked of each row and `room` drafted; padded to `num_rows`.
        """
        stale: list[int] = []
        if not self._stale.isdisjoint(rows):
            stale = [row for row in rows if row in self._stale]
        places: list[np.ndarray] = []
        values: list[np.ndarray] = []
        if stale:
            self._renew(stale, places, values)
        num_blocks, on_device = self.rows.num_blocks, self._num_blocks
        grown = [row for row in rows if num_blocks[row] != on_device[row]]
        if grown:
            self._add_blocks(grown, places, values)
        inputs = num_rows, rows, allowed, room
        if places or inputs != self._sent:
            self._send(inputs, places, values)
        return stale

    def _renew(self, stale: list[int], places: list[np.ndarray], values: list[np.ndarray]) -> None:
        rows, at = self.rows, self._at
        requests = {row: rows.requests[row] for row in stale}
        # Those without a request ended in a step that the engine has not read yet.
        over = [row for row, request in requests.items() if request is None]
        here = {row: request for row, request in requests.items() if request is not None}
        places.append(at["is_done_X"] + np.array(over, dtype=np.int64))
        values.append(np.ones(len(over), dtype=np.int64))
        ids_R = np.array(list(here), dtype=np.int64)
        known_R, none_R = rows.known[ids_R], np.zeros(len(ids_R), dtype=np.int64)
        places += [at[name] + ids_R for name in ("known_X", "end_X", "is_done_X", "count_X")]
        values += [known_R, rows.end[ids_R], none_R, none_R]
        stops_RS = np.full((len(here), MAX_STOPS), -1, dtype=np.int64)
        for stops_S, request in zip(stops_RS, here.values(), strict=True):
            stops_S[: len(request.stop_ids)] = list(request.stop_ids)
        places.append((at["stop_XS"] + ids_R[:, None] * MAX_STOPS + np.arange(MAX_STOPS)).ravel())
        values.append(stops_RS.ravel())
        row_N, place_N = _spans(ids_R, none_R, known_R)
        places.append(self._tokens_at + row_N * rows.tokens.shape[1] + place_N)
        values.append(rows.tokens[row_N, place_N])
        self._stale.difference_update(here)
        for row in stale:  # whoever sat there before may have had more
            self._num_blocks[row] = 0

    def _add_blocks(
        self, grown: list[int], places: list[np.ndarray], values: list[np.ndarray]
    ) -> None:
        have, want, table = self._num_blocks, self.rows.num_blocks, self.rows.table
        have_R, want_R = (np.array([counts[row] for row in grown]) for counts in (have, want))
        row_N, place_N = _spans(np.array(grown), have_R, want_R)
        places.append(self._at["table_XB"] + row_N * table.shape[1] + place_N)
        values.append(table[row_N, place_N])
        for row in grown:
            have[row] = want[row]

    def _send(
        self,
        inputs: tuple[int, list[int], list[int], list[int]],
        places: list[np.ndarray],
        values: list[np.ndarray],
    ) -> None:
        num_rows, *lines = inputs
        num_inputs, num_changes = self.inputs_3R.numel(), sum(map(len, places))
        size = num_inputs + 2 * num_changes
        if num_changes > PINNED:
            buffer_W = torch.empty(size, dtype=torch.int64)
        else:
            self._turn = (self._turn + 1) % RING
            buffer_W = self._buffers[self._turn][:size]
        held_W = buffer_W.numpy()
        inputs_3R = held_W[:num_inputs].reshape(self.inputs_3R.shape)
        inputs_3R[:, : len(lines[0])] = lines
        inputs_3R[:, len(lines[0]) : num_rows] = -1
        if num_changes:
            np.concatenate(places + values, out=held_W[num_inputs:])
        if num_changes > PINNED:
            buffer_W = buffer_W.to(self.device)
        update(self.state, self.inputs_3R, buffer_W, num_changes)
        self._sent = inputs


def _spans(ids_R: np.ndarray, first_R: np.ndarray, end_R: np.ndarray) -> tuple[np.ndarray, ...]:
    """Every place of each row from its first to before its end, beside the row's id."""
    num_R = end_R - first_R
    past_R = np.cumsum(num_R)
    place_N = np.arange(num_R.sum()) + np.repeat(first_R - (past_R - num_R), num_R)
    return np.repeat(ids_R, num_R), place_N
