"""What a target pass costs by packed tokens, measured as it runs, and how many nodes that buys."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import numpy as np

WINDOW = 15  # passes remembered per size
MANY = 48  # nodes above which numpy is quicker
MAX_SINGLE = 16  # sizes up to this are remembered one by one


class CostCurve:
    """Seconds of a pass over n packed tokens; never falls as n grows.

    Passes are remembered by size (each one up to 16, then by eighths of a power of two); a size's
    estimate is the lower quartile of its last passes, since noise only ever adds time. Between
    sizes the curve is a straight line; beyond them it keeps its last slope. Before anything is
    measured, a pass costs one unit and every further token `prior` units.

    Passes take longer the longer the texts are. What the sizes in use gain or lose, the others are
    taken to have gained or lost too: they are estimated at today's level, not at that of the day
    they were last seen.
    """

    def __init__(self, prior: float = 0.05) -> None:
        self.prior = prior
        self._passes: dict[int, deque[float]] = {}
        self._estimates: dict[int, float] = {}
        self._sizes: list[int] = []
        self._seconds: list[float] = []  # non-decreasing, beside _sizes
        self._level = 1.0  # moves with the sizes in use
        self._levels: dict[int, float] = {}  # where it stood at each size's last pass
        self._known: dict[int, float] = {}  # answers given since the curve last changed

    def record(self, num_tokens: int, seconds: float) -> None:
        size = _bucket(num_tokens)
        passes = self._passes.setdefault(size, deque(maxlen=WINDOW))
        aged = self._level / self._levels.get(size, self._level)
        if aged != 1.0:
            passes = self._passes[size] = deque((old * aged for old in passes), maxlen=WINDOW)
            self._estimates[size] *= aged
        is_settled = len(passes) == WINDOW
        passes.append(seconds * size / num_tokens if num_tokens > MAX_SINGLE else seconds)
        estimate, before = sorted(passes)[(len(passes) - 1) // 4], self._estimates.get(size)
        if before is not None and is_settled and size <= MAX_SINGLE:  # a step, not a prompt
            self._level *= estimate / before
        self._estimates[size], self._levels[size] = estimate, self._level
        if estimate != before or aged != 1.0:
            self._redraw()

    def _redraw(self) -> None:
        self._known.clear()
        self._sizes = sorted(self._estimates)
        now = [self._estimates[n] * (self._level / self._levels[n]) for n in self._sizes]
        # The cheapest larger pass bounds every smaller one, so the curve cannot fall.
        self._seconds = list(accumulate(reversed(now), min))[::-1]

    def seconds(self, num_tokens: int) -> float:
        known = self._known.get(num_tokens)
        if known is None:
            known = self._known[num_tokens] = self._read(num_tokens)
        return known

    def _read(self, num_tokens: int) -> float:
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return 1.0 + self.prior * (num_tokens - 1)
        at = bisect_left(sizes, num_tokens)
        if at < len(sizes) and sizes[at] == num_tokens:
            return seconds[at]
        if len(sizes) == 1 or at == 0:
            unit = seconds[0] / (1.0 + self.prior * (sizes[0] - 1))
            return unit * (1.0 + self.prior * (num_tokens - 1))
        at = min(at, len(sizes) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at] + slope * (num_tokens - sizes[at])

    def _each(self, sizes_N: np.ndarray) -> np.ndarray:
        """`seconds` of many sizes at once."""
        if len(self._sizes) < 2 or sizes_N[0] < self._sizes[0]:
            return np.array([self.seconds(int(size)) for size in sizes_N])
        (left, right), (low, high) = self._sizes[-2:], self._seconds[-2:]
        beyond_N = np.maximum(sizes_N - right, 0) * ((high - low) / (right - left))
        return np.asarray(np.interp(sizes_N, self._sizes, self._seconds) + beyond_N)

    def relative(self, num_tokens: int) -> float:
        """In passes over one token."""
        return self.seconds(num_tokens) / self.seconds(1)

    def best_count(self, chances: Sequence[float], num_rows: int = 1, margin: float = 0.0) -> int:
        """How many nodes to check, best first, for the most expected tokens per second.

        `chances` are the nodes' chances to be accepted, falling; `num_rows` rows decide one token
        each in any case. A count above zero must beat plain decoding by the share `margin`.
        """
        best, best_rate = 0, num_rows / self.seconds(num_rows) * (1.0 + margin)
        if len(chances) > MANY:
            seconds = self._each(np.arange(num_rows + 1, num_rows + len(chances) + 1))
            rates = (num_rows + np.cumsum(chances)) / seconds
            best = int(rates.argmax())
            return best + 1 if rates[best] > best_rate else 0
        tokens = float(num_rows)
        for count, chance in enumerate(chances, start=1):
            tokens += chance
            rate = tokens / self.seconds(num_rows + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def best_length(self, acceptance_probs: Sequence[float], base_tokens: int = 1) -> int:
        """The length of a chain whose node i is accepted with this chance, given those before."""
        return self.best_count(list(accumulate(acceptance_probs, mul)), base_tokens)


class FreeCurve(CostCurve):
    """As if any pass cost the same: every guess pays. For checks that want many of them."""

    def record(self, num_tokens: int, seconds: float) -> None:
        pass

    def seconds(self, num_tokens: int) -> float:
        return 1.0


def _bucket(num_tokens: int) -> int:
    if num_tokens <= MAX_SINGLE:
        return num_tokens
    step = 1 << (num_tokens.bit_length() - 4)  # eighths of the power of two below
    return (num_tokens + step // 2) // step * step
