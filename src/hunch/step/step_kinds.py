"""What captured steps depend on: their rows, nodes and draft source, and what rows ask for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hunch.drafting.step_shapes import DraftSource, StepKey, StepShape, StepShapes
from hunch.kernels.step import Draws
from hunch.step.capture import Graph
from hunch.step.results import NO_SCORES, Columns

# What the rows of a step ask for besides tokens: its *extras*.
RULES = 1  # penalties, bias, bad words, allowed ids, min_tokens
MASKS = 2  # a grammar's masks, which the host fills in while the forward graph runs
DRAFTS = 4  # the new draft itself comes back to the host, for masks and traces
SCORES = 8  # log-probabilities
NAMED = 16  # a method that the request names, or a prediction, drafts for the row
MANY_SCORES = 32  # of more than the usual number of best tokens
# Best tokens a captured step scores beside each chosen one; memory for more than the usual number
# is allocated with the first step that scores them.
SCORE_SIZES, USUAL_SCORES = (0, 5, 20, 50, 100, 200, 500, 1000), 20


class StepKind(NamedTuple):
    """What a captured step depends on: there is one for each kind."""

    num_rows: int  # rows it has room for
    num_nodes: int  # nodes it checks of each row
    source: int  # what drafts at its end
    draws: Draws  # how its rows' tokens are drawn
    extras: int = 0  # what its rows ask for: RULES, MASKS and so on
    num_best: int = NO_SCORES  # tokens scored beside each committed one


@dataclass(slots=True)
class StepGraph:
    """A captured step: `forward` packs and runs the target, `finish` does everything after it."""

    kind: StepKind
    columns: Columns  # of its result
    forward: Graph
    finish: Graph
    seconds: float  # of both, on the device
    draft_seconds: float  # of these, for drafting
    # Packs and does not run the target: for `finish` after a pass over prompts.
    pack: Graph | None = None
    key: StepKey = field(init=False)

    def __post_init__(self) -> None:
        kind = self.kind
        self.key = StepKey(kind.num_rows, StepShape(kind.num_nodes, kind.source), kind.extras)

    @property
    def num_numbers(self) -> int:
        """Of its result."""
        return self.kind.num_rows * self.columns.end


def bucket(num_rows: int) -> int:
    """The number of rows a step is captured for: the next power of two."""
    return 1 << (num_rows - 1).bit_length()


def best_size(num_best: int) -> int:
    """The number of best tokens that a step is captured for."""
    return next(size for size in SCORE_SIZES if size >= num_best)


def max_draft_rows(shapes: StepShapes, max_rows: int) -> int | None:
    """The most rows with which a step of a drafter drafts; None: any number."""
    num_rows = bucket(max_rows)
    if shapes.checks_at(num_rows):
        return None
    while num_rows and not shapes.checks_at(num_rows):
        num_rows //= 2
    return num_rows


def plain_shape(shapes: StepShapes) -> StepShape:
    """The shape of a step without nodes in which no network drafts."""
    has_lookup = any(shape.source == DraftSource.LOOKUP for shape in shapes.all)
    return StepShape(0, DraftSource.LOOKUP if has_lookup else DraftSource.NOBODY)
