"""How often guesses were right of late: the first one, and a further one after a right one.

Texts differ: where first guesses are often right, further ones are too. So the log-odds of both
have a term of the row, learned while its request runs, and one shared by all requests. Different
ways to make guesses differ by what was hoped of them: what is learned of one holds for the others.
Past a network's last level only what all rows had there is known.

Shape letters: X rows of the engine, R rows of the step, G guesses, K tokens of a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

COMMON_RATE = 0.05  # of the shared term, for one of a row's
PAST_RATE = 0.01
LIMIT = 4.0  # of a row's term, in log-odds
FADE, COMMON_FADE = 0.003, 0.001  # by which both mean less with each step without guesses
LOW, HIGH, FLOOR = 0.02, 0.98, 0.05

Array = np.ndarray


class Record:
    """Chances of guesses, by the way they are made in; `hopes` gives those to start from."""

    def __init__(
        self,
        num_rows: int,
        num_guesses: int,
        hopes: Mapping[int, tuple[float, float]],  # of the first guess, of a further one
        *,
        rate: float,  # of a row's terms: what comes and goes within a text is followed quickly
        num_levels: int | None = None,  # guesses of a network; None: all of them
        past: float = 0.4,  # chance of a guess after its last
    ) -> None:
        self.hopes = {way: _log_odds(np.array(chances)) for way, chances in hopes.items()}
        self.common, self.rate = np.zeros(2), rate
        self.first_X, self.next_X = np.zeros(num_rows), np.zeros(num_rows)
        self.num_guesses = num_guesses
        self.num_levels = min(num_levels or num_guesses, num_guesses)
        self.past_G = np.full(num_guesses - self.num_levels, past)

    def start(self, row: int) -> None:
        """A request came into the row."""
        self.first_X[row] = self.next_X[row] = 0.0

    def learn(self, row_R: Array, is_right_RK: Array, said_RK: Array, way: int = 0) -> None:
        """Which of the rows' first K guesses were right, among those the target spoke about."""
        term, said_R, most = self.hopes[way] + self.common, said_RK[:, 0], self.num_levels - 1
        run_RK = np.logical_and.accumulate(is_right_RK & said_RK, axis=1)
        asked_RK, right_RK = run_RK[:, :-1] & said_RK[:, 1:], run_RK[:, 1:]
        asked_R, right_R = asked_RK[:, :most].sum(1), right_RK[:, :most].sum(1)
        seen = (self.first_X, run_RK[:, 0], said_R), (self.next_X, right_R, asked_R)
        for place, (own_X, num_right_R, num_asked_R) in enumerate(seen):
            own_R = own_X[row_R]
            chance_R = _chance(term[place] + own_R)
            # So that chances, not their log-odds, move by the rate.
            error_R = num_right_R - num_asked_R * chance_R
            error_R /= np.maximum(chance_R * (1.0 - chance_R), FLOOR)
            own_X[row_R] = np.clip(own_R + self.rate * error_R, -LIMIT, LIMIT)
            error = error_R.sum() / max(num_asked_R.sum(), 1)
            self.common[place] += COMMON_RATE * self.rate * error
        if asked_RK.shape[1] > most and asked_RK[:, most:].any():
            asked_K, right_K = asked_RK[:, most:].sum(0), right_RK[:, most:].sum(0)
            past_K = self.past_G[: len(asked_K)]
            past_K += PAST_RATE * (right_K - asked_K * past_K)
            np.clip(past_K, LOW, HIGH, out=past_K)

    def fade(self, row_R: Array) -> None:
        """Nobody guessed for these rows."""
        for own_X in (self.first_X, self.next_X):
            own_X[row_R] *= 1.0 - FADE
        self.common *= 1.0 - COMMON_FADE

    def gains(self, row_R: Array, way: int = 0) -> Array:
        """Tokens that 1, 2, 3 ... guesses would bring, for each row."""
        term = self.hopes[way] + self.common
        chance_RG = np.empty((len(row_R), self.num_guesses))
        chance_RG[:, : self.num_levels] = _chance(term[1] + self.next_X[row_R])[:, None]
        chance_RG[:, self.num_levels :] = self.past_G
        chance_RG[:, 0] = _chance(term[0] + self.first_X[row_R])
        return np.asarray(chance_RG.cumprod(1).cumsum(1))


def _chance(log_odds: Array) -> Array:
    return np.asarray(np.clip(1.0 / (1.0 + np.exp(-log_odds)), LOW, HIGH))


def _log_odds(chance: Array) -> Array:
    return np.asarray(np.log(chance / (1.0 - chance)))
