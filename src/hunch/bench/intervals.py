"""How far a figure can be trusted: bootstrap over prompts, spread over rounds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]
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
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], num_draws: int = NUM_DRAWS
) -> Interval | None:
    """The ratio of the sums of two tables (a line per prompt, a column per round).

    A prompt counts with its median over the rounds. Prompts are drawn as pairs and rounds for
    each table, so that a slow round shows in the interval. None without prompts.
    """
    one, two = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if not one.size or not two.size or not two.sum():
        return None

    chooser = np.random.default_rng(SEED)
    rows = chooser.integers(len(one), size=(num_draws, len(one)))
    sums = [_drawn_sums(table, rows, chooser) for table in (one, two)]
    low, high = np.quantile(sums[0] / np.maximum(sums[1], 1e-12), (0.025, 0.975))
    whole = np.median(one, axis=1).sum() / np.median(two, axis=1).sum()
    return Interval(float(whole), float(low), float(high))


def _drawn_sums(table: Array, rows: Array, chooser: np.random.Generator) -> Array:
    """For each draw of rows: the sum of their medians over as many columns, drawn too."""
    num_columns = table.shape[1]
    columns = np.sort(chooser.integers(num_columns, size=(len(rows), num_columns)), axis=1)
    distinct, places = np.unique(columns, axis=0, return_inverse=True)
    medians = np.stack([np.median(table[:, some], axis=1) for some in distinct])
    return np.asarray(medians[places.reshape(-1, 1), rows].sum(axis=1))


def spread(values: Sequence[float]) -> float:
    """Half the range of the rounds, as a share of their middle; 0 for one round."""
    if len(values) < 2:
        return 0.0
    middle = sorted(values)[len(values) // 2]
    return (max(values) - min(values)) / 2 / middle if middle else 0.0
