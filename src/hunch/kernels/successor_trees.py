"""Trees of likely successors for the rows of an engine, alone or beside a lookup's chain.

A successor counts in so far as the chain's guess in its place is wrong: with a chance p of that
guess and q of the successor, q (1 - p) of the latter, and p more for a token that is both. So the
successors learn from the places where the chain was wrong or silent; their log-odds are the sum of
a term per level of chance, which all rows share, a term per row, and `BESIDE` where there is such a
guess. The C++ form is cpu/successors.cpp.

Shape letters: N nodes of a tree, likeliest first, or of a chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp, log, log2
from typing import NamedTuple

import numpy as np

from hunch.kernels.lookup import FADE, FIRST_RATE, LAST_RATE, ROW_LIMIT, ROW_RATE
from hunch.kernels.successor_entries import CERTAIN, ONE_TOKEN
from hunch.kernels.successors import Successors

NUM_LEVELS = 16  # of the chances that a table gives, one for each factor of 1.41
BY_CHAIN = -1  # in place of a level
# Where the text seemed to be repeated but is not, common successors are rarer than elsewhere. On
# Qwen2.5-0.5B they were right 0.69 times as often as their levels say.
BESIDE = -0.4
NO_PLACE = -2  # of a guess that is not on the chain's path
Chain = tuple[np.ndarray, np.ndarray]  # tokens, and the chances of the paths to them
EMPTY: Chain = np.zeros(0, np.int64), np.zeros(0)  # a chain without guesses


def level_of(share: int) -> int:
    """The level of a chance in `CERTAIN ** 2`ths."""
    return min(NUM_LEVELS - 1, int(2 * log2(CERTAIN**2 / share)))


def first_odds() -> list[float]:
    """The log-odds of the levels before anything was learned."""
    chances = [2.0 ** (-(level + 0.5) / 2) for level in range(NUM_LEVELS)]
    return [log(chance / (1.0 - chance)) for chance in chances]


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """How large trees may be."""

    num_nodes: int
    depth: int  # of successors
    min_chance: float  # of a path


class _Guess(NamedTuple):
    token: int
    parent: int  # index among the guesses; -1: the row's last token
    path: float  # the chance of all tokens up to here
    level: int
    own: float  # the chance that the level gives it
    place: int  # in the chain, while all tokens up to here are those of the chain
    depth: int  # 1 for children of the root


@dataclass(slots=True)
class _Row:
    before: int = ONE_TOKEN
    last: int = ONE_TOKEN
    term: float = 0.0  # log-odds by which successors are better here than elsewhere
    guesses: list[_Guess] = field(default_factory=list)


class SuccessorTrees:
    """What was guessed last is in tokens_N, parents_N and chance_N, which are overwritten."""

    def __init__(self, successors: Successors, limits: TreeLimits, num_rows: int) -> None:
        self.successors, self.limits = successors, limits
        self._terms, self._rates = first_odds(), [FIRST_RATE] * NUM_LEVELS
        self._rows = [_Row() for _ in range(num_rows)]
        self.tokens_N = np.zeros(limits.num_nodes, np.int64)
        self.parents_N = np.zeros(limits.num_nodes, np.int64)
        self.chance_N = np.zeros(limits.num_nodes)

    def forget(self, row: int) -> None:
        self._rows[row] = _Row()

    def follow(self, row: int, tokens_N: np.ndarray) -> None:
        """The target committed these."""
        state, at = self._rows[row], -1
        guesses, state.guesses = state.guesses, []
        for token in tokens_N.tolist():
            state.before, state.last = state.last, token
            if at < len(guesses):
                at = self._learn(state, guesses, at, token)

    def _learn(self, row: _Row, guesses: list[_Guess], parent: int, token: int) -> int:
        """Learn from the children of a guess; returns the one that is right, or how many there are
        in all."""
        children = [n for n, guess in enumerate(guesses) if guess.parent == parent]
        right = [n for n in children if guesses[n].token == token]
        if right and guesses[right[0]].level == BY_CHAIN:
            return right[0]
        for guess in (guesses[n] for n in children):
            if guess.level == BY_CHAIN:
                continue
            error = (guess.token == token) - guess.own
            rate = self._rates[guess.level]
            self._terms[guess.level] += rate * error
            self._rates[guess.level] = max(LAST_RATE, rate * FADE)
            row.term = max(-ROW_LIMIT, min(ROW_LIMIT, row.term + ROW_RATE * error))
        return right[0] if right else len(guesses)

    def guess(self, row: int, most: int, chain: Chain = EMPTY) -> int:
        """How many nodes there are now."""
        state = self._rows[row]
        state.guesses = guesses = list[_Guess]()
        chances = [
            [1.0 / (1.0 + exp(-term - state.term - beside)) for term in self._terms]
            for beside in (0.0, BESIDE)
        ]
        pairs = list(zip(chain[0].tolist(), chain[1].tolist(), strict=True))
        heap: list[tuple[float, int, _Guess]] = []
        serial, parent = 0, _Guess(state.last, -1, 1.0, BY_CHAIN, 1.0, -1, 0)
        while len(guesses) < min(most, self.limits.num_nodes):
            before = state.before
            if parent.depth:
                before = guesses[parent.parent].token if parent.parent >= 0 else state.last
            for guess in self._children(before, parent, len(guesses) - 1, pairs, chances):
                if guess.path > self.limits.min_chance:
                    heappush(heap, (-guess.path, serial, guess))
                    serial += 1
            if not heap:
                break
            parent = heappop(heap)[2]
            guesses.append(parent)
        count = len(guesses)
        if count:
            tokens, parents, paths, *_ = zip(*guesses, strict=True)
            self.tokens_N[:count], self.parents_N[:count] = tokens, parents
            self.chance_N[:count] = paths
        return count

    def _children(
        self,
        before: int,
        parent: _Guess,
        number: int,
        chain: list[tuple[int, float]],
        chances: list[list[float]],  # of the levels; beside a guess of the chain
    ) -> Iterator[_Guess]:
        """What may follow a guess, `number` among the others."""
        place, depth = parent.place + 1, parent.depth + 1
        found = {}
        if depth <= self.limits.depth:
            found = {t: level_of(share) for t, share in self.successors.find(before, parent.token)}
        left, own_chances = 1.0, chances[0]  # the chance that the chain's guess is wrong
        if 0 <= place < len(chain):
            token, path = chain[place]
            own = path / chain[place - 1][1] if place else path
            left, own_chances = 1.0 - own, chances[1]
            level = found.pop(token, BY_CHAIN)
            if level != BY_CHAIN:
                own += left * own_chances[level]
            yield _Guess(token, number, parent.path * own, BY_CHAIN, 0.0, place, depth)
        for token, level in found.items():
            own = own_chances[level]
            yield _Guess(token, number, parent.path * (left * own), level, own, NO_PLACE, depth)
