"""How often guesses were right of late: per row the first one, for all rows every further one.

Shape letters: X rows of the engine, R rows of the step, G guesses, K tokens of a step.
"""

from __future__ import annotations

import numpy as np

ROW_RATE, NEXT_RATE = 0.15, 0.01
PRIOR_RATE = 0.01  # by which what new requests begin with follows what the others had
FADE = 0.003  # by which a row that was not drafted for comes back to what was hoped at first

Array = np.ndarray


class Record:
    """The chance of a row's first guess, and of guess g where those before it were right."""

    def __init__(
        self, num_rows: int, first: float, next_G: Array, *, is_shared: bool = False
    ) -> None:
        self.hope = self.prior = first
        self.is_shared = is_shared  # new requests begin with what others had of late
        self.first_X = np.full(num_rows, first)
        self.next_G = next_G.copy()
        self.next_G[:1] = 1.0

    def start(self, row: int) -> None:
        """A request came into the row."""
        self.first_X[row] = self.prior

    def learn(self, row_R: Array, is_right_RK: Array, said_RK: Array) -> None:
        """Which of the rows' first K guesses were right, among those the target spoke about."""
        error_R = (is_right_RK[:, 0] - self.first_X[row_R]) * said_RK[:, 0]
        self.first_X[row_R] += ROW_RATE * error_R
        if self.is_shared and said_RK[:, 0].any():
            self.prior += PRIOR_RATE * float(is_right_RK[said_RK[:, 0], 0].mean() - self.prior)
        most = is_right_RK.shape[1]
        if most > 1 and is_right_RK[:, 0].any():
            run_RK = np.logical_and.accumulate(is_right_RK, axis=1)
            asked_K = (run_RK[:, :-1] & said_RK[:, 1:]).sum(0)
            missed_K = asked_K - run_RK[:, 1:].sum(0)
            next_K = self.next_G[1:most]
            next_K += NEXT_RATE * (asked_K * (1 - next_K) - missed_K)
            np.clip(next_K, 0.02, 0.98, out=next_K)

    def fade(self, row_R: Array) -> None:
        """Nobody guessed for these rows: what is known of them slowly means less."""
        self.prior += FADE * (self.hope - self.prior)
        self.first_X[row_R] += FADE * (self.prior - self.first_X[row_R])

    def gains(self, row_R: Array) -> Array:
        """Tokens that 1, 2, 3 ... guesses per row would bring in all."""
        return np.asarray(np.cumsum(np.cumprod(self.next_G)) * float(self.first_X[row_R].sum()))
