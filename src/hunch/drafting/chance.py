"""How likely a guess is right, learned online from what the target really chose.

A logistic model of two terms: one per kind of guess (its match length, how often it was seen, ...),
shared by all requests, and one per request, since some texts repeat themselves and others do not.
Every guess that could be compared teaches, whether it was sent to the target or not: a method that
drafts nothing for a while still sees when its guesses become good again, at no cost to the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp, log

from hunch.kernels.lookup import FADE, FIRST_RATE, LAST_RATE, ROW_LIMIT, ROW_RATE


def log_odds(chance: float) -> float:
    return log(chance / (1.0 - chance))


class Chances:
    """Log-odds per kind of guess. `priors` gives the chances to start from."""

    def __init__(self, priors: Mapping[int, float]) -> None:
        self._terms = {kind: log_odds(chance) for kind, chance in priors.items()}
        self._rates = dict.fromkeys(self._terms, FIRST_RATE)

    def of(self, kind: int, row_term: float = 0.0) -> float:
        return 1.0 / (1.0 + exp(-self._terms[kind] - row_term))

    def learn(self, kind: int, row_term: float, is_right: bool) -> float:
        """One comparison; returns the request's new term."""
        error = is_right - self.of(kind, row_term)
        rate = self._rates[kind]
        self._terms[kind] += rate * error
        self._rates[kind] = max(LAST_RATE, rate * FADE)
        return max(-ROW_LIMIT, min(ROW_LIMIT, row_term + ROW_RATE * error))
