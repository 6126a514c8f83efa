"""How steps that fly go: nodes checked and who drafts, by what was right and what steps cost.

A drafter with a network can only draft with it for rows whose tokens the network has all seen. A
row is *fresh* while every step since the host read it to the network drafted with it; a step
without leaves a hole, and the host reads the row again before the network drafts for it.

Shape letters: R rows of the step, N nodes of a step's draft, C columns of a result.
"""

from __future__ import annotations

import numpy as np

from hunch.drafting.base import DeviceDrafter
from hunch.drafting.fast_pace import new_pace
from hunch.drafting.pace import REST, Pace, StepShape
from hunch.kernels.gpu_step import CHECKED, FIRST, MATCHED, REASON, TOKENS
from hunch.step.costs import StepCosts
from hunch.step.passes import Reader
from hunch.step.rows import RowBuffers
from hunch.step.step_graphs import StepGraph, bucket

MAX_CHECKED = 128  # packed tokens up to which a step may check nodes; beyond, they do not pay
MIN_CHECKED = 16  # packed tokens a product takes at once; below, one node takes as long as three
# Sizes of steps with a network, per number of rows, alone and beside lookups: each takes time to
# capture.
NUM_ALONE, NUM_BESIDE = 3, 2
# Shares by which another must promise more than the one a step would go on in. A step without
# the network saves what the network takes and no more, as long matches are taken with it too: a
# lookup that promises much more than that was lucky, or the network fails.
SWITCH, LEAVE = 0.1, 0.4
# How quickly it is learned by how much steps keep the device waiting for the host, how much of a
# step that can be (a pause is no cost), and how quickly what is not seen again is forgotten.
LATE_RATE, MAX_LATE, LATE_FADE = 0.05, 0.5, 0.003
# Rows from which on lookups rest while they do not pay, as they take the host's time and the
# device's; plain steps after which they do, steps that they rest, and steps to listen, then or with
# new rows, before a node is checked.
MIN_REST, TIRED, RESTED, LISTENING = 32, 4, 32, 4
READS = 32  # tokens worth reading to a network for one that a row may still say


