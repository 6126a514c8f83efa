"""Choices that hold for some steps, and pauses of lookups: choosing costs the host time.

A choice may be made ahead, while the device is busy, for the step that takes it later.
"""

from __future__ import annotations

from hunch.drafting.step_shapes import DraftSource, StepShape

# After TIRED plain steps, the lookups of many rows pause for PAUSE steps: with 64 rows, lookups in
# every step took 1% of the device's time and made the host late.
TIRED, PAUSE = 8, 32
PAUSED = StepShape(0, DraftSource.NOBODY)

Rows = tuple[int, ...]  # what a choice depends on, of the rows of a step


class HeldChoice:
    """The shape that the next steps take, and whether lookups pause."""

    def __init__(self) -> None:
        self._rows: Rows | None = None  # for which it was chosen
        self._shape, self._num_left = PAUSED, 0  # and the steps that may still take it
        self._num_plain = self.num_pause = 0  # plain steps in a row; steps left of a pause

    def clear(self) -> None:
        """The next step is chosen anew."""
        self._rows, self._num_left, self._num_plain, self.num_pause = None, 0, 0, 0

    def of(self, rows: Rows) -> StepShape | None:
        """The shape held for such rows."""
        return self._shape if self._num_left and self._rows == rows else None

    def hold(self, rows: Rows, shape: StepShape, num_steps: int) -> None:
        """This shape was chosen, for `num_steps` steps."""
        self._rows, self._shape, self._num_left = rows, shape, num_steps

    def take(self, shape: StepShape, *, can_pause: bool) -> None:
        """A step takes the shape."""
        if shape == PAUSED:
            self.num_pause -= 1
            return
        self._num_left -= 1
        self._num_plain = 0 if shape.num_nodes else self._num_plain + 1
        if can_pause and self._num_plain >= TIRED:
            self._num_plain, self.num_pause = 0, PAUSE
