"""What the target's part of a step that flies costs: timed at its capture, followed as it flies."""

from __future__ import annotations

from math import exp, log

from hunch.drafting.cost import CostCurve
from hunch.drafting.pace import StepShape

COMMON, OWN = 0.1, 0.1  # shares of a surprise that all sizes take in, and the size itself
FADE = 0.001  # by which a size that does not fly is thought less different with each step
MOST = 0.3  # of a surprise, as a logarithm: a pause is no cost


class StepCosts:
    """Seconds by rows and shape.

    A capture is timed over short texts, flights see longer ones. What the sizes in use take more
    than when they were captured, the others are taken to take more too: only so can they be
    compared. What a size takes apart from that is learned while it flies. A size whose capture was
    disturbed would never fly, and so never be corrected: none is thought dearer than the line
    between the next smaller and the next larger one. Sizes that were not captured are read off a
    curve by packed tokens.
    """

    def __init__(self) -> None:
        self.curve = CostCurve()
        self._captured: dict[tuple[int, StepShape], float] = {}
        self._common: float | None = None  # log of a flight's seconds over its capture's
        self._own: dict[tuple[int, StepShape], float] = {}

    def capture(self, num_rows: int, shape: StepShape, seconds: float) -> None:
        if seconds > 0.0 and (num_rows, shape) not in self._captured:
            self._captured[num_rows, shape] = seconds
            self.curve.record(num_rows * (1 + shape.num_nodes), seconds)
            self._straighten(num_rows, shape.source)

    def _straighten(self, num_rows: int, source: int) -> None:
        captured = self._captured
        shapes = sorted(
            shape for rows, shape in captured if rows == num_rows and shape.source == source
        )
        for low, shape, high in zip(shapes, shapes[1:], shapes[2:], strict=False):
            least, most = captured[num_rows, low], captured[num_rows, high]
            share = (shape.num_nodes - low.num_nodes) / (high.num_nodes - low.num_nodes)
            line = least + share * (most - least)
            captured[num_rows, shape] = min(captured[num_rows, shape], line)

    def record(self, num_rows: int, shape: StepShape, seconds: float) -> None:
        """A step flew."""
        key = num_rows, shape
        self.curve.record(num_rows * (1 + shape.num_nodes), seconds)
        if key not in self._captured:
            return
        ratio = log(seconds / self._captured[key])
        if self._common is None:
            self._common = ratio
        own = self._own.get(key, 0.0)
        surprise = min(ratio - self._common - own, MOST)
        self._common += COMMON * surprise
        for other in self._own:
            self._own[other] *= 1.0 - FADE
        self._own[key] = own + OWN * surprise

    def seconds(self, num_rows: int, shape: StepShape) -> float:
        key = num_rows, shape
        if key not in self._captured:
            return self.curve.seconds(num_rows * (1 + shape.num_nodes))
        return self._captured[key] * exp((self._common or 0.0) + self._own.get(key, 0.0))