class StepShapes:
    """Chooses how a step goes, and learns from what it did."""

    def __init__(self, drafter: DeviceDrafter | None, rows: RowBuffers) -> None:
        num_rows = len(rows.known)
        self.drafter, self.rows = drafter, rows
        if drafter is None:
            self.pace: Pace = Pace(num_rows, (StepShape(0),))
        else:
            self.pace = new_pace(
                num_rows,
                drafter.shapes,
                drafter.margin,
                drafter.num_levels,
                is_guided=drafter.is_guided,
            )
        self.has_sources = any(shape.source for shape in self.pace.shapes)
        # Steps without the network leave holes, and somebody can read it what it missed.
        self.can_miss = self.has_sources and drafter is not None and drafter.network is not None
        self.costs = StepCosts()
        self._draft_seconds: dict[tuple[int, StepShape], float] = {}  # by rows
        self._late_seconds: dict[tuple[int, bool], float] = {}  # by rows; are nodes checked
        self._is_fresh = np.zeros(num_rows, dtype=np.bool_)
        # In which source each row's waiting draft was made, and how long a match was behind it.
        self._source = np.zeros(num_rows, dtype=np.int64)
        self._matched = np.zeros(num_rows, dtype=np.int64)
        self._is_tree = np.zeros(num_rows, dtype=np.bool_)  # what the last launched step drafts
        self._at: dict[int, list[StepShape]] = {}
        self._num_plain = 0  # steps that checked nothing, one after the other
        self._num_rest = 0  # steps to come before a node is checked: first resting, then listening

    def at(self, num_rows: int) -> list[StepShape]:
        """StepShapes of a step of so many rows."""
        if num_rows not in self._at:
            shapes = self.pace.shapes
            few = [shape for shape in shapes if num_rows * (1 + shape.num_nodes) <= MAX_CHECKED]
            if 2 * num_rows < MIN_CHECKED and StepShape(3) in few:
                few = [shape for shape in few if shape != StepShape(1)]
            most = NUM_BESIDE if self.pace.has_lookup else NUM_ALONE
            dropped = [shape for shape in few if shape.source][:-most]
            self._at[num_rows] = [shape for shape in few if shape not in dropped] or [shapes[0]]
        return self._at[num_rows]

    def checks_at(self, num_rows: int) -> bool:
        """Whether a step of so many rows may check nodes."""
        return any(shape.num_nodes for shape in self.at(num_rows))

    def drafts_at(self, num_rows: int) -> bool:
        """Whether the drafter has a part in it: where none checks nodes, KV must be kept up."""
        return self.checks_at(num_rows) or (self.drafter is not None and self.drafter.writes_kv(0))

    def to_prepare(self, num_rows: int) -> list[StepShape]:
        """The same, and the steps that begin drafting."""
        shapes = self.at(num_rows)
        first = [StepShape(0, source) for source in sorted({shape.source for shape in shapes})]
        if self._can_rest(num_rows):
            first.append(StepShape(0, REST))
        return shapes + [shape for shape in first if shape not in shapes]

    def _can_rest(self, num_rows: int) -> bool:
        """Beside a network lookups are a small part of what drafting takes."""
        return num_rows >= MIN_REST and not self.has_sources and len(self.at(num_rows)) > 1

    # --- before a step ----------------------------------------------------------------------------

    def start(self, ids: list[int]) -> None:
        """Requests came into these rows, together."""
        others = set(self.pace.settled()).difference(ids)
        is_beside = any(self.rows.requests[other] is not None for other in others)
        self.pace.start(ids, is_beside=is_beside)
        if not is_beside:
            self._num_plain, self._num_rest = 0, LISTENING
        self._is_fresh[ids] = self._is_tree[ids] = False
        self._source[ids] = 0

    def choose(self, row_R: np.ndarray, *, is_host: bool = False) -> StepShape:
        """How a step of these rows had best go, whatever they wait with.

        While the host is at it, reading rows to a network is no change.
        """
        num_rows = bucket(len(row_R))
        shapes = self.at(num_rows)
        if len(shapes) == 1:
            return shapes[0]
        can_rest = self._can_rest(num_rows)
        if can_rest and self._num_rest:
            self._num_rest -= 1
            return StepShape(0, REST if self._num_rest >= LISTENING else 0)
        seconds = {shape: self._seconds(num_rows, shape) for shape in shapes}
        if self.can_miss:
            seconds = self._with_changes(row_R, seconds, is_host)
        # Of the step that flies at least one will be said.
        left_R = np.maximum(self.rows.end[row_R] - self.rows.known[row_R] - 1, 1)
        shape = self.pace.choose(row_R, seconds, left_R)
        self._num_plain = 0 if shape.num_nodes else self._num_plain + 1
        if can_rest and self._num_plain >= TIRED:
            self._num_plain, self._num_rest = 0, RESTED + LISTENING
        return shape

    def _with_changes(
        self, row_R: np.ndarray, seconds: dict[StepShape, float], is_host: bool
    ) -> dict[StepShape, float]:
        """Going on in another source costs: a hole to be read, a tree to be dropped."""
        if not self._is_fresh[row_R].all():
            if not self._is_worth_reading(row_R):
                return {g: s for g, s in seconds.items() if not g.source}
            return {
                g: s * (1.0 + SWITCH * (g.source > 0 and not is_host)) for g, s in seconds.items()
            }
        is_tree = bool(self._is_tree[row_R].any())
        return {g: s * (1.0 + self._price(g, is_tree)) for g, s in seconds.items()}

    def _price(self, shape: StepShape, is_tree: bool) -> float:
        """Of going on so after steps with the network."""
        assert self.drafter is not None
        if shape.source:
            return SWITCH if is_tree and not self.drafter.depth(shape.source) else 0.0
        return LEAVE if shape.num_nodes else 0.0

    def is_ready(self, shape: StepShape, row_R: np.ndarray) -> bool:
        """Whether a step of these rows can go so without the host."""
        return not (self.can_miss and shape.source) or bool(self._is_fresh[row_R].all())

    def _seconds(self, num_rows: int, shape: StepShape) -> float:
        """From one step to the next: what it takes the device, and how long the host keeps it."""
        drafting, rows = None, num_rows
        while drafting is None and rows:  # a size that was not captured drafts as the one below it
            drafting = self._draft_seconds.get((rows, shape))
            rows //= 2
        late = self._late_seconds.get((num_rows, shape.num_nodes > 0), 0.0)
        return self.costs.seconds(num_rows, shape) + (drafting or 0.0) + late

    def _is_worth_reading(self, row_R: np.ndarray) -> bool:
        assert self.drafter is not None
        rows = self.rows
        missing = (rows.known[row_R] - rows.computed[-1, row_R]).sum()
        to_come = (rows.end[row_R] - rows.known[row_R]).sum()
        is_short = self.drafter.can_follow(rows.view(row_R.tolist()))
        return is_short and bool(missing <= READS * to_come)

    def launch(self, shape: StepShape, row_R: np.ndarray) -> StepShape:
        """The step is launched so; a tree that waits can only be checked as a tree."""
        if self.drafter is None or not self.has_sources:
            return shape
        is_tree = self.drafter.depth(shape.source) > 0
        if not is_tree and self._is_tree[row_R].any():
            shape = StepShape(0, shape.source)
        self._is_tree[row_R] = is_tree
        if not shape.source:
            self._is_fresh[row_R] = False
        return shape

    # --- after a step -----------------------------------------------------------------------------

    def captured(self, graph: StepGraph) -> None:
        shape = StepShape(graph.num_nodes, graph.source)
        self._draft_seconds.setdefault((graph.num_rows, shape), graph.draft_seconds)
        self.costs.capture(graph.num_rows, shape, _targets_part(graph, graph.seconds))

    def landed(
        self, graph: StepGraph, seconds: float, since: float | None = None
    ) -> tuple[float, float]:
        """What a step took: the target's seconds, and what a plain step would have taken.

        since: seconds since the landing before, if the host did nothing but flights.
        """
        num_rows, shape = graph.num_rows, StepShape(graph.num_nodes, graph.source)
        target_seconds = _targets_part(graph, seconds)
        if seconds > 0.0:
            self.costs.record(num_rows, shape, target_seconds)
            if since is not None:
                late = min(max(since - seconds, 0.0), MAX_LATE * seconds)
                self._learn_late(num_rows, shape.num_nodes > 0, late)
        share = self.costs.seconds(num_rows, StepShape(0)) / self.costs.seconds(num_rows, shape)
        return target_seconds, target_seconds * min(share, 1.0)

    def _learn_late(self, num_rows: int, is_checking: bool, late: float) -> None:
        """Steps of the other kind are slowly thought alike: one slow step may be all they had."""
        times, key, other = self._late_seconds, (num_rows, is_checking), (num_rows, not is_checking)
        before = times.get(key, times.get(other, 0.0))
        times[key] = before + LATE_RATE * (late - before)
        if other in times:
            times[other] += LATE_FADE * (times[key] - times[other])

    def learn(self, row_R: np.ndarray, result_RC: np.ndarray, graph: StepGraph) -> list[str] | None:
        """Take in a step's result; returns who had drafted what it checked, if it did."""
        assert self.drafter is not None
        num_nodes, pace = graph.num_nodes, self.pace
        matched_R = result_RC[:, MATCHED]
        if not num_nodes and (graph.source == REST or not self.checks_at(graph.num_rows)):
            pace.pass_by(row_R)
            if self.has_sources:
                self._source[row_R] = self._matched[row_R] = 0
            return None
        tokens_RK = result_RC[:, FIRST : FIRST + num_nodes + 1]
        guess_RG = result_RC[:, FIRST + num_nodes + 1 :]
        pace.learn(row_R, result_RC[:, TOKENS], tokens_RK, guess_RG, matched_R)
        sources = self._sources(row_R) if num_nodes else None
        if num_nodes and self.drafter.watch is not None:
            line_RC = result_RC[result_RC[:, CHECKED] > 0]
            guessed_R = np.minimum(line_RC[:, CHECKED], self.drafter.num_levels)
            self.drafter.watch.count(int(guessed_R.sum()), int((line_RC[:, TOKENS] - 1).sum()))
        if self.has_sources:
            is_drafted_R = (self._source[row_R] > 0) & (result_RC[:, CHECKED] > 0)
            for source in set(self._source[row_R[is_drafted_R]].tolist()):
                here_R = is_drafted_R & (self._source[row_R] == source)
                num_right_R = result_RC[here_R, TOKENS] - 1
                is_over_R = result_RC[here_R, REASON] > 0
                pace.learn_network(source, row_R[here_R], num_right_R, num_nodes, is_over_R)
            if not graph.source:
                pace.fade(row_R)
            self._source[row_R], self._matched[row_R] = graph.source, matched_R
        return sources

    def _sources(self, row_R: np.ndarray) -> list[str]:
        assert self.drafter is not None
        if not self.has_sources:
            return [self.drafter.drafted_by(0, 0)] * len(row_R)
        sources, matches = self._source[row_R].tolist(), self._matched[row_R].tolist()
        return list(map(self.drafter.drafted_by, sources, matches))

    # --- steps of the host ------------------------------------------------------------------------

    def read(self, ids: list[int], reader: Reader) -> None:
        """Where a network is to draft for these rows, read to it what it has not seen."""
        assert self.drafter is not None
        if not ids or not self.drafter.can_follow(self.rows.view(ids)):
            return
        if self.drafter.writes_kv(self.choose(np.array(ids), is_host=True).source):
            reader.read(ids)
        self._is_fresh[ids] = self.rows.computed[-1, ids] >= self.rows.known[ids]


def _targets_part(graph: StepGraph, seconds: float) -> float:
    """Of a step's seconds; what drafting takes was timed at another moment, so never nothing."""
    return max(seconds - graph.draft_seconds, 0.1 * seconds)
