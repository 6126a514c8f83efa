"""What the host writes for captured steps: changed rows, grammars' masks, and methods by name.

Host and device hold the rows' state in the same layout, so that a change is a place and a value.

Shape letters: R rows of the step, X rows of the engine, F fixed places of a row, N changes, W room
of a buffer, words of a mask, M rows of logits, E tokens of a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hunch.drafting.base import RowMethod
from hunch.kernels.gpu_transfer import update
from hunch.kernels.step import RowMethods, RowState
from hunch.step.rows import RowBuffers

PINNED = 8192  # changes that fit the pinned buffers, which the device reads directly
RING = 8  # buffers in turn, as a step may still read its own when later ones are written
NUM_LENGTHS = 3  # of the places of `_fixed_places`: those that change when tokens are taken back
MAX_EXPECTED = 16384  # tokens of a prediction that captured steps search


class DeviceRows:
    """The rows' state on the device. While rows decode, the device changes it; else the host."""

    def __init__(self, rows: RowBuffers, width: int, device: torch.device) -> None:
        self.rows, self.device = rows, device
        self.state = rows.state.copy_to(device)
        self._host_state = rows.state.flat.numpy()
        num_rows, self._width = len(rows.known), width
        self._stale = set(range(num_rows))  # rows to be uploaded again, all of each
        self._cut: set[int] = set()  # rows whose last tokens the host took back
        self._num_blocks = [0] * num_rows  # of each row's table, on the device
        self._fixed_XF = _fixed_places(rows.state)
        self._first_token = int(rows.state.tokens_XL.storage_offset())
        self._first_block = int(rows.state.table_XB.storage_offset())
        # A step's rows, and how many nodes each may check and draft, for up to `width` rows.
        self.inputs_3R = torch.empty(3, width, dtype=torch.int64, device=device)
        self._sent = -1, b""  # the inputs that the device holds
        room = 3 * width + 2 * PINNED
        pinned = [
            torch.empty(room, dtype=torch.int64, pin_memory=device.type == "cuda")
            for _ in range(RING)
        ]
        self._buffers = [(buffer_W, buffer_W.numpy()) for buffer_W in pinned]
        self._turn = 0
        self.update(np.empty((3, 0), dtype=np.int64), 0)  # compiles the kernel

    def mark_stale(self, row: int) -> None:
        """The host changed more of the row than its blocks: all of it must be uploaded again."""
        self._stale.add(row)

    def mark_cut(self, row: int) -> None:
        """The host took back the row's last tokens: its length must be uploaded again."""
        self._cut.add(row)

    def is_known(self, row: int) -> bool:
        """Whether the host knows all of the row's tokens, as it changed the row last."""
        return row in self._stale or row in self._cut

    def update(self, inputs_3R: np.ndarray, num_rows: int) -> list[int]:
        """Bring a step's rows up to date on the device; returns those the host had changed.

        inputs_3R: the rows, how many nodes of each are checked at most, and how many are drafted at
        most for the next step. They are padded to `num_rows`.
        """
        rows: list[int] = inputs_3R[0].tolist()
        stale: list[int] = []
        if not self._stale.isdisjoint(rows):
            stale = [row for row in rows if row in self._stale]
        places: list[np.ndarray] = []
        if stale:
            places += self._places(stale)
        if not self._cut.isdisjoint(rows):
            cut = self._cut.intersection(rows)
            places += self._fixed(sorted(cut), NUM_LENGTHS)
            self._cut -= cut
        num_blocks, on_device = self.rows.num_blocks, self._num_blocks
        grown = [row for row in rows if num_blocks[row] != on_device[row]]
        places += map(self._new_blocks, grown)
        inputs = num_rows, inputs_3R.tobytes()
        if places or inputs != self._sent:
            self._send(inputs_3R, num_rows, places)
            self._sent = inputs
        return stale

    def _places(self, stale: list[int]) -> list[np.ndarray]:
        """The places of these rows' state, without their blocks, which count as new."""
        known, room = self.rows.known, self.rows.tokens.shape[1]
        places = self._fixed(stale, self._fixed_XF.shape[1])
        for row in stale:
            self._num_blocks[row] = 0  # the request before may have had more
            if self.rows.requests[row] is not None:
                self._stale.discard(row)
                first = self._first_token + row * room
                places.append(np.arange(first, first + known[row]))
        return places

    def _fixed(self, rows: list[int], count: int) -> list[np.ndarray]:
        """The first `count` fixed places of each row.

        Of a row without a request, only the first, which says that it has ended: the engine may
        not know yet that it did.
        """
        requests, fixed_XF = self.rows.requests, self._fixed_XF
        return [fixed_XF[row, : count if requests[row] is not None else 1] for row in rows]

    def _new_blocks(self, row: int) -> np.ndarray:
        """The places of the row's blocks that the device does not have."""
        have, want = self._num_blocks, self.rows.num_blocks
        first = self._first_block + row * self.rows.table.shape[1]
        place_N = np.arange(first + have[row], first + want[row])
        have[row] = want[row]
        return place_N

    def _send(self, inputs_3R: np.ndarray, num_rows: int, places: list[np.ndarray]) -> None:
        width, num_live, num_changes = self._width, inputs_3R.shape[1], sum(map(len, places))
        size = 3 * width + 2 * num_changes
        if num_changes > PINNED:
            buffer_W = torch.empty(size, dtype=torch.int64)
            held_W = buffer_W.numpy()
        else:
            self._turn = (self._turn + 1) % RING
            buffer_W, held_W = self._buffers[self._turn]
        held_3R = held_W[: 3 * width].reshape(3, width)
        held_3R[:, :num_live] = inputs_3R
        held_3R[:, num_live:num_rows] = -1
        if num_changes:
            place_N, value_N = held_W[3 * width : size].reshape(2, num_changes)
            np.concatenate(places, out=place_N)
            value_N[...] = self._host_state[place_N]
        if num_changes > PINNED:
            buffer_W = buffer_W.to(self.device)
        update(self.state, self.inputs_3R, buffer_W, num_changes)


