"""The shapes of captured steps: how many nodes a step checks, and which source drafts in it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from hunch.draft import Rows

MAX_CHECKED = 512  # most packed tokens of a step that checks nodes; in larger ones they do not pay
MAX_CHECKED_LARGE = 128  # the same where a network's trees are large
TILE = 16  # packed tokens that kernels compute together: a step of fewer takes as long
NUM_SHAPES = 3  # per source of a network: few, as each takes time to capture
# How many nodes steps check of a network's chains (besides whole chains), of best-first trees, and
# of lookups. With the row's last known token, those of trees fill tiles, and those of lookups are
# powers of two, as a few tokens less take as long.
CHAIN_SIZES, TREE_SIZES, LOOKUP_SIZES = (1, 3, 5), (7, 15), (1, 3, 7, 15)
SURE_MATCH = 4  # from a match of this many tokens on, a lookup's guesses replace a network's draft
FIRST_LEVELS = 7  # levels drafted in a step that checks no nodes


class DraftSource(IntEnum):
    """What drafts at the end of a captured step, for the next one.

    Above 0: a network, or recycling, which takes a network's place on a device.
    """

    HEAD_DROPPED = -2  # a lookup; the head does not follow the target's states any more
    NOBODY = -1
    LOOKUP = 0
    CHAIN = 1  # of a network
    TREE = 2  # of a network
    MERGED = 3  # a network's tree, and a lookup's chain beside it
    LARGE = 4  # the same, with trees that only steps of few rows check


class StepShape(NamedTuple):
    """The nodes that a captured step checks of each row, and what drafts for the next step.

    The checked nodes were drafted by the step before. A shape's expected tokens are counted as if
    every step had this shape.
    """

    num_nodes: int
    source: int = DraftSource.LOOKUP

    @property
    def most(self) -> int:
        """The most packed tokens of a step of this shape."""
        return MAX_CHECKED_LARGE if self.source == DraftSource.LARGE else MAX_CHECKED


class StepKey(NamedTuple):
    """What a captured step's seconds depend on."""

    num_rows: int
    shape: StepShape
    extras: int = 0  # flags of what rows ask for besides tokens (`step.step_kinds`)


class CapturedStep(Protocol):
    """A captured step, and how long drafting in it took when it was captured."""

    @property
    def key(self) -> StepKey: ...
    @property
    def draft_seconds(self) -> float: ...


class RowLengths(Protocol):
    """What the policy needs of the host's rows."""

    known: np.ndarray
    end: np.ndarray  # known length at which max_tokens is reached
    computed: np.ndarray  # by KV group; the drafter's is the last
    requests: list[Any]

    def view(self, rows: list[int]) -> Rows: ...


def shapes_of(source: int, num_nodes: int, *, is_adaptive: bool) -> tuple[StepShape, ...]:
    """Shapes of drafts of up to `num_nodes` nodes: steps check some of their first nodes, or none.

    If the drafter is not adaptive, steps check all of them.
    """
    if not is_adaptive:
        return (StepShape(num_nodes, source),)
    if source == DraftSource.LOOKUP:
        sizes = [n for n in LOOKUP_SIZES if n <= num_nodes] if num_nodes > 2 else [num_nodes]
    else:
        usual = CHAIN_SIZES if source == DraftSource.CHAIN else TREE_SIZES
        sizes = sorted({min(size, num_nodes) for size in (*usual, num_nodes)})
    return (StepShape(0), *(StepShape(size, source) for size in sizes))


def levels_after(num_nodes: int, most: int) -> int:
    """Levels to draft in a step that checks `num_nodes` nodes.

    The next step will most likely check the same number, so they are as many. A step that checks
    none drafts `FIRST_LEVELS` levels.
    """
    return min(most, num_nodes or FIRST_LEVELS)


def tree_levels(num_nodes: int, most: int) -> int:
    """Levels that a best-first tree counts as: one for every three nodes."""
    return min(-(-num_nodes // 3), most)


class SourceShapes(NamedTuple):
    """The shapes of one source that check nodes, and how many nodes each checks."""

    sizes: tuple[int, ...]
    shapes: list[StepShape]


class StepShapes:
    """The shapes that a device drafter's steps may have, by rows."""

    def __init__(self, shapes: Sequence[StepShape], max_network_rows: int = MAX_CHECKED) -> None:
        self.max_network_rows = max_network_rows  # steps of more rows have no shapes of the network
        self.all = tuple(sorted(shapes))
        self.max_nodes = max(shape.num_nodes for shape in self.all)
        # Most nodes that a step checks of a lookup's chain; the chain may be longer.
        self.max_looked_up = max((s.num_nodes for s in self.all if s.source <= 0), default=0)
        self.has_lookup = any(
            shape.num_nodes
            and (shape.source == DraftSource.LOOKUP or shape.source >= DraftSource.MERGED)
            for shape in self.all
        )
        self.network_sources = sorted({DraftSource(s.source) for s in self.all if s.source > 0})
        self._of_lookup = [shape for shape in self.all if shape.source <= 0]
        self._at: dict[int, list[StepShape]] = {}
        self._keys: dict[tuple[int, int], dict[StepShape, StepKey]] = {}
        self._by_source: dict[int, dict[int, SourceShapes]] = {}

    def at(self, num_rows: int) -> list[StepShape]:
        """The shapes of steps of `num_rows` rows; plain decoding, if among them, comes first."""
        if num_rows not in self._at:
            of_all = self.all if num_rows <= self.max_network_rows else self._of_lookup
            fit = [shape for shape in of_all if num_rows * (1 + shape.num_nodes) <= shape.most]
            if 2 * num_rows < TILE and StepShape(3) in fit:  # one node costs as much as three
                fit = [shape for shape in fit if shape.num_nodes != 1 or not self.has_lookup]
            for source in self.network_sources:
                dropped = [shape for shape in fit if shape.source == source][:-NUM_SHAPES]
                fit = [shape for shape in fit if shape not in dropped]
            self._at[num_rows] = fit or [self.all[0]]
        return self._at[num_rows]

    def keys(self, num_rows: int, extras: int) -> dict[StepShape, StepKey]:
        """The keys of steps of `num_rows` rows, by shape."""
        if (num_rows, extras) not in self._keys:
            shapes = self.at(num_rows)
            self._keys[num_rows, extras] = {s: StepKey(num_rows, s, extras) for s in shapes}
        return self._keys[num_rows, extras]

    def by_source(self, num_rows: int) -> dict[int, SourceShapes]:
        """The shapes of steps of `num_rows` rows that check nodes, by source."""
        if num_rows not in self._by_source:
            found = defaultdict[int, list[StepShape]](list)
            for shape in self.at(num_rows):
                if shape.num_nodes:
                    found[shape.source].append(shape)
            self._by_source[num_rows] = {
                source: SourceShapes(tuple([shape.num_nodes for shape in some]), some)
                for source, some in found.items()
            }
        return self._by_source[num_rows]

    def largest(self, source: int) -> int:
        """The most nodes that a step of this source checks."""
        return max(shape.num_nodes for shape in self.all if shape.source == source)

    def checks_at(self, num_rows: int) -> bool:
        """Whether steps of `num_rows` rows may check nodes."""
        return bool(self.by_source(num_rows))

    def to_capture(self, num_rows: int) -> list[StepShape]:
        """The shapes to capture for this many rows.

        For each source there is also one without nodes, for steps in which drafting begins.
        """
        shapes = self.at(num_rows)
        first = [StepShape(0, source) for source in sorted({shape.source for shape in shapes})]
        return shapes + [shape for shape in first if shape not in shapes]
