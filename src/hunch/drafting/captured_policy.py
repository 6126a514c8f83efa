"""The policy of captured steps: how many nodes the next one checks, and who drafts in it.

All rows of a captured step check the same number of nodes, and the host chooses a step before it
has read the result of the one before.

Comments such as (HOPE=0: a head 0.97) give the mean speed without a rule over that with it, of a
group that `tests/policy_figures.py NAME=VALUE --texts 1000` prints. Shape letters: R rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from math import inf, log2
from time import perf_counter

import numpy as np

from hunch.drafting.acceptance import (
    NETWORK_PRIORS,
    NEW_MATCH,
    OWN_TEXT,
    WITH_PHRASES,
    AcceptanceEstimate,
    gain_of_either,
)
from hunch.drafting.base import DeviceDrafter
from hunch.drafting.costs import (
    Flow,
    HostTime,
    PromptLoad,
    StepCosts,
    StepKey,
    step_key,
    target_seconds,
)
from hunch.drafting.policy import Drafted, RowLengths, SourceChoice, best_rate, gain_of_rows
from hunch.drafting.step_shapes import (
    SURE,
    CapturedStep,
    DraftSource,
    StepCounts,
    StepShape,
    StepShapes,
)
from hunch.kernels.step import CHECKED, FIRST, MATCHED, REASON, TOKENS

# How much the mean gain of a step's rows counts beyond the gain of the row with the least: of
# lookups and of networks for requests that came together, and while requests keep coming; and the
# most tokens beyond the least that count for requests that came together. The least gain of a
# network's rows is less certain. (All 1, the mean alone: together 0.97, at worst 0.81; late host
# 0.93.)
OF_LOOKUPS, OF_NETWORKS, FLOWING, MAX_MORE = 0.2, 0.35, 0.5, 1.0
SURE_MATCH = log2(1 + SURE)  # see `_add_sure` (SURE_MATCH=99: open load 0.99, at worst 0.95)
LOOKUP_RATE, NETWORK_RATE = 0.04, 0.06  # at which the estimates learn
HOPE = 0.8  # log-odds added for a network that was not tried yet (HOPE=0: a head 0.97)

# From MANY rows on, the policy chooses and learns in one step of EVERY: doing both in every step
# took a third of a small target's step (16 rows, 135M, H200), and the mean of many rows changes
# slowly. The first FIRST_STEPS steps of requests that came together are all chosen and learned
# from: else a source that does not pay would be tried for longer.
MANY, EVERY, FIRST_STEPS = 16, 4, 8


class CapturedPolicy:
    """Chooses the shapes of captured steps, and learns from their results."""

    def __init__(
        self, drafter: DeviceDrafter | None, rows: RowLengths, *, is_measured: bool = True
    ) -> None:
        num_rows = len(rows.known)
        self.drafter, self.rows = drafter, rows
        self.shapes = shapes = StepShapes((StepShape(0),) if drafter is None else drafter.shapes)
        self.costs = StepCosts(is_measured=is_measured)
        self.margin = 0.0 if drafter is None else drafter.margin
        beside = [drafter.num_beside(s.source, s.num_nodes) for s in shapes.all] if drafter else []
        prior = WITH_PHRASES if drafter is not None and drafter.is_guided else OWN_TEXT
        self.lookup = AcceptanceEstimate(
            num_rows,
            {DraftSource.LOOKUP: prior.chances},
            rate=LOOKUP_RATE,
            num_levels=shapes.max_looked_up or max(beside, default=0) or 1,
            by_match=prior.by_match,
        )
        self.network = AcceptanceEstimate(
            num_rows,
            {source: NETWORK_PRIORS[source] for source in shapes.network_sources},
            rate=NETWORK_RATE,
            hope=HOPE,
            num_levels={s: self._levels(s, shapes.largest(s)) for s in shapes.network_sources},
        )
        self.sources = SourceChoice(drafter, shapes, rows)
        self.drafted = [Drafted()] * num_rows  # waiting drafts, as of the last result received
        self.guesses: list[list[int]] = [[]] * num_rows  # of lookups, to be compared with tokens
        # Whether a row's request names a network or a lookup; None: it names neither.
        self.by_network: list[bool | None] = [None] * num_rows
        self.flow, self.load = Flow(num_rows), PromptLoad()
        self.host: defaultdict[int, HostTime] = defaultdict(HostTime)  # by what rows ask for
        self.counts = StepCounts()
        self._num_learned = self._num_tokens = 0  # rows and tokens of the last result
        self._num_steps = 0  # with guesses, since requests came while none were running
        # The last shape chosen, with the rows that it is for, and how many steps may still take it.
        self._held: tuple[tuple[int, int, bool], StepShape] | None = None
        self._num_held = 0

    def drafts_at(self, num_rows: int) -> bool:
        """Whether steps of this many rows run the drafter, to draft or to keep up its KV."""
        writes_kv = self.drafter is not None and self.drafter.writes_kv(0)
        return self.shapes.checks_at(num_rows) or writes_kv

    def _levels(self, source: int, num_nodes: int) -> int:
        """Levels that a network drafts in a step that checks `num_nodes` nodes."""
        assert self.drafter is not None
        return self.drafter.levels(source, num_nodes)

    def _is_speculative(self, shape: StepShape) -> bool:
        """Whether a step does more than plain decoding."""
        return shape.num_nodes > 0 or self.sources.is_network(shape.source)

    # --- before a step ----------------------------------------------------------------------------

    def start(self, ids: list[int]) -> None:
        """Requests came into these rows at the same time."""
        is_first = self.flow.start(ids, self.rows.requests)
        if is_first:  # no others are running
            self._num_held = self._num_steps = 0
        self.sources.start(ids, is_first=is_first)
        self.lookup.start(ids)
        self.network.start(ids)
        self._clear_guesses(ids)

    def _clear_guesses(self, ids: list[int]) -> None:
        """No guesses were made for these rows."""
        for row in ids:
            self.guesses[row], self.drafted[row] = [], Drafted()
        self.lookup.clear_match(ids)

    def choose(self, row_R: np.ndarray, *, extras: int = 0) -> StepShape:
        """The shape of the next step: the one with the most expected tokens per second."""
        shape = self._next(row_R, extras)
        self._num_held -= 1
        return shape

    def _next(self, row_R: np.ndarray, extras: int = 0) -> StepShape:
        """The only shape of such a step, the shape held for these rows, or the best.

        A choice may be made ahead, while the device is busy, for the step that takes it later.
        """
        num_rows = 1 << (len(row_R) - 1).bit_length()
        shapes = self.shapes.at(num_rows)
        if len(shapes) == 1:
            return shapes[0]
        rows = num_rows, extras, bool(self.sources.is_current[row_R].all())
        if self._num_held > 0 and self._held is not None and self._held[0] == rows:
            return self._held[1]
        shape = self._best(row_R, num_rows, extras)
        self._held, self._num_held = (rows, shape), EVERY if self._skips_steps(len(row_R)) else 1
        return shape

    def _skips_steps(self, num_rows: int) -> bool:
        """Whether the policy skips choosing and learning in most steps of this many rows."""
        return num_rows >= MANY and self._num_steps > FIRST_STEPS

    def _best(self, row_R: np.ndarray, num_rows: int, extras: int) -> StepShape:
        tokens = self._tokens(row_R, num_rows)
        seconds = {shape: self._seconds((num_rows, shape, extras), len(row_R)) for shape in tokens}
        best, rates = dict[int, StepShape](), dict[int, float]()  # by source
        for source in {shape.source for shape in tokens}:
            some = [shape for shape in tokens if shape.source == source]
            best[source] = shape = some[
                best_rate([tokens[one] for one in some], [seconds[one] for one in some])
            ]
            rates[source] = tokens[shape] / seconds[shape]
        return best[self.sources.choose(row_R, rates)]

    def _seconds(self, key: StepKey, num_rows: int) -> float:
        """Seconds from one step to the next, with prompts and the host's work."""
        seconds = self.costs.seconds(key)
        if not self.costs.is_measured:
            return seconds
        _, shape, extras = key
        return self.load.with_reading(max(seconds, self.host[extras].seconds(num_rows, shape)))

    def _tokens(self, row_R: np.ndarray, num_rows: int) -> dict[StepShape, float]:
        """Expected tokens of a row by shape, with all that makes them count for more or less."""
        ids = row_R.tolist()
        tokens: dict[StepShape, float] = {}
        for source, sizes in self.shapes.sizes_at(num_rows).items():
            gains = zip(*self._gains(ids, sizes, source), strict=True)
            weight = OF_NETWORKS if source > 0 else OF_LOOKUPS
            weight = FLOWING if self.flow.is_on else weight
            most = inf if self.flow.is_on else MAX_MORE
            for size, some in zip(sizes, gains, strict=True):
                tokens[StepShape(size, source)] = 1.0 + gain_of_rows(some, weight, most)
        named = {self.by_network[row] for row in ids} if self.network.priors else {None}
        only = named.pop() if len(named) == 1 else None  # what all requests name
        counted = {}
        for shape in self.shapes.at(num_rows):
            gain = tokens.get(shape, 1.0 + self.margin)
            if only is not None and (shape.source > 0) != only:
                gain = 1.0
            if self._is_speculative(shape) and self.costs.is_measured:
                gain /= self.sources.losses.price(num_rows, self.sources.is_network(shape.source))
            counted[shape] = gain
        return counted

    def _gains(
        self, ids: list[int], sizes: tuple[int, ...], source: int
    ) -> list[tuple[float, ...]]:
        """Expected tokens of each row, for each number of nodes in `sizes`."""
        if source <= 0:
            return self.lookup.gains(ids, sizes)
        levels = tuple([self._levels(source, size) for size in sizes])
        if source != DraftSource.MERGED:
            gains = self.network.gains(ids, levels, source)
            if self.shapes.has_lookup:
                self._add_sure(ids, sizes, gains)
            return gains
        hope, match = self.network.hope_left(len(ids)), self.lookup.match
        right = self.network.calibration(source)
        return [
            tuple([right * self._gain_of_both(row, match[row], size, hope) for size in sizes])
            for row in ids
        ]

    def _gain_of_both(self, row: int, match: float, num_nodes: int, hope: float = 0.0) -> float:
        """Expected tokens of a network's tree with a lookup's guesses beside it."""
        assert self.drafter is not None
        source, most = DraftSource.MERGED, self.lookup.num_levels[DraftSource.LOOKUP]
        return gain_of_either(
            self.network.odds(row, source, NEW_MATCH, hope),
            self._levels(source, num_nodes),
            self.lookup.odds(row, DraftSource.LOOKUP, match),
            min(self.drafter.num_beside(source, num_nodes), most),
        )

    def _add_sure(
        self, ids: list[int], sizes: tuple[int, ...], gains: list[tuple[float, ...]]
    ) -> None:
        """In steps of a network, rows with a long match check the lookup's guesses; where the first
        of them is wrong, the match has ended and the network's count."""
        sure = [place for place, row in enumerate(ids) if self.lookup.match[row] >= SURE_MATCH]
        looked = self.lookup.gains([ids[place] for place in sure], (1, *sizes))
        for place, (first, *found) in zip(sure, looked, strict=True):
            pairs = zip(found, gains[place], strict=True)
            gains[place] = tuple([gain + (1.0 - first) * own for gain, own in pairs])

    def is_ready(self, shape: StepShape, row_R: np.ndarray) -> bool:
        """Whether a step of these rows can have this shape without catching up first."""
        is_ready = self.sources.is_ready(shape, row_R)
        self.counts.num_changes += not is_ready
        return is_ready

    def note_launch(self, shape: StepShape, row_R: np.ndarray) -> StepShape:
        """Note that such a step comes next; returns its shape, without nodes if it drops trees."""
        return self.sources.note_launch(shape, row_R) if self.network.priors else shape

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
        self.sources.is_current[ids] = self.rows.computed[-1, ids] >= self.rows.known[ids]

    def _next_source(self, ids: list[int], running: Collection[int]) -> int:
        """Who drafts in the next step of these rows, if the network has caught up on `ids`."""
        self.sources.is_current[ids] = True
        return self._next(np.array(sorted({*ids, *running}))).source

    # --- after a step -----------------------------------------------------------------------------

    def captured(self, graph: CapturedStep) -> bool:
        """A step was captured and timed; True: that is new."""
        return self.costs.capture(step_key(graph), graph.seconds, graph.draft_seconds)

    def timed(
        self,
        graph: CapturedStep,
        seconds: float,
        since: float | None = None,
        reading: float = 0.0,
    ) -> tuple[float, float]:
        """A step was timed; returns the target's seconds, and those of a plain step instead.

        since: seconds since the last result, if this step was already running then.
        reading: seconds of prompts, and of steps that the host ran, beside it.
        """
        if self.drafter is None:  # all steps are plain: there is nothing to choose
            return seconds, seconds
        key, costs = step_key(graph), self.costs
        late = 0.0 if since is None else max(since - reading - seconds, 0.0)
        self.counts.shapes[key[:2]].add(self._num_tokens, seconds, late)
        self.counts.prompt_seconds += reading
        if seconds > 0.0:
            costs.record(key, seconds)
            self.load.record(since or seconds + reading, reading)
            if since is not None:
                own, here = max(since - reading, 0.0), self._num_learned
                self.host[key[2]].record(here, key[1], own, seconds, has_waited=reading > 0.0)
        target = target_seconds(seconds, graph.draft_seconds)
        share = costs.target((graph.num_rows, StepShape(0), graph.extras)) / costs.target(key)
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
            drafted_by = [self.drafter.drafted_by(*self.drafted[row][:2]) for row in ids]
        self._num_steps += 1
        is_learned = not (self._skips_steps(len(ids)) and self._num_steps % EVERY)
        if is_learned:
            self._count_lost(graph, self._num_tokens, len(ids))
        weight, guesses_at = 1.0 / len(ids), FIRST + graph.num_nodes + 1
        for row, line in zip(ids, lines, strict=True):
            if self.shapes.has_lookup:
                if is_learned:
                    self._learn_lookup(row, line, weight, graph.num_nodes)
                self.lookup.note_match(row, line[MATCHED])
                self.guesses[row] = line[guesses_at : guesses_at + self.shapes.max_nodes]
            if self.network.priors:
                if is_learned:
                    self._learn_network(row, line, weight, graph.num_nodes)
                self.drafted[row] = Drafted(graph.source, line[MATCHED], graph.num_nodes)
        if is_learned and graph.source <= 0:
            self.network.fade(ids)
        return drafted_by

    def _count_lost(self, graph: CapturedStep, num_tokens: int, num_here: int) -> None:
        """Count the plain steps that a step's source lost, which brought so many tokens."""
        num_rows, shape, extras = key = step_key(graph)
        if not self._is_speculative(shape):
            self.sources.losses.add(num_rows, None)
            return
        is_network = self.sources.is_network(shape.source)
        plain = self._seconds((num_rows, self.shapes.all[0], extras), num_here)
        lost = self._seconds(key, num_here) / plain - num_tokens / num_here
        self.sources.losses.add(num_rows, is_network, lost)
        self.counts.lost_steps["network" if is_network else "lookup"] += lost

    def _learn_lookup(self, row: int, line: list[int], weight: float, num_nodes: int) -> None:
        """Learn from a row's guesses, checked or not."""
        run, guesses = 0, self.guesses[row]
        most = min(line[TOKENS], len(guesses))
        while run < most and guesses[run] == line[FIRST + run]:
            run += 1
        lookup, source = self.lookup, DraftSource.LOOKUP
        if num_nodes and self.drafted[row].source <= 0 and most:
            expected = lookup.gain(row, source, lookup.before[row], num_nodes)
            lookup.calibrate(source, expected, min(run, num_nodes), weight)
        lookup.learn(row, run, run + (run < most), weight=weight)

    def _learn_network(self, row: int, line: list[int], weight: float, num_nodes: int) -> None:
        """Learn from the network's guesses that were checked."""
        source, matched, made_in = self.drafted[row]
        if line[CHECKED] <= 0 or source <= 0:
            return
        if source != DraftSource.MERGED and self.shapes.has_lookup and matched >= SURE:
            return  # a lookup made the draft
        run = line[TOKENS] - 1
        # If the row ended, it is not known what would have come next.
        is_missed = not line[REASON] and run < num_nodes
        levels, network = self._levels(source, made_in), self.network
        if is_missed or run == num_nodes:
            if source == DraftSource.MERGED:
                gain = self._gain_of_both(row, self.lookup.before[row], made_in)
            else:
                gain = network.gain(row, source, NEW_MATCH, min(num_nodes, levels))
            network.calibrate(source, gain, run, weight)
        network.learn(row, run, run + is_missed, source, weight, levels)
