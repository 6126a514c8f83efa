"""How often guesses were right of late: the first one, and a further one after a right one.

Texts differ: where first guesses are often right, further ones are too. So the log-odds of both
have a term of the row, learned while its request runs, and one shared by all requests. Different
sources differ by what was hoped of them: what is learned of one holds for the others.
Past a network's last level only what all rows had there is known. Whoever asks may have a hint of
what a row's next guesses are worth: then the terms are what is learned beside it.

Rows of one step wait for one another, and of several whose texts are not known yet some will gain
little. So there may be a doubt about a new row: the more rows a step has, the more it counts, and
it passes as the row's guesses teach.

Shape letters: X rows of the engine, R rows of the step, G guesses past the last level, S sizes; 2
is the first guess and a further one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from math import exp, log2
from operator import mul

import numpy as np

COMMON_RATE = 0.05  # of the shared term, for one of a row's
PAST_RATE = 0.01
LIMIT = 4.0  # of a row's term, in log-odds
FADE, COMMON_FADE = 0.003, 0.0003  # by which both mean less with each step without guesses
DOUBT_FADE = 0.03  # by which a row is doubted less with each step that teaches of it
LOW, HIGH, FLOOR = 0.02, 0.98, 0.05

Array = np.ndarray

NO_HINT = np.zeros((2, 1))


class Record:
    """Chances of guesses, by the source they are made in; `hopes` gives those to start from."""

    def __init__(
        self,
        num_rows: int,
        num_guesses: int,
        hopes: Mapping[int, tuple[float, float]],  # of the first guess, of a further one
        *,
        rate: float,  # of a row's terms: what comes and goes within a text is followed quickly
        num_levels: int | None = None,  # guesses of a network; None: all of them
        past: float = 0.4,  # chance of a guess after its last
        doubt: float = 0.0,  # of a new row, in log-odds for each doubling of a step's rows
    ) -> None:
        self.hopes = {source: _log_odds(np.array(chances)) for source, chances in hopes.items()}
        self.common, self.rate = np.zeros(2), rate
        self.own_2X = np.zeros((2, num_rows))
        self.first_X, self.next_X = self.own_2X
        self.doubt, self.doubt_X = doubt, np.full(num_rows, doubt)
        self.num_guesses = num_guesses
        self.num_levels = min(num_levels or num_guesses, num_guesses)
        self.past_G = np.full(num_guesses - self.num_levels, past)

    def start(self, ids: list[int]) -> None:
        """Requests came into these rows."""
        self.first_X[ids] = self.next_X[ids] = 0.0
        self.doubt_X[ids] = self.doubt

    def learn(
        self,
        row_R: Array,
        run_R: Array,
        missed_R: Array,
        source: int = 0,
        hint_2R: Array = NO_HINT,  # log-odds the guesses were thought to have more
    ) -> None:
        """So many of each row's guesses were right in a row, and whether the next was wrong."""
        term, most = self.hopes[source] + self.common, self.num_levels - 1
        is_first_R = run_R > 0
        right_R = np.minimum(np.maximum(run_R - 1, 0), most)
        asked_R = right_R + (missed_R & is_first_R & (run_R <= most))
        seen = (
            (self.first_X, is_first_R, (is_first_R | missed_R).astype(np.int64)),
            (self.next_X, right_R, asked_R),
        )
        for place, (own_X, num_right_R, num_asked_R) in enumerate(seen):
            num_rows = int(np.count_nonzero(num_asked_R))
            if not num_rows:
                continue
            own_R = own_X[row_R]
            chance_R = _chance(term[place] + hint_2R[place] + own_R)
            # So that chances, not their log-odds, move by the rate.
            error_R = num_right_R - num_asked_R * chance_R
            error_R /= np.maximum(chance_R * (1.0 - chance_R), FLOOR)
            own_X[row_R] = np.minimum(np.maximum(own_R + self.rate * error_R, -LIMIT), LIMIT)
            self.common[place] += COMMON_RATE * self.rate * float(error_R.sum()) / num_rows
        self.doubt_X[row_R] *= 1.0 - DOUBT_FADE
        if self.num_levels < self.num_guesses and (run_R > most).any():
            self._learn_past(run_R[run_R > most], missed_R[run_R > most])

    def _learn_past(self, run_R: Array, missed_R: Array) -> None:
        for run, is_missed in zip(run_R.tolist(), missed_R.tolist(), strict=True):
            num_right = run - self.num_levels
            right_G = self.past_G[:num_right]
            right_G += PAST_RATE * (1.0 - right_G)
            if is_missed and num_right < len(self.past_G):
                self.past_G[num_right] *= 1.0 - PAST_RATE

    def fade(self, row_R: Array) -> None:
        """Nobody guessed for these rows."""
        for own_X in (self.first_X, self.next_X):
            own_X[row_R] *= 1.0 - FADE
        self.common *= 1.0 - COMMON_FADE

    def gains(
        self,
        row_R: Array,
        sizes_S: Array,
        source: int = 0,
        hint_2R: Array = NO_HINT,
        *,
        is_doubtful: bool = True,
    ) -> Array:
        """Tokens that so many guesses would bring each row, by row and size; sizes rise."""
        if len(row_R) == 1:
            hints = hint_2R[:, 0].tolist()
            return np.array([self._gains_of_one(int(row_R[0]), sizes_S.tolist(), source, hints)])
        term, most = self.hopes[source] + self.common, self.num_levels
        log_odds_2R = term[:, None] + hint_2R + self.own_2X.take(row_R, axis=1)
        if is_doubtful and self.doubt:
            log_odds_2R -= log2(len(row_R)) * self.doubt_X[row_R]
        first_R1, next_R1 = _chance(log_odds_2R)[:, :, None]
        gain_RS = (1.0 - next_R1 ** np.minimum(sizes_S, most)) / (1.0 - next_R1)
        if sizes_S[-1] > most:
            past_G = np.concatenate([[0.0], self.past_G.cumprod().cumsum()])
            gain_RS += next_R1 ** (most - 1) * past_G[np.maximum(sizes_S - most, 0)]
        return np.asarray(first_R1 * gain_RS)

    def _gains_of_one(
        self, row: int, sizes: list[int], source: int, hints: list[float]
    ) -> list[float]:
        """The same for a step of one row, where what numpy takes per call would be felt.

        It waits for no other: there is no doubt.
        """
        (first, further), most = (self.hopes[source] + self.common).tolist(), self.num_levels
        chance = _chance_of(first + hints[0] + float(self.first_X[row]))
        further = _chance_of(further + hints[1] + float(self.next_X[row]))
        further_ones = [further] * (most - 1) + self.past_G.tolist()
        gains = list(accumulate(accumulate([chance, *further_ones[: sizes[-1] - 1]], mul)))
        return [gains[size - 1] for size in sizes]


def _chance(log_odds: Array) -> Array:
    return np.asarray(np.minimum(np.maximum(1.0 / (1.0 + np.exp(-log_odds)), LOW), HIGH))


def _chance_of(log_odds: float) -> float:
    return min(max(1.0 / (1.0 + exp(-log_odds)), LOW), HIGH)


def _log_odds(chance: Array) -> Array:
    return np.asarray(np.log(chance / (1.0 - chance)))
