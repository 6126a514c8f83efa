"""Suffix lookup for the rows of an engine, with a phrase table beside the text or without one.

The request's own text is asked first: the longest match of its end. Where the table has the better
chance, its token is guessed instead; the chain goes on from either. Every guess that can be
compared with the target's own tokens teaches, sent or not. The C++ form is cpu/lookup.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from hunch.kernels.lookup import (
    FADE,
    FIRST_RATE,
    LAST_RATE,
    MAX_MATCH,
    MIN_CHANCE,
    NUM_GUESS_TYPES,
    NUM_LENGTHS,
    ROW_LIMIT,
    ROW_RATE,
    SECOND,
    SuffixText,
    guess_type_of,
)
from hunch.kernels.phrases import NOBODY, NUM_LEVELS, PhraseTable


class _Row:
    """A request: its text, and by how much own text and table are better here than elsewhere."""

    __slots__ = ("guesses", "terms", "text")

    def __init__(self) -> None:
        self.text = SuffixText()
        self.terms = [0.0, 0.0]  # in log-odds
        self.guesses: list[tuple[int, int, float]] = []  # token, type, chance after those before


class GuidedLookup:
    """Chains for rows; without a table, `own_odds` are the log-odds to start from, by type."""

    def __init__(self, own_odds: Sequence[float], table: PhraseTable | None) -> None:
        self.table = table
        self._terms = list(own_odds) + [0.0] * NUM_LEVELS
        self._rows: dict[int, _Row] = {}
        if table is not None:
            self._terms = [*table.own_odds.tolist(), *table.level_odds.tolist()]
            self._seen, self._versus = table.seen_odds.tolist(), table.versus_odds.tolist()
            self._guess_trust = memoryview(table.guess_trust_V)
            self._last_trust = memoryview(table.last_trust_V)
        self._rates = [FIRST_RATE] * len(self._terms)

    def forget(self, row: int) -> None:
        self._rows.pop(row, None)

    def follow(self, row: int, tokens: list[int]) -> None:
        """The target committed these."""
        state = self._rows.get(row)
        if state is None:
            state = self._rows[row] = _Row()
        self._learn(state, tokens)
        state.text.extend(tokens)

    def _learn(self, row: _Row, tokens: list[int]) -> None:
        """Compare the guesses on the path the target took, up to the first miss."""
        guesses, row.guesses = row.guesses, []
        for (guess, guess_type, chance), token in zip(guesses, tokens, strict=False):
            error = (guess == token) - chance
            rate = self._rates[guess_type]
            self._terms[guess_type] += rate * error
            self._rates[guess_type] = max(LAST_RATE, rate * FADE)
            source = int(guess_type >= NUM_GUESS_TYPES)
            term = row.terms[source] + ROW_RATE * error
            row.terms[source] = max(-ROW_LIMIT, min(ROW_LIMIT, term))
            if guess != token:
                return

    def guess(self, row: int, max_guesses: int) -> tuple[list[int], list[float]]:
        """Tokens that may follow the row's text, and the chances of the paths to them."""
        state = self._rows[row]
        tokens, num_known = state.text.tokens, len(state.text.tokens)
        tail = tokens[-MAX_MATCH:]
        length, places = state.text.find(tail)
        guesses: list[int] = []
        chances: list[float] = []
        state.guesses = []
        path = 1.0
        while len(guesses) < max_guesses and tail:
            # A match that reaches the end of the text goes on with the guesses themselves.
            after = [tokens[p] if p < num_known else guesses[p - num_known] for p in places]
            found = self._best(state, tail, after, length)
            if found is None:
                break
            token = found[0]
            path *= found[2]
            if path < MIN_CHANCE:
                break
            guesses.append(token)
            chances.append(path)
            state.guesses.append(found)
            tail = [*tail[-MAX_MATCH + 1 :], token]
            places = [p + 1 for p, t in zip(places, after, strict=True) if t == token]
            length = min(length + 1, MAX_MATCH)
            if not places:
                length, places = state.text.find(tail)
        return guesses, chances

    def _best(
        self, row: _Row, tail: list[int], after: list[int], length: int
    ) -> tuple[int, int, float] | None:
        """The likeliest next token, its guess type and its chance."""
        entry = None if self.table is None else self.table.find(tail)
        best: tuple[int, int, float] | None = None
        own_type = NOBODY
        if after:
            token, own_type = after[0], guess_type_of(after, length)
            odds = row.terms[0]
            if self.table is not None:
                seen = 0
                if entry is not None:
                    seen = 1 + entry[1] + (0 if entry[0] == token else NUM_LEVELS)
                odds += self._seen[seen] + self._guess_trust[token] + self._last_trust[tail[-1]]
            best = token, own_type, self._chance(own_type, odds)
        if entry is not None and (best is None or entry[0] != best[0]):
            guess_type, versus = NUM_GUESS_TYPES + entry[1], own_type
            if entry[0] in after:
                versus = SECOND * NUM_LENGTHS + own_type % NUM_LENGTHS
            chance = self._chance(guess_type, row.terms[1] + self._versus[versus])
            if best is None or chance > best[2]:
                best = entry[0], guess_type, chance
        return best

    def _chance(self, guess_type: int, odds: float) -> float:
        return 1.0 / (1.0 + exp(-self._terms[guess_type] - odds))
