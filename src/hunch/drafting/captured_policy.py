"""The policy of captured steps: it chooses the shape of each, and learns from its result.

The host chooses a shape before it has read the result of the step before. The choice itself is in
`policy.ShapeChoice`; this is what lies between it and the steps.

Shape letters: R rows of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from time import perf_counter

import numpy as np

from hunch.drafting.acceptance import NEW_MATCH, log_match, relative_error
from hunch.drafting.base import DeviceDrafter
from hunch.drafting.costs import StepCosts, target_seconds
from hunch.drafting.network_rows import NetworkRows
from hunch.drafting.policy import ShapeChoice
from hunch.drafting.step_counts import StepCounts
from hunch.drafting.step_shapes import (
    SURE_MATCH,
    CapturedStep,
    DraftSource,
    RowLengths,
    StepKey,
    StepShape,
    StepShapes,
)
from hunch.kernels.step import CHECKED, FIRST, MATCHED, REASON, TOKENS

# With MANY rows or more, the policy chooses in one of CHOOSE_EVERY steps, and each step teaches it
# about as small a part of the rows, MAX_LEARNED at most: to choose and to learn from all rows in
# every step took a third of a small target's step (16 rows, 135M, H200). When MANY requests come at
# once, it does so all the same in the next FIRST_STEPS steps, to stop soon what does not pay.
# Without that, 64 such requests have 0.93 of the speed of plain decoding.
MANY, CHOOSE_EVERY, MAX_LEARNED, FIRST_STEPS = 16, 4, 16, 8
NO_LINE = [0] * FIRST  # of a row for which nothing was drafted


class CapturedPolicy:
    """Chooses the shapes of captured steps, and learns from their results."""

    def __init__(
        self, drafter: DeviceDrafter | None, rows: RowLengths, *, is_measured: bool = True
    ) -> None:
        num_rows = len(rows.known)
        self.is_plain = drafter is None  # there is nothing to choose
        self.drafter = drafter = drafter or DeviceDrafter(name="off", is_adaptive=False)
        self.rows, self.costs = rows, StepCosts(is_measured=is_measured)
        self.shapes = StepShapes(drafter.shapes, drafter.max_network_rows)
        self.has_choice = len(self.shapes.all) > 1  # else there is nothing to learn either
        self.network_rows = NetworkRows(drafter, self.shapes, rows)
        self.choice = ShapeChoice(drafter, self.shapes, self.network_rows, self.costs)
        self.lookup_estimate = self.choice.lookup_estimate
        self.network_estimate = self.choice.network_estimate
        # By row: its newest line of results, with the columns of `kernels.step`; the line before;
        # the shape of the step that the newest comes from. Step n was chosen by the line of step
        # n-2. When its own line comes, the newest is that of step n-1, so that was the line before.
        self.lines, self.lines_before = [NO_LINE] * num_rows, [NO_LINE] * num_rows
        self.line_shapes = [StepShape(0)] * num_rows
        self.counts = StepCounts()
        self._num_rows = self._num_tokens = 0  # rows and tokens of the last result
        self._num_steps = 0  # steps with guesses, since many requests came at once
        # The last choice: the steps that it is for (rows, extras, whether the network is current),
        # the shape, and how many more steps may have it.
        self._last_choice: tuple[tuple[int, int, bool], StepShape] | None = None
        self._num_uses = 0

    def drafts_at(self, num_rows: int) -> bool:
        """Whether steps of this many rows run the drafter, to draft or to write its KV."""
        return self.shapes.checks_at(num_rows) or self.drafter.writes_kv(0)

    # --- before a step ----------------------------------------------------------------------------

    def start(self, ids: list[int]) -> None:
        """Requests came into these rows."""
        if len(ids) >= MANY:
            self._num_uses = self._num_steps = 0
        self.network_rows.start(ids)
        self.lookup_estimate.start(ids)
        self.network_estimate.start(ids)
        self._clear_lines(ids)

    def _clear_lines(self, ids: list[int]) -> None:
        """Nothing was drafted for these rows."""
        for row in ids:
            self.lines[row] = self.lines_before[row] = NO_LINE
            self.line_shapes[row] = StepShape(0)

    def choose(self, row_R: np.ndarray, *, extras: int = 0) -> StepShape:
        """The shape of the next step: the one with the most expected tokens per second."""
        shape = self._next_shape(row_R, extras)
        self._num_uses -= 1
        return shape

    def _next_shape(self, row_R: np.ndarray, extras: int = 0) -> StepShape:
        """The shape that the next `choose` returns for these rows.

        It is the only one there is, the last choice while that may be used again, or the best.
        """
        num_rows = 1 << (len(row_R) - 1).bit_length()
        shapes = self.shapes.at(num_rows)
        if len(shapes) == 1:
            return shapes[0]
        steps = num_rows, extras, self.network_rows.are_current(row_R)
        if self._num_uses > 0 and self._last_choice is not None and self._last_choice[0] == steps:
            return self._last_choice[1]
        if self.shapes.has_lookup:
            for row in row_R.tolist():
                self.lookup_estimate.match[row] = match_of(self.lines[row])
        shape = self.choice.best(row_R, num_rows, extras)
        self._last_choice = steps, shape
        self._num_uses = CHOOSE_EVERY if self._skips_steps(len(row_R)) else 1
        return shape

    def _skips_steps(self, num_rows: int) -> bool:
        """Whether most steps of this many rows use the last choice, and teach only a part of it."""
        return num_rows >= MANY and self._num_steps > FIRST_STEPS

    def is_ready(self, shape: StepShape, row_R: np.ndarray) -> bool:
        """Whether a step of these rows can have this shape at once.

        If not, a draft model must first read the tokens that it missed, which is counted.
        """
        is_ready = self.network_rows.is_ready(shape, row_R)
        self.counts.num_changes += not is_ready
        return is_ready

    def shape_to_launch(self, shape: StepShape, row_R: np.ndarray) -> StepShape:
        """Note that a step of this shape is launched next; returns the shape that it can have."""
        has_network = self.network_rows.has_network
        return self.network_rows.shape_to_launch(shape, row_R) if has_network else shape

    def catch_up(
        self, ids: list[int], run: Callable[[list[int]], None], running: Collection[int] = ()
    ) -> None:
        """Let the draft model read what it missed of these rows, if it will draft for them.

        `run` launches its passes. The model will draft if the next step of all `running` rows has a
        source that uses it.
        """
        if not ids or not self.network_rows.fits_network[[*ids, *running]].any():
            return
        self.network_rows.is_current[ids] = True  # assume that it has caught up
        source = self._next_shape(np.array(sorted({*ids, *running}))).source
        if self.drafter.writes_kv(source):
            began = perf_counter()
            run(ids)
            self.counts.num_read += len(ids)
            self.counts.read_seconds += perf_counter() - began
        self.network_rows.is_current[ids] = self.rows.computed[-1, ids] >= self.rows.known[ids]

    # --- after a step -----------------------------------------------------------------------------

    def timed(
        self,
        graph: CapturedStep,
        seconds: float,
        since: float | None = None,
        other_seconds: float = 0.0,
    ) -> tuple[float, float]:
        """A step was timed; returns the target's seconds, and what a plain step would have taken.

        seconds: of the device.
        since: seconds since the last result; None: the device was idle meanwhile.
        other_seconds: the part of these that went to prompts and to steps run by the host.
        """
        if self.is_plain:
            return seconds, seconds
        key, costs = graph.key, self.costs
        own = None if since is None else max(since - other_seconds, 0.0)
        self.counts.shapes[key[:2]].add(self._num_tokens, seconds, max((own or 0.0) - seconds, 0.0))
        self.counts.prompt_seconds += other_seconds
        if seconds > 0.0:
            costs.record(key, seconds)
            if own is not None:
                costs.host[key.extras].record(
                    self._num_rows, key.shape, own, seconds, has_waited=other_seconds > 0.0
                )
        target = target_seconds(seconds, graph.draft_seconds)
        plain = StepKey(key.num_rows, StepShape(0), key.extras)
        share = costs.target(plain) / costs.target(key)
        return target, target * min(share, 1.0)

    def learn(
        self, row_R: np.ndarray, lines: list[list[int]], graph: CapturedStep
    ) -> list[str] | None:
        """Learn from a step's result; returns the method that drafted each row's checked nodes.

        lines: one per row, with the columns of `kernels.step`. None: no nodes were checked.
        """
        ids: list[int] = row_R.tolist()
        self._num_rows, self._num_tokens = len(ids), sum([line[TOKENS] for line in lines])
        shape = graph.key.shape
        can_guess = shape.source != DraftSource.NOBODY and self.shapes.checks_at(graph.key.num_rows)
        if not (shape.num_nodes or can_guess):
            self._clear_lines(ids)
            return None
        drafted_by = self._drafted_by(ids) if shape.num_nodes else None
        self._num_steps += 1
        if self.has_choice:
            self._learn(ids, lines, graph.key)
        newest, before, shapes = self.lines, self.lines_before, self.line_shapes
        for row, line in zip(ids, lines, strict=True):
            before[row], newest[row], shapes[row] = newest[row], line, shape
        return drafted_by

    def _drafted_by(self, ids: list[int]) -> list[str]:
        """The method that drafted each row's waiting draft."""
        if not self.network_rows.has_network:
            return [self.drafter.drafted_by(DraftSource.LOOKUP, 0)] * len(ids)
        lines, shapes, drafted_by = self.lines, self.line_shapes, self.drafter.drafted_by
        return [drafted_by(shapes[row].source, lines[row][MATCHED]) for row in ids]

    def _learn(self, ids: list[int], lines: list[list[int]], key: StepKey) -> None:
        """Learn from the guesses that waited for a step: those of all rows, or of some in turn."""
        pairs, num_turns = list(zip(ids, lines, strict=True)), 1
        if self._skips_steps(len(ids)):
            num_turns = max(CHOOSE_EVERY, -(-len(ids) // MAX_LEARNED))
            turn = self._num_steps % num_turns
            pairs = [pair for pair in pairs if pair[0] % num_turns == turn]
        if num_turns == 1 or self._num_steps % CHOOSE_EVERY == 0:
            self.choice.count_lost(key, len(ids), self._num_tokens)
        weight, errors = 1.0 / len(ids), defaultdict[int, float](float)  # by source
        has_lookup, has_network = self.shapes.has_lookup, self.network_rows.has_network
        for row, line in pairs:
            if has_lookup:
                errors[DraftSource.LOOKUP] += self._learn_lookup(row, line, weight, key.shape)
            if has_network:
                errors[self.line_shapes[row].source] += self._learn_network(
                    row, line, weight, key.shape
                )
        for source, error in errors.items():
            if error:
                estimate = self.network_estimate if source > 0 else self.lookup_estimate
                estimate.calibrate(source, weight * error)
        if has_network and key.shape.source <= 0:
            self.network_estimate.fade([row for row, _ in pairs], weight * len(pairs))

    def _learn_lookup(self, row: int, line: list[int], weight: float, shape: StepShape) -> float:
        """Learn from a lookup's guesses for a row, whether they were checked or not.

        Returns the relative error of their expected gain, if they were checked.
        """
        num_checked_before, source = self.line_shapes[row]
        first, run = FIRST + num_checked_before + 1, 0
        guesses = self.lines[row][first : first + self.shapes.max_nodes]
        most = min(line[TOKENS], len(guesses))
        while run < most and guesses[run] == line[FIRST + run]:
            run += 1
        estimate, match = self.lookup_estimate, match_of(self.lines_before[row])
        odds = estimate.learn(row, run, run + (run < most), weight=weight, match=match)
        if not (shape.num_nodes and source <= 0 and most):
            return 0.0
        expected = estimate.gain(odds, DraftSource.LOOKUP, shape.num_nodes)
        return relative_error(expected, min(run, shape.num_nodes))

    def _learn_network(self, row: int, line: list[int], weight: float, shape: StepShape) -> float:
        """Learn from the network's guesses that were checked; returns as `_learn_lookup` does."""
        num_nodes = shape.num_nodes
        matched, (num_checked_before, source) = self.lines[row][MATCHED], self.line_shapes[row]
        if line[CHECKED] <= 0 or source <= 0:
            return 0.0
        is_sure = self.shapes.has_lookup and matched >= SURE_MATCH
        if source < DraftSource.MERGED and is_sure:
            return 0.0  # the draft was a lookup's
        run = line[TOKENS] - 1
        # If the row ended, it is not known what would have come next.
        is_missed = not line[REASON] and run < num_nodes
        levels, estimate = self.drafter.levels(source, num_checked_before), self.network_estimate
        odds = estimate.learn(row, run, run + is_missed, source, weight, levels)
        if not is_missed and run != num_nodes:
            return 0.0
        expected = estimate.gain(odds, source, min(num_nodes, levels))
        if source >= DraftSource.MERGED:
            num_beside = self.drafter.num_beside(source, num_checked_before)
            estimate, source = self.lookup_estimate, DraftSource.LOOKUP
            odds = estimate.odds(row, source, log_match(matched))
            expected *= 1.0 - estimate.gain(odds, source, 1)
            expected += estimate.gain(odds, source, num_beside)
        return relative_error(expected, run)


def match_of(line: list[int]) -> float:
    """The match behind the draft that a line tells of, as estimates take it."""
    return NEW_MATCH if line is NO_LINE else log_match(line[MATCHED])
