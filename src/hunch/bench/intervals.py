"""How far a figure can be trusted: bootstrap over prompts, spread over rounds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Array = NDArray[Any]
NUM_DRAWS = 1000
SEED = 0  # so that a report has the same interval each time it is read
# 97.5% of Student's t is below these, from 1 degree of freedom on; of a normal variable, below Z.
STUDENT = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
Z = 1.96


@dataclass(frozen=True, slots=True)
class Interval:
    """A value, and the interval that holds 95% of its bootstrap."""

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


def bootstrap(items: Sequence[T], value: Callable[[Sequence[T]], float]) -> Interval:
    """A function of items, and the middle 95% of its values over draws with replacement."""
    assert items
    chooser = random.Random(SEED)
    draws = sorted(value(chooser.choices(items, k=len(items))) for _ in range(NUM_DRAWS))
    last = len(draws) - 1
    return Interval(value(items), draws[round(0.025 * last)], draws[round(0.975 * last)])


def ratio_of_sums(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> Interval | None:
    """The ratio of the sums of two tables (a line per prompt, a column per round).

    A prompt counts with its median over the rounds. Prompts are drawn as pairs and rounds for
    each table, so that a slow round shows in the interval. None without prompts.
    """
    one, two = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    if not one.size or not two.size or not two.sum():
        return None

    chooser = np.random.default_rng(SEED)
    rows = chooser.integers(len(one), size=(NUM_DRAWS, len(one)))
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


def mean_ratio(pairs: Sequence[tuple[float, float]], num_draws: int = NUM_DRAWS) -> Interval | None:
    """The mean ratio (of logarithms) of pairs that were measured together, say in one round.

    Pairs are drawn with replacement. As the draws of few pairs differ too little, the interval is
    widened to the one that Student's t has for as many (one pair: it is open). None without pairs.
    """
    if not pairs or min(map(min, pairs)) <= 0.0:
        return None
    logs = np.log([one / two for one, two in pairs])
    count, middle = len(logs), float(logs.mean())
    if count == 1:
        return Interval(math.exp(middle), 0.0, math.inf)
    chosen = np.random.default_rng(SEED).integers(count, size=(num_draws, count))
    student = STUDENT[count - 2] if count - 2 < len(STUDENT) else Z + 2.65 / (count - 1)
    wider = student / Z * math.sqrt(count / (count - 1))
    low, high = np.quantile(logs[chosen].mean(axis=1), (0.025, 0.975))
    bounds = (math.exp(middle + wider * (float(one) - middle)) for one in (low, high))
    return Interval(math.exp(middle), *bounds)


def spread(values: Sequence[float]) -> float:
    """Half the range of the rounds, as a share of their middle; 0 for one round."""
    if len(values) < 2:
        return 0.0
    middle = sorted(values)[len(values) // 2]
    return (max(values) - min(values)) / 2 / middle if middle else 0.0
