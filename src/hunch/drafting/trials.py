"""The time that each source of drafts has lost or gained against the best choice without it.

An estimate may favour a source wrongly for a long time, since the sources that are chosen are those
that it overestimates. So a source that has lost time must promise more to be chosen again, until
its loss is a small share of all time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hunch.drafting.step_shapes import StepShape

# In plain steps: the loss that is forgotten in a step without the source, the share by which
# it must promise more for each step lost, and the largest gain that is remembered.
REPAID, PER_STEP_LOST, MOST_GAINED = 0.005, 0.1, 16.0
# Weight of the newest step in `_usual`, and the longest run that counts there: what would have come
# after a long run is not known.
USUAL, MAX_USUAL = 0.03, 3


class Trials:
    """Time that a source lost against the best choice without it."""

    def __init__(self) -> None:
        self._lost: dict[int, float] = {}  # in plain steps, by the rows of a step

    def used(self, num_rows: int, lost: float) -> None:
        """A step with the source lost `lost` plain steps; below 0: it gained."""
        self._lost[num_rows] = max(self._lost.get(num_rows, 0.0) + lost, -MOST_GAINED)

    def unused(self, num_rows: int) -> None:
        """A step without the source."""
        lost = self._lost.get(num_rows, 0.0)
        if lost > 0.0:
            self._lost[num_rows] = max(lost - REPAID, 0.0)

    def margin(self, num_rows: int) -> float:
        """Share by which the source must promise more than the others."""
        return PER_STEP_LOST * max(self._lost.get(num_rows, 0.0), 0.0)


class NetworkSteps(Protocol):
    """Tells steps with a network from steps without it."""

    trials: Trials  # of steps with it

    def is_network(self, shape: StepShape) -> bool: ...


class SourceTrials:
    """Lookups against plain decoding, and a network against what would be done without it."""

    def __init__(self, network_use: NetworkSteps) -> None:
        self.network_use = network_use
        self.by_lookup, self.by_network = Trials(), network_use.trials
        self.instead = StepShape(0)  # what would have been chosen without the network
        self._usual = 1.0  # tokens of a lookup in the network's steps, mean over recent ones

    def discounted(
        self,
        num_rows: int,
        shapes: Sequence[StepShape],
        tokens: Sequence[float],
        seconds: Sequence[float],
    ) -> list[float]:
        """Expected tokens, divided by what each source must promise more."""
        asked = [1.0 + trials.margin(num_rows) for trials in (self.by_lookup, self.by_network)]
        found, most = [], 0.0
        for shape, gain, took in zip(shapes, tokens, seconds, strict=True):
            is_network = self.network_use.is_network(shape)
            found.append(gain / asked[is_network] if is_network or shape.num_nodes else gain)
            if not is_network and found[-1] / took > most:
                most, self.instead = found[-1] / took, shape
        return found

    def is_speculative(self, shape: StepShape) -> bool:
        """Whether a step does more than plain decoding."""
        return shape.num_nodes > 0 or self.network_use.is_network(shape)

    def plain_step(self, num_rows: int) -> None:
        """A step of plain decoding."""
        self.by_lookup.unused(num_rows)
        self.by_network.unused(num_rows)

    def learn(
        self,
        num_rows: int,
        shape: StepShape,
        seconds: Sequence[float],  # of the step, of a plain one, and of `instead`
        tokens: Sequence[int],  # of each row
        runs: Sequence[int],  # right guesses of its lookup, whether or not they were checked
    ) -> float:
        """Learn from a step; returns how many plain steps its source lost (below 0: gained).

        What a lookup would have guessed after its right guesses is not known; its recent mean is
        assumed.
        """
        took, plain, other = seconds
        if not self.network_use.is_network(shape):
            lost = took / plain - sum(tokens) / len(tokens)
            self.by_lookup.used(num_rows, lost)
            self.by_network.unused(num_rows)
            return lost
        steps, rate = 0.0, USUAL * (shape.source > 0) / len(tokens)
        for count, run in zip(tokens, runs, strict=True):
            found = 1 + min(run, self.instead.num_nodes)
            steps += 1.0 + max(count - found, 0) / self._usual
            self._usual += rate * (min(found, MAX_USUAL) - self._usual)
        self.by_lookup.unused(num_rows)
        lost = (took - steps / len(tokens) * other) / plain
        self.by_network.used(num_rows, lost)
        return lost
