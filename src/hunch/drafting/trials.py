"""What sources lost or gained against the best choice without them, by what steps brought and took.

Estimates may be wrong in a source's favour for a long time: what is chosen by them is what they
think too well of. A source that lost time must promise more to be chosen again, until its loss is
a small share of all time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hunch.drafting.costs import StepShape

# What a source lost is forgotten by this share of a plain step with each step it is not used in;
# for a plain step lost it must promise so much more; what it gained counts up to so many steps.
REPAID, PER_STEP_LOST, MOST_GAINED = 0.005, 0.1, 16.0
# Of the newest step in what a lookup would have brought beside a network; longer runs tell nothing
# of what comes after them.
USUAL, MAX_USUAL = 0.03, 3


class Trials:
    """Time that a source lost against the best choice without it."""

    def __init__(self) -> None:
        self._lost: dict[int, float] = {}  # plain steps, by the rows that steps have room for

    def used(self, num_rows: int, lost: float) -> None:
        """A step with the source lost so many plain steps; below 0: it gained."""
        self._lost[num_rows] = max(self._lost.get(num_rows, 0.0) + lost, -MOST_GAINED)

    def unused(self, num_rows: int) -> None:
        """A step went by without it."""
        lost = self._lost.get(num_rows, 0.0)
        if lost > 0.0:
            self._lost[num_rows] = max(lost - REPAID, 0.0)

    def margin(self, num_rows: int) -> float:
        """Share by which it must promise more than what it is compared with."""
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
        self.instead = StepShape(0)  # what would have been chosen last without the network
        self._usual = 1.0  # tokens that a lookup would have brought in the network's steps, of late

    def discounted(
        self,
        num_rows: int,
        shapes: Sequence[StepShape],
        tokens: Sequence[float],
        seconds: Sequence[float],
    ) -> list[float]:
        """Tokens, less what sources must promise more."""
        asked = [1.0 + trials.margin(num_rows) for trials in (self.by_lookup, self.by_network)]
        found, most = [], 0.0
        for shape, gain, took in zip(shapes, tokens, seconds, strict=True):
            is_network = self.network_use.is_network(shape)
            found.append(gain / asked[is_network] if is_network or shape.num_nodes else gain)
            if not is_network and found[-1] / took > most:
                most, self.instead = found[-1] / took, shape
        return found

    def is_one(self, shape: StepShape) -> bool:
        """Whether a step is more than plain decoding."""
        return shape.num_nodes > 0 or self.network_use.is_network(shape)

    def rest(self, num_rows: int) -> None:
        """A plain step went by."""
        self.by_lookup.unused(num_rows)
        self.by_network.unused(num_rows)

    def learn(
        self,
        num_rows: int,
        shape: StepShape,
        seconds: Sequence[float],  # of the step, of a plain one, and of what was instead
        tokens: Sequence[int],  # of each row
        runs: Sequence[int],  # right guesses of its lookup, whether or not they were checked
    ) -> float:
        """What a step brought; returns the plain steps that its source lost (below 0: gained).

        What a lookup would have guessed after its right guesses nobody knows: as much as of late.
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
