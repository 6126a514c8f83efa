"""What captured passes read, on the device: passes of all sizes share it, and one copy fills it.

Columns, tiles and sequences of a pass end where the table of blocks begins, whatever the pass's
size. So they are sent together with the blocks of its first sequences, from pinned memory, and the
host does not wait.

Shape letters: W words of memory, X rows of the engine, B blocks of a table, S sequences of a pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

RING = 4  # pinned buffers in turn, as a copy may wait for the device
STAGED = 1 << 16  # words of the table that they have room for; more are copied from other memory
ALIGNED = 16  # words: kernels read columns that begin at such places faster


def aligned(num_words: int) -> int:
    return -(-num_words // ALIGNED) * ALIGNED


class PassInputs:
    """The memory, and the buffers from which it is filled."""

    def __init__(self, size_XB: tuple[int, int], most: int, device: torch.device) -> None:
        """`most`: words of the columns, tiles and sequences of the largest pass."""
        self._first, self._num_blocks = aligned(most), size_XB[1]
        room = self._first + size_XB[0] * size_XB[1]
        self._flat_W = torch.zeros(room, dtype=torch.int64, device=device)
        self.table_XB = self._flat_W[self._first :].view(size_XB)
        is_cuda, staged = device.type == "cuda", min(room, self._first + STAGED)
        pinned = [torch.zeros(staged, dtype=torch.int64, pin_memory=is_cuda) for _ in range(RING)]
        self._buffers = [(buffer_W, buffer_W.numpy()) for buffer_W in pinned]
        self._sent: list[Any] = [
            torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
            for _ in pinned
        ]
        self._turn = 0

    def before_table(self, num_words: int) -> Tensor:
        """The last words before the table."""
        return self._flat_W[self._first - num_words : self._first]

    def send(
        self, num_words: int, table_SB: np.ndarray, write: Callable[[np.ndarray], None]
    ) -> None:
        """Let `write` fill the words before the table; fill the first blocks of its first rows."""
        num_rows, num_blocks = table_SB.shape
        size = num_words + (num_rows - 1) * self._num_blocks + num_blocks
        is_staged = size <= len(self._buffers[0][1])
        if is_staged:
            self._turn = (self._turn + 1) % RING
            buffer_W, held_W = self._buffers[self._turn]
            if self._sent[self._turn] is not None:
                self._sent[self._turn].synchronize()  # long over, as a rule
        else:
            buffer_W = torch.zeros(size, dtype=torch.int64)
            held_W = buffer_W.numpy()
        write(held_W[:num_words])
        for place, line_B in enumerate(table_SB):
            at = num_words + place * self._num_blocks
            held_W[at : at + num_blocks] = line_B
        first = self._first - num_words
        self._flat_W[first : first + size].copy_(buffer_W[:size], non_blocking=True)
        if is_staged and self._sent[self._turn] is not None:
            self._sent[self._turn].record()
