"""Counts of captured steps by shape, which show what the policy chose."""

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
    late_seconds: float = 0.0  # in which the device waited for the host

    def add(self, num_tokens: int, seconds: float, late_seconds: float) -> None:
        """One more step."""
        self.steps += 1
        self.tokens += num_tokens
        self.seconds += seconds
        self.late_seconds += late_seconds


class StepCounts:
    """Totals since the start."""

    def __init__(self) -> None:
        self.shapes: defaultdict[tuple[int, StepShape], ShapeCounts] = defaultdict(ShapeCounts)
        self.prompt_seconds = 0.0  # of prompts and steps run by the host, beside captured steps
        # How often a draft model caught up on a row, and the seconds that launching it took.
        self.num_read, self.read_seconds = 0, 0.0
        self.num_changes = 0  # steps before which a draft model had to catch up

    def report(self) -> dict[str, Any]:
        """All counts, for JSON; every number is a total."""
        shapes = {
            f"{num_rows} rows, {DraftSource(source).name.lower()} {num_nodes}": asdict(counts)
            for (num_rows, (num_nodes, source)), counts in sorted(self.shapes.items())
        }
        return {**vars(self), "shapes": shapes}
