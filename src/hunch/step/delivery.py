"""Where steps that fly leave their results: slots on the host, filled by the device in turn.

Device and host count the steps apart from each other. Both count a step with rows, once, and no
other, so the runs that compile and time a graph, which have no rows, leave them in step.

Shape letters: Q slots, W room of a slot, R rows of the step, C columns of a result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

SLOTS = 4  # more than the steps under way at a time: two, the one launched and the one waited for
ALIGNED = 16  # numbers: slots that start so are written in wide pieces


class Delivery:
    """The host's side of `kernels.gpu_transfer.deliver`."""

    def __init__(self, room: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        width = -(-(room + 1) // ALIGNED) * ALIGNED
        self.slots_QW = torch.zeros(SLOTS, width, dtype=torch.int64, pin_memory=is_cuda)
        self._lines_QW = self.slots_QW.numpy()
        # They only say that a step is over: what it took stands in its slot.
        self._done: list[Any] = [torch.cuda.Event() if is_cuda else None for _ in range(SLOTS)]  # type: ignore[no-untyped-call]
        self._num_steps = 0

    def expect(self) -> int:
        """A step was launched; returns the slot it will fill."""
        self._num_steps += 1
        slot = self._num_steps % SLOTS
        if self._done[slot] is not None:
            self._done[slot].record()
        return slot

    def receive(self, slot: int, num_rows: int, num_columns: int) -> tuple[np.ndarray, float]:
        """Wait for the step; what it did, good until the slot's next turn, and its seconds."""
        if self._done[slot] is not None:
            self._done[slot].synchronize()
        line_W = self._lines_QW[slot]
        result_RC = line_W[: num_rows * num_columns].reshape(num_rows, num_columns)
        return result_RC, int(line_W[-1]) / 1e9
