"""Pending steps: captured steps and passes over prompts that were launched, and their results.

Shape letters: R rows of the step, C columns of a result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from hunch.step.batch import RowPart
from hunch.types import DecodedRows, RowResult, RowWork, StepResult

if TYPE_CHECKING:  # needs Triton
    from hunch.step.capture import StepTimer
    from hunch.step.host_scores import PromptScores
    from hunch.step.row_extras import Adjustments, StepGroup
    from hunch.step.step_kinds import StepGraph

T = TypeVar("T")


class Received(NamedTuple):
    """The result of a step, before it is applied."""

    result_RC: np.ndarray  # valid until the buffer is used again
    lines: list[list[int]]  # the same without scores, and without tokens that were taken back
    seconds: float
    since: float | None  # seconds since the last result; None: the device was idle meanwhile
    other_seconds: float  # of prompts, and of steps that the host ran, meanwhile
    adjusted: Adjustments


@dataclass(slots=True)
class PendingStep:
    """A captured step that was launched, and whose result was not applied yet."""

    group: StepGroup
    graph: StepGraph
    buffer: int  # of the download, where its result will be
    num_masked: dict[int, int]  # masks of each row whose choices its grammar checks later
    began_after_refusal: set[int]  # rows that began it after a token that their grammar refused
    timer: StepTimer | None = None  # of the pass over prompts, if it chose their first tokens
    plan_id: int = 0
    received: Received | None = None  # its result, once grammars have consumed its tokens
    order: list[RowWork] | None = None  # all of the plan's work, if it is a part of it
    others: StepResult | PendingPrompts | None = None  # the other part

    @property
    def follows_prompts(self) -> bool:
        """Whether it chose the first tokens after prompts, and had no pass of its own."""
        return self.timer is not None


@dataclass(slots=True)
class PendingPrompts:
    """A pass over prompts that was launched, and the step after it that chooses first tokens."""

    plan_id: int
    work: list[RowWork]
    parts: list[RowPart]  # prompts that end in this pass
    results: dict[int, RowResult]  # of the others, by row
    scores: PromptScores  # that requests ask for
    step: PendingStep | None = None  # chooses the first tokens; None: no prompt ends here
    target_seconds: float = 0.0  # without such a step: seconds that launching the pass took
    draft_seconds: float = 0.0


def merge_results(
    ids: list[int], order: list[RowWork], one: StepResult, other: StepResult
) -> StepResult:
    """The result of a plan: of a captured step of the rows `ids` (`one`), and of its other rows."""
    assert one.decoded is not None
    place_of = {row: place for place, row in enumerate(ids)}
    places = [place_of.get(work.row, -1) for work in order]
    by_row = {row.row: row for row in (*one.rows, *other.rows)}

    def spread(column: list[T] | None, other: T) -> list[T] | None:
        return None if column is None else [other if at < 0 else column[at] for at in places]

    decoded = one.decoded
    return StepResult(
        id=one.id,
        rows=[by_row[work.row] for work in order if work.row in by_row],
        decoded=DecodedRows(
            tokens=spread(decoded.tokens, []) or [],
            num_checked=spread(decoded.num_checked, 0),
            methods=spread(decoded.methods, ""),
            num_waiting=spread(decoded.num_waiting, 0),
            computed=spread(decoded.computed, []),
            logprobs=spread(decoded.logprobs, None),
        ),
        target_seconds=one.target_seconds + other.target_seconds,
        draft_seconds=one.draft_seconds + other.draft_seconds,
        plain_seconds=one.plain_seconds + other.plain_seconds,
    )