def _fixed_places(state: RowState) -> np.ndarray:
    """Where each row's state is that has the same size in all rows.

    First whether it ended, its length and the nodes of its draft, then its end and stop ids.
    """
    columns = state.is_done_X, state.known_X, state.num_nodes_X, state.end_X
    tables = [*(column_X[:, None] for column_X in columns), state.stop_XS]
    row_X1 = np.arange(len(state.known_X))[:, None]
    widths = [(int(t.storage_offset()), t.shape[1]) for t in tables]
    return np.hstack([first + row_X1 * width + np.arange(width) for first, width in widths])


class StepMasks:
    """The tokens that may follow each root and node: written by the host, read by `finish`.

    The device reads them in the host's memory: few are used, and copies would take longer. All
    steps share them, so the host writes only after it has received every step that reads them.
    """

    def __init__(self, num_logits: int, vocab_size: int, device: torch.device) -> None:
        size, is_cuda = (num_logits, -(-vocab_size // 32)), device.type == "cuda"
        self._mask_MW = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._is_masked_M = torch.zeros(num_logits, dtype=torch.bool, pin_memory=is_cuda)
        self._words, self._flags = self._mask_MW.numpy(), self._is_masked_M.numpy()

    def of(self, num_logits: int) -> tuple[Tensor, Tensor]:
        """The masks of the first `num_logits` rows of logits, and which of these have one."""
        return self._mask_MW[:num_logits], self._is_masked_M[:num_logits]

    def fill(
        self, num_logits: int, write: Callable[[np.ndarray, np.ndarray], dict[int, int]]
    ) -> dict[int, int]:
        """Let `write` fill in the words of masks, and which rows of logits have one."""
        flags_M = self._flags[:num_logits]
        flags_M[...] = False
        return write(self._words[:num_logits], flags_M)


class NamedMethods:
    """The methods that requests name: written by the host when requests start."""

    def __init__(self, num_rows: int, room: int, device: torch.device) -> None:
        self.tables = RowMethods.create(num_rows, min(room, MAX_EXPECTED), device)
        self._usual_W = self.tables.settings_XW[0].clone()
        self._is_own = [False] * num_rows

    def put(
        self, row: int, method: RowMethod | None, expected: Sequence[int], num_prompt: int
    ) -> None:
        """The row's request names a method (None: it does not), or brings a prediction."""
        settings_XW, expected_XE = self.tables.settings_XW, self.tables.expected_XE
        expected = expected[: expected_XE.shape[1]]
        method = method or RowMethod(name="")
        matches = method.sure_match, method.min_match, method.max_match, method.has_table
        line = (*matches, len(expected), method.is_alone, num_prompt, 0)
        settings_XW[row] = torch.tensor(line, dtype=torch.int64)
        if expected:
            expected_XE[row, : len(expected)] = torch.tensor(expected, dtype=torch.int32)
        self._is_own[row] = True

    def clear(self, row: int) -> None:
        """The row's request names no method."""
        if self._is_own[row]:
            self.tables.settings_XW[row] = self._usual_W
            self._is_own[row] = False
