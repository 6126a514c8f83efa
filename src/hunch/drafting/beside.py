"""A draft model beside lookups: when to ask it, and for how many tokens.

It is asked where its record on a row promises more than the row's lookup, for as many tokens as
bring the most per second by what passes of both models took; elsewhere it costs nothing, and
catches up with the row when it is asked again.

Shape letters: R rows of this step, G guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import numpy as np

from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.base import Drafter
from hunch.drafting.cost import CostCurve
from hunch.drafting.record import Record

HOPE = (0.6, 0.7)  # chances to start from: of the first guess, and of a further one
MARGIN = 0.05  # share by which asking it must promise to beat doing without
READS = 4  # tokens worth reading to it for one that a row may still say
FEW = 16  # tokens a row may lack in a pass whose time says what a level costs


class Sent(NamedTuple):
    """A draft that waits to be compared."""

    base: int  # position of its first token
    tokens: list[int]


class DraftBeside:
    """Asks the draft model where it pays."""

    def __init__(
        self, method: Drafter, cost: CostCurve, *, share: float, num_rows: int, is_adaptive: bool
    ) -> None:
        self.method, self.cost, self.share = method, cost, share
        self.is_adaptive = is_adaptive  # False: always asked where no lookup promises more
        self.num_levels = method.needs.max_nodes
        self.record = Record(num_rows, self.num_levels, {0: HOPE}, rate=0.1)
        self.level_cost = CostCurve()  # seconds of one level, by rows
        self._is_timed = False
        self._sent: dict[int, Sent] = {}
        self._met: set[int] = set()

    def observe(self, step: TargetStep) -> None:
        self.method.observe(step)
        rows = step.rows
        for row in rows.ids_R.tolist():
            if row not in self._met:
                self._met.add(row)
                self.record.start([row])
            sent, row_1 = self._sent.pop(row, None), np.array([row])
            if sent is None:
                self.record.fade(row_1)
                continue
            chosen = rows.tokens_XL[row, sent.base : int(rows.known_X[row])].tolist()
            num_new = min(len(chosen), len(sent.tokens))
            run = 0
            while run < num_new and chosen[run] == sent.tokens[run]:
                run += 1
            self.record.learn(row_1, np.array([run]), np.array([run < num_new]))

    def forget(self, rows: list[int]) -> None:
        self.method.forget(rows)
        self._met.difference_update(rows)
        for row in rows:
            self._sent.pop(row, None)

    def plan(
        self, rows: Rows, ids: list[int], limits: list[int], others: Sequence[tuple[int, float]]
    ) -> tuple[list[int], int]:
        """The rows to ask it for, as places in `ids`, and for how many tokens.

        `others` says what each row has without it: nodes, and tokens they promise.
        """
        places = self._readable(rows, ids, limits)
        if not places:
            return [], 0
        row_R, size_S = np.array([ids[p] for p in places]), np.arange(1, self.num_levels + 1)
        gains = self.record.gains(row_R, size_S).tolist()
        num_nodes, gain = map(sum, zip(*others, strict=True))
        num_rows = len(ids)
        best: tuple[list[int], int] = ([], 0)
        most = (1.0 + MARGIN) * (num_rows + gain) / self.cost.seconds(num_rows + num_nodes)
        for num_levels in range(1, self.num_levels + 1):
            chosen, nodes, tokens = [], num_nodes, gain
            for place, gain_G in zip(places, gains, strict=True):
                size = min(num_levels, limits[place])
                own = gain_G[size - 1]
                if own > others[place][1]:
                    chosen.append(place)
                    nodes += size - others[place][0]
                    tokens += own - others[place][1]
            if not chosen:
                continue
            seconds = self.cost.seconds(num_rows + nodes) + num_levels * self._level(len(chosen))
            rate = (num_rows + tokens) / seconds
            if rate > most or not self.is_adaptive:
                best, most = (chosen, num_levels), rate
        return best

    def propose(self, rows: Rows, places: list[int], num_levels: int) -> Draft:
        """Drafts of these rows alone, in order."""
        ids_R = rows.ids_R[places]
        lacking = int((rows.known_X[ids_R] - rows.computed_GX[-1, ids_R]).max())
        some = replace(rows, ids_R=ids_R, max_draft_X=rows.max_draft_X.clamp(max=num_levels))
        began = perf_counter()
        draft = self.method.propose(some)
        if lacking <= FEW:
            self._is_timed = True
            self.level_cost.record(len(places), (perf_counter() - began) / num_levels)
        known = rows.known_X[ids_R].tolist()
        counts, tokens = draft.num_nodes_R.tolist(), draft.tokens_RN.tolist()
        for place, row in enumerate(ids_R.tolist()):
            self._sent[row] = Sent(known[place], tokens[place][: counts[place]])
        return draft

    def _level(self, num_rows: int) -> float:
        if self._is_timed:
            return self.level_cost.seconds(num_rows)
        return self.share * self.cost.seconds(num_rows)

    def _readable(self, rows: Rows, ids: list[int], limits: list[int]) -> list[int]:
        """Places of rows that may draft and are not too long for what they may still say."""
        known_X, end_X = rows.known_X.tolist(), rows.end_X.tolist()
        have_X = rows.computed_GX[-1].tolist()
        places = []
        for place, (row, limit) in enumerate(zip(ids, limits, strict=True)):
            lacking = known_X[row] - have_X[row]
            if limit > 0 and (lacking <= FEW or lacking <= READS * (end_X[row] - known_X[row])):
                places.append(place)
        return places
