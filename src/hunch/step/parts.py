"""What steps are made of: the parts of a runner, a step that was begun, a row's outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from hunch.drafting.base import Drafter, Prepares
from hunch.drafting.beside_steps import Flow
from hunch.drafting.costs import CostCurve
from hunch.kernels.kv_store import KVCache
from hunch.models.decoder import Hidden
from hunch.models.target import BegunPass, FusedTarget, Target
from hunch.sampling.state import SamplingState
from hunch.step.batch import Batch, RowPart
from hunch.step.grammars import RowGrammars
from hunch.step.rows import RowBuffers
from hunch.types import Capacity, RowResult, StepPlan
from hunch.verify.base import Verifier

if TYPE_CHECKING:
    from hunch.kernels.step import StepRows


@dataclass(slots=True)
class Outcome:
    """One row's step in the making."""

    part: RowPart
    result: RowResult
    accepted: list[int] = field(default_factory=list)  # nodes of the accepted path
    is_running: bool = False  # caught up and not finished: it may draft


@dataclass(slots=True)
class BegunStep:
    """A step whose rows are packed; where the target has stages, the first ones are at it."""

    plan: StepPlan
    batch: Batch
    started: float
    under_way: BegunPass | None = None

    @property
    def rows(self) -> set[int]:
        return {part.row for part in self.batch.parts}


@dataclass(slots=True, kw_only=True)
class RunnerParts:
    """What a runner is made of; steps led by the host and captured ones share it."""

    capacity: Capacity
    target: Target
    kv: Sequence[KVCache]
    drafter: Drafter
    verify: Verifier
    sampling: SamplingState
    cost: CostCurve
    flow: Flow
    prepares: Prepares | None = None  # who drafts while the target is busy
    scores_processed: bool = False  # log-probabilities are of what tokens are drawn from
    rows: RowBuffers = field(init=False)
    grammars: RowGrammars = field(default_factory=RowGrammars)

    def __post_init__(self) -> None:
        self.rows = RowBuffers(self.capacity)


class Passes(Protocol):
    """Captured passes over what the host packs."""

    def forward(self, batch: Batch) -> Hidden:
        """The target's states of the batch's tokens; what stands after them is padding."""

    def prepare(self, size: int, depth: int = 0) -> None:
        """Capture a pass of this many tokens, unless it is there."""

    def rehearse(self, size: int) -> None:
        """Run what would be captured, and keep nothing of it."""


class Piece(IntEnum):
    """The two graphs of a step."""

    FORWARD = 0
    FINISH = 1


class Lead(FusedTarget, Protocol):
    """The target of steps that several ranks take together: rank 0's side."""

    def before(
        self, piece: Piece, size: tuple[int, int, int], table_XB: Tensor, block_size: int
    ) -> Callable[[], None]:
        """What must be called each time before a graph of this size runs here."""

    def share_path(self, rows: StepRows) -> None:
        """The others need the accepted nodes, as their KV moves too."""

    def check_alive(self) -> None:
        """Raise if a rank has died: the step's results must not be used."""


@runtime_checkable
class LeadsSteps(Protocol):
    """A target over ranks: all of them must be told of captured passes and steps."""

    def step_lead(self, kv: KVCache) -> Lead:
        """What captured steps take for their target."""

    def new_passes(
        self,
        kv: KVCache,
        layers: tuple[int, ...],
        size_XB: tuple[int, int],
        block_size: int,
        pool: Any,
    ) -> Passes | None:
        """Captured passes of all ranks; None: ranks would choose different paddings."""


class CapturedRows(Protocol):
    """Rows that captured steps go on with once they are caught up."""

    def observes(self, rows: list[int]) -> bool:
        """Whether the host's drafter must see what the target did for these rows."""

    def drafts_for(self, rows: list[int]) -> np.ndarray:
        """Which of the rows get their drafts in captured steps."""
