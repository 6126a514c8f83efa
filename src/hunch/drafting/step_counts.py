"""Counts of captured steps, by rows and shape, to see what the policy chose."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from hunch.drafting.step_shapes import DraftSource, StepShape


@dataclass(slots=True)
class ShapeCounts:
    """Counts of the steps of one shape and number of rows."""

    steps: int = 0
    tokens: int = 0  # of all rows; 0 without a drafter
    seconds: float = 0.0  # of the device
    late_seconds: float = 0.0  # that it waited for the host


class StepCounts:
    """Totals since the start."""

    def __init__(self) -> None:
        self._shapes: defaultdict[tuple[int, StepShape], ShapeCounts] = defaultdict(ShapeCounts)
        self.prompt_seconds = 0.0  # of what the host ran beside steps
        self.num_read, self.read_seconds = 0, 0.0  # rows that a network caught up on, and seconds
        self.num_changes = 0  # steps that the host ran to let a network catch up
        self.lost = {"lookup": 0.0, "network": 0.0}  # plain steps that a source lost; < 0: gained

    def step(
        self, num_rows: int, shape: StepShape, num_tokens: int, seconds: float, late: float
    ) -> None:
        counts = self._shapes[num_rows, shape]
        counts.steps += 1
        counts.tokens += num_tokens
        counts.seconds += seconds
        counts.late_seconds += late

    def report(self) -> dict[str, Any]:
        """All counts, for JSON; every number is a total."""
        shapes = {
            f"{num_rows} rows, {DraftSource(source).name.lower()} {num_nodes}": asdict(counts)
            for (num_rows, (num_nodes, source)), counts in sorted(self._shapes.items())
        }
        return {
            "shapes": shapes,
            "prompt_seconds": self.prompt_seconds,
            "num_read": self.num_read,
            "read_seconds": self.read_seconds,
            "num_changes": self.num_changes,
            "lost_steps": dict(self.lost),
        }
