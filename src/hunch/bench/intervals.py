"""How far a figure can be trusted: bootstrap over prompts, spread over rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
NUM_DRAWS = 1000
SEED = 0  # the same interval every time a report is read


@dataclass(frozen=True, slots=True)
class Interval:
    """A value and where 95% of its bootstrap lies."""

    value: float
    low: float
    high: float

    @property
    def is_above_one(self) -> bool:
        return self.low > 1.0

    @property
    def is_below_one(self) -> bool:
        return self.high < 1.0

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(
    items: Sequence[T], value: Callable[[Sequence[T]], float], num_draws: int = NUM_DRAWS
) -> Interval:
    """A value of items, and the middle 95% of it over draws with replacement."""
    assert items
    chooser = random.Random(SEED)
    draws = sorted(value(chooser.choices(items, k=len(items))) for _ in range(num_draws))
    last = len(draws) - 1
    return Interval(value(items), draws[round(0.025 * last)], draws[round(0.975 * last)])


def ratio_of_sums(
    pairs: Sequence[tuple[float, float]], num_draws: int = NUM_DRAWS
) -> Interval | None:
    """Sum of the first over sum of the second, prompts drawn as pairs; None without pairs."""
    if not pairs or not sum(second for _, second in pairs):
        return None

    def value(some: Sequence[tuple[float, float]]) -> float:
        return sum(first for first, _ in some) / max(sum(second for _, second in some), 1e-12)

    return bootstrap(pairs, value, num_draws)


def spread(values: Sequence[float]) -> float:
    """Half the range of the rounds, as a share of their middle; 0 for one round."""
    if len(values) < 2:
        return 0.0
    middle = sorted(values)[len(values) // 2]
    return (max(values) - min(values)) / 2 / middle if middle else 0.0
