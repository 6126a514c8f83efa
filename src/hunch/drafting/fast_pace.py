"""`Pace` for lookups alone, with its arithmetic in C++: the host must be done before a step is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hunch.drafting import pace, record
from hunch.drafting.pace import Pace, StepShape
from hunch.drafting.record import Array
from hunch.kernels.native_pace import NativePace, is_available


def new_pace(
    num_rows: int,
    shapes: Sequence[StepShape],
    margin: float = 0.0,
    num_levels: int = 0,
    *,
    is_guided: bool = False,
) -> Pace:
    """The faster one where it knows the shapes and can be built."""
    is_choosing = len(shapes) > 1 and not any(shape.source for shape in shapes)
    kind = FastPace if is_choosing and is_available() else Pace
    return kind(num_rows, shapes, margin, num_levels, is_guided=is_guided)


class FastPace(Pace):
    """The same rows, learned from and asked in C++."""

    def __init__(
        self,
        num_rows: int,
        shapes: Sequence[StepShape],
        margin: float = 0.0,
        num_levels: int = 0,
        *,
        is_guided: bool = False,
    ) -> None:
        super().__init__(num_rows, shapes, margin, num_levels, is_guided=is_guided)
        lookup = self.lookup
        self._native = NativePace(
            {
                "first": lookup.first_X,
                "next": lookup.next_X,
                "doubt": lookup.doubt_X,
                "match": self.match_X,
                "before": self.before_X,
                "common": lookup.common,
                "guess": self.guess_XG,
            },
            hope=tuple(lookup.hopes[0].tolist()),
            match_odds=tuple(self.match_21[:, 0].tolist()),
            numbers={
                "rate": lookup.rate,
                "common_rate": record.COMMON_RATE,
                "limit": record.LIMIT,
                "low": record.LOW,
                "high": record.HIGH,
                "floor": record.FLOOR,
                "doubt_fade": record.DOUBT_FADE,
                "slow": pace.SLOW,
            },
        )

    def learn(
        self, row_R: Array, num_R: Array, tokens_RK: Array, guess_RG: Array, matched_R: Array
    ) -> None:
        self._count(row_R)
        self._passed_R = None
        self._native.learn(row_R, num_R, tokens_RK, guess_RG, matched_R)

    def _gains(
        self, row_R: Array, shapes: list[StepShape], left_R: Array | None
    ) -> dict[StepShape, float]:
        some = [shape for shape in shapes if shape.num_nodes]
        left_R = np.ones(len(row_R), dtype=np.int64) if left_R is None else left_R
        is_flowing = self.flow > pace.LEAST_FLOW
        sizes = tuple(shape.num_nodes for shape in some)
        return dict(
            zip(some, self._native.gains(row_R, left_R, sizes, is_flowing=is_flowing), strict=True)
        )
