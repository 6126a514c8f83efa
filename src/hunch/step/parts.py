"""What steps are made of: the parts of a runner, a step that was begun, a row's outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from hunch.draft import Verdict
from hunch.drafting.base import Drafter, Prepares
from hunch.drafting.costs import CostCurve
from hunch.kernels.attention import KVCache
from hunch.models.target import Target
from hunch.sampling.state import SamplingState
from hunch.step.batch import Batch, Part
from hunch.step.grammars import RowGrammars
from hunch.step.rows import RowBuffers
from hunch.types import Capacity, RowResult, StepPlan


@dataclass(slots=True)
class Outcome:
    """One row's step in the making."""

    part: Part
    result: RowResult
    accepted: list[int] = field(default_factory=list)  # nodes of the accepted path
    is_running: bool = False  # caught up and not finished: it may draft


@dataclass(slots=True)
class BegunStep:
    """A step whose rows are gathered; where the target has stages, the first ones are at it."""

    plan: StepPlan
    batch: Batch
    started: float
    under_way: Any = None  # the target's pass

    @property
    def rows(self) -> set[int]:
        return {part.row for part in self.batch.parts}


@dataclass(slots=True, kw_only=True)
class Parts:
    """What a runner is made of; steps led by the host and captured ones share it."""

    capacity: Capacity
    target: Target
    kv: Sequence[KVCache]
    drafter: Drafter
    verify: Callable[..., Verdict]
    sampling: SamplingState
    cost: CostCurve
    prepares: Prepares | None  # who drafts while the target is busy
    scores_processed: bool
    rows: RowBuffers
    grammars: RowGrammars


class Elsewhere(Protocol):
    """Rows that captured steps go on with once they are caught up."""

    def observes(self, rows: list[int]) -> bool:
        """Whether the host's drafter must see what the target did for these rows."""

    def drafts_for(self, rows: list[int]) -> np.ndarray:
        """Which of the rows get their drafts in captured steps."""
