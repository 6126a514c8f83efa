"""The policy of captured steps: how many nodes the next one checks, and who drafts in it.

All rows of a captured step check the same number of nodes, and the host chooses a step before it
has read the result of the one before. `acceptance` estimates the tokens that a step gains, `costs`
the seconds that it takes, and `goodput` chooses by both.

Shape letters: R rows of the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from time import perf_counter

import numpy as np

from hunch.drafting.base import DeviceDrafter
from hunch.drafting.beside_steps import Flow, HostTime, PromptLoad
from hunch.drafting.costs import StepCosts, target_seconds
from hunch.drafting.gains import SourceGains
from hunch.drafting.goodput import OF_LOOKUPS, OF_NETWORKS, best_rate, gain_of_rows
from hunch.drafting.held_choice import PAUSED, HeldChoice
from hunch.drafting.network_use import NetworkUse, RowLengths, Trees
from hunch.drafting.step_counts import StepCounts
from hunch.drafting.step_shapes import SURE, CapturedStep, DraftSource, StepShape, StepShapes
from hunch.drafting.trials import SourceTrials
from hunch.kernels.step import CHECKED, FIRST, MATCHED, REASON, TOKENS

# From MANY rows on, a choice is kept for HELD steps, and the policy learns from one step in TAUGHT:
# doing both in every step took a third of a small target's step (16 rows, 135M, H200), and the mean
# of many rows changes slowly. The first FIRST_STEPS steps of requests that came together are all
# chosen and learned from: else a source that does not pay would be tried for longer.
MANY, HELD, TAUGHT, FIRST_STEPS = 16, 4, 3, 8
LITTLE_HOPE = 0.05  # log-odds below which hope makes no difference


class CapturedPolicy:
    """Chooses the shapes of captured steps, and learns from their results."""

    def __init__(
        self,
        drafter: DeviceDrafter | None,
        rows: RowLengths,
        *,
        is_measured: bool = True,
    ) -> None:
        num_rows = len(rows.known)
        self.drafter, self.rows = drafter, rows
        self.shapes = StepShapes(
            (StepShape(0),) if drafter is None else drafter.shapes,
            can_pause=drafter is None or not drafter.writes_kv(DraftSource.NOBODY),
        )
        # Costs of steps whose rows ask for nothing but tokens, and of others by what they ask for.
        self.costs = StepCosts(is_measured=is_measured)
        self._other_costs: dict[int, StepCosts] = {}
        self.margin = 0.0 if drafter is None else drafter.margin
        self.gains = SourceGains(drafter, self.shapes, num_rows)
        self.lookup, self.network = self.gains.lookup, self.gains.network
        self.network_use = NetworkUse(drafter, self.shapes, rows)
        self.guesses: list[list[int]] = [[]] * num_rows  # of lookups, to be compared with tokens
        self.trees = Trees(drafter, self.shapes, num_rows)
        self.drafted = [(0, 0)] * num_rows  # source and match of the waiting draft,
        self.drafted_in = [0] * num_rows  # and how many nodes the step checked that drafted it
        # Whether a row's request names a network or a lookup; None: it names neither.
        self.by_network: list[bool | None] = [None] * num_rows
        self.flow = Flow(num_rows)
        self.load = PromptLoad()
        self._host: defaultdict[int, HostTime] = defaultdict(HostTime)  # by what rows ask for
        self.trials = SourceTrials(self.network_use)
        self.counts = StepCounts()
        self._num_learned = self._num_tokens = 0  # rows and tokens of the last result
        self.held = HeldChoice()
        self._num_steps = 0  # with guesses, since requests came while none were running

    def drafts_at(self, num_rows: int) -> bool:
        """Whether steps of this many rows run the drafter, to draft or to keep up its KV."""
        writes_kv = self.drafter is not None and self.drafter.writes_kv(0)
        return self.shapes.checks_at(num_rows) or writes_kv

    # --- before a step ----------------------------------------------------------------------------

    def start(self, ids: list[int]) -> None:
        """Requests came into these rows at the same time."""
        is_first = self.flow.start(ids, self.rows.requests)
        if is_first:
            self.held.clear()
            self._num_steps = 0
        self.network_use.start(ids, is_first=is_first)
        self.lookup.start(ids)
        self.network.start(ids)
        self.trees.start(ids, is_first=is_first)
        self._clear_guesses(ids)

    def _clear_guesses(self, ids: list[int]) -> None:
        """No guesses were made for these rows."""
        for row in ids:
            self.guesses[row], self.drafted[row] = [], (0, 0)
        self.lookup.clear_match(ids)

    def costs_of(self, extras: int) -> StepCosts:
        """The costs of steps whose rows ask for these extras."""
        if not extras:
            return self.costs
        if extras not in self._other_costs:
            costs = self.costs
            self._other_costs[extras] = StepCosts(is_measured=costs.is_measured, free=costs)
        return self._other_costs[extras]

    def choose(self, row_R: np.ndarray, *, extras: int = 0) -> StepShape:
        """The shape of the next step: the one with the most expected tokens per second."""
        num_rows = 1 << (len(row_R) - 1).bit_length()
        shape = self._next(row_R, num_rows, extras)
        if len(self.shapes.at(num_rows)) > 1:
            self.held.take(shape, can_pause=self.shapes.can_pause(num_rows))
        return shape

    def _next(self, row_R: np.ndarray, num_rows: int, extras: int = 0) -> StepShape:
        """The only shape of such a step, a pause, the shape held for these rows, or the best."""
        shapes = self.shapes.at(num_rows)
        if len(shapes) == 1:
            return shapes[0]
        if self.held.num_pause and self.shapes.can_pause(num_rows):
            return PAUSED
        rows = num_rows, extras, int(self.network_use.is_current[row_R].all())
        shape = self.held.of(rows)
        if shape is None:
            shape = self._best(row_R, num_rows, extras)
            self.held.hold(rows, shape, HELD if self._skips_steps(len(row_R)) else 1)
        return shape

    def _skips_steps(self, num_rows: int) -> bool:
        """Whether the policy skips choosing and learning in most steps of this many rows."""
        return num_rows >= MANY and self._num_steps > FIRST_STEPS

    def _best(self, row_R: np.ndarray, num_rows: int, extras: int) -> StepShape:
        shapes = self.shapes.at(num_rows)
        tokens, costs = self._tokens(row_R, num_rows), self.costs_of(extras)
        seconds = [self._seconds(extras, num_rows, len(row_R), shape) for shape in shapes]
        if self.network.priors:
            tokens = self._without_unnamed(row_R, shapes, tokens)
        if costs.is_measured and not shapes[0].num_nodes:
            tokens = self.trials.discounted(num_rows, shapes, tokens, seconds)
        if self.network_use.can_catch_up or self.network_use.can_drop:
            shapes, tokens, seconds = self.network_use.choose(
                row_R, shapes, tokens, seconds, is_flowing=self.flow.is_on
            )
        if self.trees.sources:
            shapes, tokens, seconds = self.trees.choose(row_R, (list(shapes), tokens, seconds))
        shape = shapes[best_rate(tokens, seconds, self.margin * (shapes[0].num_nodes == 0))]
        if shape.source > 0 and self.network.hope_left(len(row_R)) > LITTLE_HOPE:
            shape = self._best_without_hope(
                row_R, num_rows, dict(zip(shapes, seconds, strict=True))
            )
        return shape

    def _best_without_hope(
        self, row_R: np.ndarray, num_rows: int, seconds: dict[StepShape, float]
    ) -> StepShape:
        """The network's best shape: hope decides that the network drafts, not how much."""
        tokens = self._tokens(row_R, num_rows, is_hopeful=False)
        pairs = zip(self.shapes.at(num_rows), tokens, strict=True)
        some = [(one, gain) for one, gain in pairs if one.source > 0 and one.num_nodes]
        return max((gain / seconds[one], one) for one, gain in some if one in seconds)[1]

    def _seconds(self, extras: int, num_rows: int, num_here: int, shape: StepShape) -> float:
        """Seconds from one step to the next, with prompts and the host's work."""
        costs = self.costs_of(extras)
        seconds = costs.seconds(num_rows, shape)
        if not costs.is_measured:
            return seconds
        return self.load.with_reading(max(seconds, self._host[extras].seconds(num_here, shape)))

    def _tokens(self, row_R: np.ndarray, num_rows: int, *, is_hopeful: bool = True) -> list[float]:
        """Expected tokens of a row in a step of each shape."""
        ids, is_flowing = row_R.tolist(), self.flow.is_on
        by_shape: dict[tuple[int, int], float] = {}
        for source, sizes in self.shapes.sizes_at(num_rows).items():
            gains = self.gains.of_rows(
                ids, sizes, source, is_doubtful=not is_flowing, is_hopeful=is_hopeful
            )
            weights = OF_NETWORKS if source > 0 else OF_LOOKUPS
            for size, some in zip(sizes, zip(*gains, strict=True), strict=True):
                by_shape[size, source] = 1.0 + gain_of_rows(some, weights, is_flowing=is_flowing)
        return [by_shape.get(shape, 1.0) for shape in self.shapes.at(num_rows)]

    def _without_unnamed(
        self, row_R: np.ndarray, shapes: Sequence[StepShape], tokens: list[float]
    ) -> list[float]:
        """If all requests name a network, or all a lookup: no tokens for the other."""
        named = {self.by_network[row] for row in row_R.tolist()}
        if len(named) > 1 or None in named:
            return tokens
        (by_network,) = named
        pairs = zip(shapes, tokens, strict=True)
        return [gain if (shape.source > 0) == by_network else 1.0 for shape, gain in pairs]

    def is_ready(self, shape: StepShape, row_R: np.ndarray) -> bool:
        """Whether a step of these rows can have this shape without catching up first."""
        is_ready = self.network_use.is_ready(shape, row_R)
        self.counts.num_changes += not is_ready
        return is_ready

    def launch(self, shape: StepShape, row_R: np.ndarray) -> StepShape:
        """A step of this shape is launched; returns the shape without nodes if it drops trees."""
        if self.drafter is None or not self.network.priors:
            return shape
        shape = self.trees.launch(shape, row_R)
        self.network_use.launch(shape, row_R)
        return shape

    def expect(self, ids: list[int], running: Sequence[int]) -> None:
        """Choose now for a step of the `running` rows and these, whose prompts are being read.

        The host has time for it while the device reads them, and none after that.
        """
        if self.network_use.can_catch_up:
            was_current = self.network_use.is_current[ids]
            self._next_source(ids, running)
            self.network_use.is_current[ids] = was_current

    def catch_up(
        self, ids: list[int], run: Callable[[list[int]], None], running: Collection[int] = ()
    ) -> None:
        """Let the network catch up on these rows (by `run`), if it will draft for them.

        Whether it will depends on all `running` rows, as they share steps.
        """
        assert self.drafter is not None
        if not ids or not self.drafter.can_follow(self.rows.view(ids)):
            return
        if self.drafter.writes_kv(self._next_source(ids, running)):
            began = perf_counter()
            run(ids)
            self.counts.num_read += len(ids)
            self.counts.read_seconds += perf_counter() - began
        self.network_use.is_current[ids] = self.rows.computed[-1, ids] >= self.rows.known[ids]

    def _next_source(self, ids: list[int], running: Collection[int]) -> int:
        """Who drafts in the next step of these rows, if the network has caught up on `ids`."""
        row_R = np.array(sorted({*ids, *running}))
        self.network_use.is_current[ids] = True
        return self._next(row_R, 1 << (len(row_R) - 1).bit_length()).source

    # --- after a step -----------------------------------------------------------------------------

    def captured(self, graph: CapturedStep) -> bool:
        """A step was captured and timed; True: that is new."""
        shape = StepShape(graph.num_nodes, graph.source)
        costs = self.costs_of(graph.extras)
        return costs.capture(graph.num_rows, shape, graph.seconds, graph.draft_seconds)

    def timed(
        self,
        graph: CapturedStep,
        seconds: float,
        since: float | None = None,
        reading: float = 0.0,
    ) -> tuple[float, float]:
        """A step was timed; returns the target's seconds, and those of a plain step instead.

        since: seconds since the last result, if this step was already running then.
        reading: seconds of what the host ran beside it, mostly prompts.
        """
        if self.drafter is None:  # all steps are plain: there is nothing to choose
            return seconds, seconds
        num_rows, shape = graph.num_rows, StepShape(graph.num_nodes, graph.source)
        target = target_seconds(seconds, graph.draft_seconds)
        costs = self.costs_of(graph.extras)
        own = None if since is None else max(since - reading, 0.0)
        late = 0.0 if own is None else max(own - seconds, 0.0)
        self.counts.step(num_rows, shape, self._num_tokens, seconds, late)
        self.counts.prompt_seconds += reading
        if seconds > 0.0:
            self.load.record(since or seconds + reading, reading)
            costs.record(num_rows, shape, seconds, own)
            if own is not None:
                self._host[graph.extras].record(
                    self._num_learned, shape, own, seconds, has_waited=reading > 0.0
                )
        plain = costs.seconds(num_rows, StepShape(0), is_target=True)
        share = plain / costs.seconds(num_rows, shape, is_target=True)
        return target, target * min(share, 1.0)

    def learn(
        self, row_R: np.ndarray, lines: list[list[int]], graph: CapturedStep
    ) -> list[str] | None:
        """Learn from a step's result, a line per row; returns who drafted what it checked."""
        assert self.drafter is not None
        ids: list[int] = row_R.tolist()
        self._num_learned, self._num_tokens = len(ids), sum([line[TOKENS] for line in lines])
        self.flow.step(row_R)
        can_guess = graph.source != DraftSource.NOBODY and self.shapes.checks_at(graph.num_rows)
        if not (graph.num_nodes or can_guess):
            self._clear_guesses(ids)
            return None
        drafted_by = None
        if graph.num_nodes:
            drafted_by = [self.drafter.drafted_by(*self.drafted[row]) for row in ids]
        self._num_steps += 1
        if self._skips_steps(len(ids)) and self._num_steps % TAUGHT:
            self._note(ids, lines, graph)
            return drafted_by
        runs = self._learn_lookup(ids, lines, graph.num_nodes) if self.shapes.has_lookup else []
        if self.costs_of(graph.extras).is_measured:
            self._try([line[TOKENS] for line in lines], runs, graph)
        if self.network.priors:
            self._learn_network(ids, lines, runs, graph)
        return drafted_by

    def _note(self, ids: list[int], lines: list[list[int]], graph: CapturedStep) -> None:
        """Keep the new guesses of a step that is not learned from."""
        first = FIRST + graph.num_nodes + 1
        end = first + self.shapes.max_nodes
        for row, line in zip(ids, lines, strict=True):
            if self.shapes.has_lookup:
                self.lookup.note_match(row, line[MATCHED])
                self.guesses[row] = line[first:end]
            if self.network.priors:
                self._note_draft(row, line, graph)

    def _note_draft(self, row: int, line: list[int], graph: CapturedStep) -> None:
        """Remember who made the row's new draft."""
        self.drafted[row], self.drafted_in[row] = (graph.source, line[MATCHED]), graph.num_nodes

    def _try(self, tokens: list[int], runs: list[int], graph: CapturedStep) -> None:
        """Count what the step lost or gained against the best choice without its source."""
        num_rows, shape = graph.num_rows, StepShape(graph.num_nodes, graph.source)
        if not self.trials.is_speculative(shape):
            self.trials.plain_step(num_rows)
            return
        steps = (shape, StepShape(0), self.trials.instead)
        seconds = [self._seconds(graph.extras, num_rows, len(tokens), one) for one in steps]
        by_network = self.network_use.is_network(shape)
        lost = self.trials.learn(num_rows, shape, seconds, tokens, runs or [0] * len(tokens))
        self.counts.lost["network" if by_network else "lookup"] += lost

    def _learn_lookup(self, ids: list[int], lines: list[list[int]], num_nodes: int) -> list[int]:
        """Learn from all guesses, checked or not; returns how many of each row's were right."""
        lookup, weight, runs = self.lookup, 1.0 / len(ids), list[int]()
        guesses_at, num_guesses = FIRST + num_nodes + 1, self.shapes.max_nodes
        for row, line in zip(ids, lines, strict=True):
            run, guesses = 0, self.guesses[row]
            most = min(line[TOKENS], len(guesses))
            while run < most and guesses[run] == line[FIRST + run]:
                run += 1
            checked = num_nodes if self.drafted[row][0] <= 0 else 0
            lookup.learn(row, run, run + (run < most), weight=weight, num_checked=checked)
            lookup.note_match(row, line[MATCHED])
            self.guesses[row] = line[guesses_at : guesses_at + num_guesses]
            runs.append(run)
        return runs

    def _learn_network(
        self, ids: list[int], lines: list[list[int]], runs: list[int], graph: CapturedStep
    ) -> None:
        """Learn from the network's guesses that were checked."""
        assert self.drafter is not None
        network, weight = self.network, 1.0 / len(ids)
        for place, (row, line) in enumerate(zip(ids, lines, strict=True)):
            (source, matched), run = self.drafted[row], line[TOKENS] - 1
            made = self.drafted_in[row]
            # If the row ended, it is not known what would have come next.
            is_missed = not line[REASON] and run < graph.num_nodes
            checked = graph.num_nodes if is_missed or run == graph.num_nodes else 0
            if line[CHECKED] <= 0 or source <= 0:
                pass
            elif source == DraftSource.MERGED:
                if checked:
                    expected = self.gains.of_both(row, self.lookup.before[row], made)
                    network.calibrate(source, expected, run, weight)
                levels, is_most = self.gains.levels(source, made), runs[place] >= run
                seen = run + is_missed
                network.learn(row, run, seen, source, weight, is_most=is_most, num_levels=levels)
            elif not (runs and matched >= SURE):
                levels, seen = self.gains.levels(source, made), run + is_missed
                network.learn(row, run, seen, source, weight, checked, num_levels=levels)
            self._note_draft(row, line, graph)
        if graph.source <= 0:
            network.fade(ids)
