"""How the next step goes, on a device whose host learns of each step one step late.

A step checks the same number of nodes for all its rows, and drafts for the next one in one of a few
ways: by lookup, or by a network as well, as a chain or a tree. Of lookups, every guess that can be
compared with what the target said teaches, whether it was checked or not; of the network's drafts
those that were checked. How long the match was that the host last heard of tells most of what the
next guess by lookup is worth: nothing matched, it is right one time in ten; 16 tokens, nine times.
Every shape's tokens per second are then known well enough to choose by.

Shape letters: X rows of the engine, R rows of the step, G guesses, K tokens of a step, S sizes; 2
is the first guess and a further one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hunch.drafting.record import NO_HINT, Array, Record

NEW = 1.0  # doublings of the match taken for a row of which nothing was heard
CHAIN, TREE = 1, 2  # sources with a network
NETWORK = {CHAIN: (0.5, 0.6), TREE: (0.65, 0.65)}  # chances by source; a tree's: any of a level
# Powers of a row's time to its end, with lookups and with a network: 1 would give the mean time, a
# large one the longest. A network's rows differ less, and of the least it knows too little.
SLOW, NETWORK_SLOW = 16, 4
REST = -1  # the source of a step in which nobody guesses
# Requests keep coming if one came beside others that had gone so many steps, of late: of an
# arrival so much is left after each step, and it counts down to the least.
SETTLED, FLOW, LEAST_FLOW = 8, 0.98, 0.1


class Habit(NamedTuple):
    """What lookups are thought to be worth until they have taught."""

    hope: tuple[float, float]  # chances of the first guess and of a further one, nothing matched
    by_match: tuple[float, float]  # log-odds that both gain with each doubling of the match
    rate: float = 0.04  # how quickly a row's are learned
    doubt: float = 0.3  # of a new row's (they teach unchecked, so caution is cheap)


LOOKUP = Habit((0.1, 0.6), (1.0, 0.5))
GUIDED = Habit((0.25, 0.45), (0.75, 0.65))  # with a phrase table
BESIDE = Habit((0.3, 0.7), (0.0, 0.0), 0.06, 0.7)  # beside a network, whatever was matched


class StepShape(NamedTuple):
    """How a step goes: nodes it checks, and in which source it drafts for the next one."""

    num_nodes: int
    source: int = 0  # 0: without a network; REST: nobody drafts


def chains_of(num_levels: int, *, is_adaptive: bool) -> tuple[StepShape, ...]:
    """StepShapes of a drafter that is a network alone: some of its levels are checked, or none."""
    if not is_adaptive:
        return (StepShape(num_levels, CHAIN),)
    sizes = sorted({1, min(3, num_levels), num_levels})
    return (StepShape(0), *(StepShape(size, CHAIN) for size in sizes))


def levels_after(num_tokens: int, most: int) -> int:
    """Levels worth drafting in a step that could commit so many tokens.

    The next step will most likely check as many as this one; one that checks none is a beginning.
    """
    return min(most, num_tokens - 1) or most


class Pace:
    """Chooses among `shapes`; one without nodes is among them where none may be best."""

    def __init__(
        self,
        num_rows: int,
        shapes: Sequence[StepShape],
        margin: float = 0.0,
        num_levels: int = 0,  # nodes on the longest path of the network
        *,
        is_guided: bool = False,  # lookups ask a phrase table too
    ) -> None:
        self.shapes, self.margin = tuple(sorted(shapes)), margin
        num_guesses = max(shape.num_nodes for shape in self.shapes)
        sources = sorted({shape.source for shape in self.shapes} - {0})
        habit = BESIDE if sources else GUIDED if is_guided else LOOKUP
        self.lookup = Record(
            num_rows, num_guesses, {0: habit.hope}, rate=habit.rate, doubt=habit.doubt
        )
        self.match_21 = np.array(habit.by_match)[:, None]
        self.has_lookup = any(shape.num_nodes for shape in self.shapes if not shape.source)
        # A network's step takes long matches too: they are no reason to go on without it.
        self.is_by_match = not sources
        # Doublings of the match last heard of (0 tokens: none, 1: one, 3: two), and before it.
        self.match_X = np.full(num_rows, NEW * self.is_by_match)
        self.before_X = self.match_X.copy()
        hopes = {source: NETWORK[source] for source in sources}
        self.network = Record(num_rows, num_guesses, hopes, rate=0.06, num_levels=num_levels)
        self.guess_XG = np.full((num_rows, num_guesses), -1, dtype=np.int64)
        self.is_learning = len(self.shapes) > 1
        self.num_steps, self.flow = 0, 0.0
        self._passed_R: Array | None = None  # rows of the last step, if nobody guessed in it
        self.age_X = np.zeros(num_rows, dtype=np.int64)  # steps of the row's request
        self.seen_X = np.full(num_rows, -2, dtype=np.int64)  # the row's last step

    def settled(self) -> list[int]:
        """Rows of the last step that had gone some steps; their requests may have ended with it."""
        is_settled_X = (self.age_X >= SETTLED) & (self.seen_X == self.num_steps)
        return np.flatnonzero(is_settled_X).tolist()

    def start(self, ids: list[int], *, is_beside: bool = False) -> None:
        """Requests came into these rows, beside others that had gone some steps or alone."""
        self.age_X[ids], self._passed_R = 0, None
        if is_beside:
            self.flow = 1.0
        self.lookup.start(ids)
        self.network.start(ids)
        self.guess_XG[ids] = -1
        self.match_X[ids] = self.before_X[ids] = NEW * self.is_by_match

    def learn(
        self, row_R: Array, num_R: Array, tokens_RK: Array, guess_RG: Array, matched_R: Array
    ) -> None:
        """Tokens the rows committed, num_R each, and new guesses by lookup, where any matched."""
        if not self.is_learning:
            return
        self._count(row_R)
        self._passed_R = None
        if not self.has_lookup:
            return
        most = min(tokens_RK.shape[1], self.guess_XG.shape[1])
        is_right_RK = tokens_RK[:, :most] == self.guess_XG[row_R, :most]
        run_R = np.logical_and.accumulate(is_right_RK, axis=1).sum(1)
        said_R = np.minimum(num_R, most)
        run_R = np.minimum(run_R, said_R)
        self.lookup.learn(
            row_R, run_R, run_R < said_R, hint_2R=self.match_21 * self.before_X[row_R]
        )
        if self.is_by_match:
            self.before_X[row_R] = self.match_X[row_R]
            self.match_X[row_R] = np.log2(1.0 + matched_R)
        most = self.guess_XG.shape[1]
        self.guess_XG[row_R] = np.where(matched_R[:, None] > 0, guess_RG[:, :most], -1)

    def pass_by(self, row_R: Array) -> None:
        """The rows went a step in which nobody guessed."""
        self._count(row_R)
        if self._passed_R is not row_R:  # else nothing is kept of what was guessed for them
            self._passed_R = row_R
            self.guess_XG[row_R] = -1
            self.match_X[row_R] = self.before_X[row_R] = NEW * self.is_by_match
        if self.network.hopes:
            self.network.fade(row_R)

    def _count(self, row_R: Array) -> None:
        self.num_steps += 1
        self.flow *= FLOW
        self.age_X[row_R] += 1
        self.seen_X[row_R] = self.num_steps

    def learn_network(
        self, source: int, row_R: Array, num_right_R: Array, num_nodes: int, is_over_R: Array
    ) -> None:
        """So many tokens drafted in this source were right; of what ended the rest is not known."""
        missed_R = ~is_over_R & (num_right_R < num_nodes)
        self.network.learn(row_R, num_right_R, missed_R, source)

    def fade(self, row_R: Array) -> None:
        """No network guessed for these rows."""
        self.network.fade(row_R)

    def choose(
        self,
        row_R: Array,
        seconds: Mapping[StepShape, float],  # what a step of each shape costs
        left_R: Array | None = None,  # tokens each row may still say; None: as many each
    ) -> StepShape:
        """The shape with the most tokens per second."""
        shapes = sorted(seconds)
        gains = self._gains(row_R, shapes, left_R)
        best, best_rate = StepShape(0), 0.0
        for shape in shapes:
            rate = (1.0 + gains.get(shape, 0.0)) / seconds[shape]
            if rate > best_rate:
                best, best_rate = shape, rate
                if not shape.num_nodes:
                    best_rate *= 1.0 + self.margin
        return best

    def _gains(
        self, row_R: Array, shapes: list[StepShape], left_R: Array | None
    ) -> dict[StepShape, float]:
        """Tokens beside the bonus that a step of each shape would bring a row; sizes rise.

        Every row waits for what the others check, and requests that came together are done when the
        last of them is: those count that gain least and have most left to say. While requests keep
        coming, the next one has the use of what a fast row gains, and the mean counts as much as
        the least.
        """
        is_flowing = self.flow > LEAST_FLOW
        by_source: dict[int, list[StepShape]] = {}
        for shape in shapes:
            if shape.num_nodes:
                by_source.setdefault(shape.source, []).append(shape)
        gains: dict[StepShape, float] = {}
        for source, some in by_source.items():
            sizes_S = np.array([shape.num_nodes for shape in some])
            record = self.network if source else self.lookup
            hint_2R = NO_HINT if source else self.match_21 * self.match_X[row_R]
            gain_RS = record.gains(row_R, sizes_S, source, hint_2R, is_doubtful=not is_flowing)
            if len(row_R) == 1:
                gain_S = gain_RS[0]
            elif is_flowing:
                gain_S = 0.5 * (gain_RS.mean(0) + gain_RS.min(0))
            else:
                left = np.ones(len(row_R)) if left_R is None else left_R
                gain_S = _slow_gain(gain_RS, left, NETWORK_SLOW if source else SLOW)
            gains.update(zip(some, gain_S.tolist(), strict=True))
        return gains


def _slow_gain(gain_RS: Array, left_R: Array, power: int) -> Array:
    """By what the rows' times to their ends shrink: a power mean, near to that of the longest."""
    share_R = (left_R / left_R.max()) ** power
    time_S = share_R @ (1.0 / (1.0 + gain_RS)) ** power / share_R.sum()
    return np.asarray(time_S ** (-1.0 / power) - 1.0)
