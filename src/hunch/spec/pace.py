"""How many guesses to check next, on a device whose host learns of each step one step late.

A step checks the same number of nodes for all its rows. Per row, how often the first guess was
right of late; for all rows, how often a further guess was right where the one before it was. Every
guess that can be compared with what the target said teaches, whether it was checked or not.

Shape letters: X rows of the engine, R rows of the step, G guesses, K tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

PRIOR_FIRST, PRIOR_NEXT = 0.4, 0.75
ROW_RATE, NEXT_RATE = 0.15, 0.01

Array = np.ndarray


class Pace:
    """Chooses among `options` (numbers of nodes, 0 among them where none may be best)."""

    def __init__(self, num_rows: int, options: Sequence[int], margin: float = 0.0) -> None:
        self.options, self.margin = tuple(sorted(options)), margin
        num_guesses = max(self.options)
        self.first_X = np.full(num_rows, PRIOR_FIRST)
        self.guess_XG = np.full((num_rows, num_guesses), -1, dtype=np.int64)
        self.next_G = np.full(num_guesses, PRIOR_NEXT)  # of guess g, given those before it
        self.next_G[:1] = 1.0
        self.is_learning = len(self.options) > 1

    def start(self, row: int) -> None:
        """A request came into the row."""
        self.first_X[row] = PRIOR_FIRST
        self.guess_XG[row] = -1

    def learn(self, row_R: Array, num_R: Array, tokens_RK: Array, guess_RG: Array) -> None:
        """Tokens the rows committed, num_R each, and new guesses of what follows (-1: none)."""
        if not self.is_learning:
            return
        most = min(tokens_RK.shape[1], self.guess_XG.shape[1])
        said_RK = np.arange(most) < num_R[:, None]
        is_right_RK = (tokens_RK[:, :most] == self.guess_XG[row_R, :most]) & said_RK
        self.first_X[row_R] += ROW_RATE * (is_right_RK[:, 0] - self.first_X[row_R]) * (num_R > 0)
        if most > 1 and is_right_RK[:, 0].any():
            run_RK = np.logical_and.accumulate(is_right_RK, axis=1)
            asked_K = (run_RK[:, :-1] & said_RK[:, 1:]).sum(0)
            missed_K = asked_K - run_RK[:, 1:].sum(0)
            next_K = self.next_G[1:most]
            next_K += NEXT_RATE * (asked_K * (1 - next_K) - missed_K)
            np.clip(next_K, 0.02, 0.98, out=next_K)
        self.guess_XG[row_R] = guess_RG[:, : self.guess_XG.shape[1]]

    def choose(self, row_R: Array, seconds: Mapping[int, float]) -> int:
        """The number of nodes with the most tokens per second; `seconds` is what steps cost."""
        gain_G = np.cumsum(np.cumprod(self.next_G)) * float(self.first_X[row_R].sum())
        best, best_rate = 0, 0.0
        for num_nodes, cost in sorted(seconds.items()):
            gain = gain_G[num_nodes - 1] if num_nodes else 0.0
            rate = (len(row_R) + gain) / cost
            if rate > best_rate:
                best, best_rate = num_nodes, rate
                if not num_nodes:
                    best_rate *= 1.0 + self.margin
        return best
