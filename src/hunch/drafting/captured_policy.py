"""The policy of captured steps: how many nodes the next step checks, and which source drafts in it.

All rows of a captured step check the same number of nodes. The host chooses a step before it has
read the result of the step before.

Shape letters: R rows of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from math import log2
from time import perf_counter

import numpy as np

from hunch.drafting.base import DeviceDrafter
from hunch.drafting.costs import Flow, StepCosts, target_seconds
from hunch.drafting.policy import (
    MAX_MORE,
    NETWORK_PRIORS,
    OWN_TEXT,
    TOGETHER,
    WITH_PHRASES,
    AcceptanceEstimate,
    SourceChoice,
    flowing_gain,
    gain_of_rows,
)
from hunch.drafting.step_shapes import (
    SURE,
    CapturedStep,
    Drafted,
    DraftSource,
    RowLengths,
    StepCounts,
    StepKey,
    StepShape,
    StepShapes,
)
from hunch.kernels.step import CHECKED, FIRST, MATCHED, REASON, TOKENS

log = logging.getLogger("hunch")

RATE = 0.04  # learning rate of the estimates
SURE_MATCH = log2(1 + SURE)  # from this match on, a lookup's guesses replace a network's draft
# With MANY rows or more, the policy chooses and learns in one of EVERY steps: doing both in every
# step took a third of a small target's step (16 rows, 135M, H200). After requests came together, it
# does both in each of the first FIRST_STEPS steps, so that it soon stops what does not pay.
MANY, EVERY, FIRST_STEPS = 16, 4, 8
# Losses of time are counted in plain steps. A source must promise PER_STEP_LOST more for each step
# that it lost. REPAID: the loss that is forgotten in a step without the source. MOST_GAINED: the
# largest gain that is remembered. (PER_STEP_LOST=0: 0.998; where nothing can be guessed 0.97)
PER_STEP_LOST, REPAID, MOST_GAINED = 0.2, 0.005, 16.0


class CapturedPolicy:
    """Chooses the shapes of captured steps, and learns from their results."""

    def __init__(
        self, drafter: DeviceDrafter | None, rows: RowLengths, *, is_measured: bool = True
    ) -> None:
        num_rows = len(rows.known)
        self.is_plain = drafter is None  # there is nothing to choose
        self.drafter = drafter = drafter or DeviceDrafter(name="off", is_adaptive=False)
        self.rows, self.costs = rows, StepCosts(is_measured=is_measured)
        self.shapes = shapes = StepShapes(drafter.shapes)
        beside = [drafter.num_beside(s.source, s.num_nodes) for s in shapes.all]
        levels: dict[int, int] = {
            s: drafter.levels(s, shapes.largest(s)) for s in shapes.network_sources
        }
        chances, by_match = WITH_PHRASES if drafter.is_guided else OWN_TEXT
        most = shapes.max_looked_up or max(beside) or 1
        self.lookup = AcceptanceEstimate(
            num_rows, {DraftSource.LOOKUP: chances}, rate=RATE, num_levels=most, by_match=by_match
        )
        self.network = AcceptanceEstimate(
            num_rows,
            {source: NETWORK_PRIORS[source] for source in shapes.network_sources},
            rate=RATE,
            num_levels=levels,
        )
        self.sources = SourceChoice(drafter, shapes, rows)
        self.drafted = [Drafted()] * num_rows  # waiting drafts, as of the last result received
        self.guesses: list[list[int]] = [[]] * num_rows  # of lookups, to compare with new tokens
        # Whether a row's request names a network (True) or a lookup (False); None: neither.
        self.by_network: list[bool | None] = [None] * num_rows
        self.is_followed = np.ones(num_rows, dtype=np.bool_)  # the network drafts for such a row
        # Until it was said that a row may get too long for the network, or is past its context.
        self._max_len, self._trained_len = drafter.max_len, drafter.trained_len
        self.flow, self.counts = Flow(num_rows), StepCounts()
        self._num_rows = self._num_tokens = 0  # rows and tokens of the last result
        self._num_steps = 0  # steps with guesses, since requests came while none were running
        # Losses in plain steps, by rows and whether a network worked in the steps.
        self._lost: dict[tuple[int, bool], float] = {}
        # The last choice: the steps that it is for (rows, extras, whether the network is current),
        # the shape, and how many more steps may have it.
        self._held: tuple[tuple[int, int, bool], StepShape] | None = None
        self._num_held = 0

    def drafts_at(self, num_rows: int) -> bool:
        """Whether steps of this many rows run the drafter, to draft or to write its KV."""
        return self.shapes.checks_at(num_rows) or self.drafter.writes_kv(0)

    # --- before a step ----------------------------------------------------------------------------

    def start(self, ids: list[int]) -> None:
        """Requests came into these rows at the same time."""
        is_first = self.flow.start(ids, self.rows.requests)
        if is_first:  # no others are running
            self._num_held = self._num_steps = 0
        self.sources.start(ids, is_first=is_first)
        self.lookup.start(ids)
        self.network.start(ids)
        if self.drafter.max_len is not None:
            self.is_followed[ids] = self.rows.end[ids] <= self.drafter.max_len
            if self._max_len is not None and not self.is_followed[ids].all():
                log.warning(
                    "%s drafts for texts of up to %d tokens: rows that may get longer go on "
                    "without its network", self.drafter.name, self._max_len,
                )  # fmt: skip
                self._max_len = None
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
        """The shape that the next `choose` returns for these rows.

        It is the only one there is, the one held from an earlier choice, or the best.
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
        """Whether most steps of this many rows take the last choice and teach nothing."""
        return num_rows >= MANY and self._num_steps > FIRST_STEPS

    def _best(self, row_R: np.ndarray, num_rows: int, extras: int) -> StepShape:
        """The best shape of the group of sources that `SourceChoice` chooses."""
        best, rates = dict[int, StepShape](), dict[int, float]()  # by group of source
        is_dropped = self.sources.can_drop and not self.sources.is_current[row_R].all()
        for shape, tokens in self._tokens(row_R, num_rows).items():
            if is_dropped and shape.source > 0:  # the network cannot draft for all of the rows
                continue
            rate = tokens / self.costs.between(StepKey(num_rows, shape, extras), len(row_R))
            group = self.sources.groups[shape.source]
            if rate > rates.get(group, 0.0):
                best[group], rates[group] = shape, rate
        return best[self.sources.choose(row_R, rates)]

    def _tokens(self, row_R: np.ndarray, num_rows: int) -> dict[StepShape, float]:
        """Expected tokens of a row by shape: over all rows, less the price of lost time."""
        ids, is_flowing = row_R.tolist(), self.flow.is_on
        tokens = dict.fromkeys(self.shapes.at(num_rows), 1.0 + self.drafter.margin)
        for source, sizes in self.shapes.sizes_at(num_rows).items():
            gains = zip(*self._gains(ids, sizes, source), strict=True)
            for size, some in zip(sizes, gains, strict=True):
                gain = flowing_gain(some) if is_flowing else gain_of_rows(some, TOGETHER, MAX_MORE)
                tokens[StepShape(size, source)] = 1.0 + gain
        named = {self.by_network[row] for row in ids} if self.network.priors else {None}
        only = named.pop() if len(named) == 1 else None  # the same for all requests
        for shape in tokens if self.costs.is_measured or only is not None else ():
            is_network = self._is_network(shape.source)
            if only is not None and (shape.source > 0) != only:
                tokens[shape] = 1.0
            if shape.num_nodes or is_network:
                lost = max(self._lost.get((num_rows, is_network), 0.0), 0.0)
                tokens[shape] /= 1.0 + PER_STEP_LOST * lost
        return tokens

    def _gains(
        self, ids: list[int], sizes: tuple[int, ...], source: int
    ) -> list[tuple[float, ...]]:
        """Expected tokens of each row, for each number of nodes in `sizes`."""
        if source <= 0:
            return self.lookup.gains(ids, sizes)
        is_merged, match, beside = source == DraftSource.MERGED, self.lookup.match, sizes
        levels = tuple([self.drafter.levels(source, size) for size in sizes])
        gains = self.network.gains(ids, levels, source)
        if self.drafter.max_len is not None:
            none, is_followed = (0.0,) * len(sizes), self.is_followed[ids].tolist()
            gains = [
                some if is_in else none for some, is_in in zip(gains, is_followed, strict=True)
            ]
        if is_merged:
            beside = tuple([self.drafter.num_beside(source, size) for size in sizes])
        for place, row in enumerate(ids if self.shapes.has_lookup else ()):
            # The row checks a lookup's guesses; if the first is wrong, the network's count.
            if is_merged or match[row] >= SURE_MATCH:
                ((first, *found),) = self.lookup.gains([row], (1, *beside))
                pairs = zip(found, gains[place], strict=True)
                gains[place] = tuple([one + (1.0 - first) * own for one, own in pairs])
        return gains

    def is_ready(self, shape: StepShape, row_R: np.ndarray) -> bool:
        """Whether a step of these rows can have this shape at once; False is counted.

        If not, a draft model must read the tokens that it missed first.
        """
        is_ready = self.sources.is_ready(shape, row_R)
        self.counts.num_changes += not is_ready
        return is_ready

    def note_launch(self, shape: StepShape, row_R: np.ndarray) -> StepShape:
        """Note that a step of this shape is launched next; returns the shape that it can have."""
        if self._trained_len is not None and self.rows.known[row_R].max() > self._trained_len:
            log.warning(
                "a text is longer than the context of %s, %d tokens: it goes on drafting, and may "
                "guess worse from there on", self.drafter.name, self._trained_len,
            )  # fmt: skip
            self._trained_len = None
        return self.sources.note_launch(shape, row_R) if self.network.priors else shape

    def catch_up(
        self, ids: list[int], run: Callable[[list[int]], None], running: Collection[int] = ()
    ) -> None:
        """Let the draft model read what it missed of these rows, if it will draft for them.

        `run` launches its passes. The model will draft if the next step of all `running` rows has a
        source that uses it.
        """
        if not ids or not self.is_followed[[*ids, *running]].any():
            return
        self.sources.is_current[ids] = True  # assume that it has caught up
        source = self._next(np.array(sorted({*ids, *running}))).source
        if self.drafter.writes_kv(source):
            began = perf_counter()
            run(ids)
            self.counts.num_read += len(ids)
            self.counts.read_seconds += perf_counter() - began
        self.sources.is_current[ids] = self.rows.computed[-1, ids] >= self.rows.known[ids]

    # --- after a step -----------------------------------------------------------------------------

    def timed(
        self,
        graph: CapturedStep,
        seconds: float,
        since: float | None = None,
        reading: float = 0.0,
    ) -> tuple[float, float]:
        """A step was timed; returns the target's seconds, and what a plain step would have taken.

        seconds: of the device.
        since: seconds since the last result; None: the device was idle meanwhile.
        reading: the part of these that went to prompts and to steps run by the host.
        """
        if self.is_plain:
            return seconds, seconds
        key, costs = graph.key, self.costs
        own = None if since is None else max(since - reading, 0.0)
        self.counts.shapes[key[:2]].add(self._num_tokens, seconds, max((own or 0.0) - seconds, 0.0))
        self.counts.prompt_seconds += reading
        if seconds > 0.0:
            costs.record(key, seconds)
            if own is not None:
                costs.host[key.extras].record(
                    self._num_rows, key.shape, own, seconds, has_waited=reading > 0.0
                )
        target = target_seconds(seconds, graph.draft_seconds)
        share = costs.target(key._replace(shape=StepShape(0))) / costs.target(key)
        return target, target * min(share, 1.0)

    def learn(
        self, row_R: np.ndarray, lines: list[list[int]], graph: CapturedStep
    ) -> list[str] | None:
        """Learn from a step's result; returns the method that drafted each row's checked nodes.

        lines: one per row, with the columns of `kernels.step`. None: no nodes were checked.
        """
        ids: list[int] = row_R.tolist()
        self._num_rows, self._num_tokens = len(ids), sum([line[TOKENS] for line in lines])
        self.flow.step(row_R)
        num_nodes, source = graph.key.shape
        can_guess = source != DraftSource.NOBODY and self.shapes.checks_at(graph.key.num_rows)
        if not (num_nodes or can_guess):
            self._clear_guesses(ids)
            return None
        drafted_by = None
        if num_nodes:
            drafted_by = [self.drafter.drafted_by(*self.drafted[row][:2]) for row in ids]
        self._num_steps += 1
        is_learned = not (self._skips_steps(len(ids)) and self._num_steps % EVERY)
        if is_learned:
            self._count_lost(graph.key, len(ids))
        weight, guesses_at = 1.0 / len(ids), FIRST + num_nodes + 1
        for row, line in zip(ids, lines, strict=True):
            if self.shapes.has_lookup:
                if is_learned:
                    self._learn_lookup(row, line, weight, num_nodes)
                self.lookup.note_match(row, line[MATCHED])
                self.guesses[row] = line[guesses_at : guesses_at + self.shapes.max_nodes]
            if self.network.priors:
                if is_learned:
                    self._learn_network(row, line, weight, num_nodes)
                self.drafted[row] = Drafted(source, line[MATCHED], num_nodes)
        if is_learned and source <= 0:
            self.network.fade(ids)
        return drafted_by

    def _is_network(self, source: int) -> bool:
        """Whether the network drafts in steps of this source, or follows them."""
        return source >= (0 if self.sources.can_drop else 1)

    def _count_lost(self, key: StepKey, num_here: int) -> None:
        """Add the time that the step lost, in plain steps; the other source's loss fades."""
        num_rows, shape, _ = key
        is_network = self._is_network(shape.source)
        for other in (False, True):
            before = self._lost.get((num_rows, other), 0.0)
            if other == is_network and (shape.num_nodes or is_network):
                plain = self.costs.between(key._replace(shape=self.shapes.all[0]), num_here)
                lost = self.costs.between(key, num_here) / plain - self._num_tokens / num_here
                self._lost[num_rows, other] = max(before + lost, -MOST_GAINED)
                self.counts.lost_steps["network" if is_network else "lookup"] += lost
            elif before > 0.0:
                self._lost[num_rows, other] = max(before - REPAID, 0.0)

    def _learn_lookup(self, row: int, line: list[int], weight: float, num_nodes: int) -> None:
        """Learn from a lookup's guesses for a row, whether they were checked or not."""
        run, guesses = 0, self.guesses[row]
        most = min(line[TOKENS], len(guesses))
        while run < most and guesses[run] == line[FIRST + run]:
            run += 1
        lookup, source = self.lookup, DraftSource.LOOKUP
        if num_nodes and self.drafted[row].source <= 0 and most:
            expected = lookup.gain(row, source, num_nodes)
            lookup.calibrate(source, expected, min(run, num_nodes), weight)
        lookup.learn(row, run, run + (run < most), weight=weight)

    def _learn_network(self, row: int, line: list[int], weight: float, num_nodes: int) -> None:
        """Learn from the network's guesses that were checked."""
        source, matched, made_in = self.drafted[row]
        if line[CHECKED] <= 0 or source <= 0:
            return
        if source != DraftSource.MERGED and self.shapes.has_lookup and matched >= SURE:
            return  # the draft was a lookup's
        run = line[TOKENS] - 1
        # If the row ended, it is not known what would have come next.
        is_missed = not line[REASON] and run < num_nodes
        levels, network = self.drafter.levels(source, made_in), self.network
        if is_missed or run == num_nodes:
            expected = network.gain(row, source, min(num_nodes, levels))
            if source == DraftSource.MERGED:
                beside, lookup = self.drafter.num_beside(source, made_in), DraftSource.LOOKUP
                expected *= 1.0 - self.lookup.gain(row, lookup, 1)
                expected += self.lookup.gain(row, lookup, beside)
            network.calibrate(source, expected, run, weight)
        network.learn(row, run, run + is_missed, source, weight, levels)
