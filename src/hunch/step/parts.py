"""Types that steps share: the parts of a runner, a step that was begun, a row's outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from hunch.drafting.base import Drafter, Prepares
from hunch.drafting.costs import CostCurve
from hunch.kernels.kv_store import KVCache
from hunch.kernels.step import StepRows
from hunch.models.target import BegunPass, FusedTarget, Hidden, Target
from hunch.sampling.state import SamplingState
from hunch.step.batch import Batch, RowPart
from hunch.step.capture import Graph
from hunch.step.grammars import RowGrammars
from hunch.step.rows import RowBuffers
from hunch.types import Capacity, RowResult, StepPlan
from hunch.verify.base import Verifier

# Tokens of captured passes, padding included. All are captured at the start: capturing one later
# takes as long as dozens of steps, for which all requests wait.
PASSES = (
    *(16, 32, 64, 128, 256, 320, 384, 448, 512),
    *(640, 768, 896, 1024, 1280, 1536, 1792, 2048),
)


@dataclass(slots=True)
class Outcome:
    """One row's result while its step runs."""

    part: RowPart
    result: RowResult
    accepted: list[int] = field(default_factory=list)  # nodes of the accepted path
    is_running: bool = False  # caught up and not finished: it may draft


@dataclass(slots=True)
class BegunStep:
    """A step whose rows are packed; with pipeline stages, its pass has started."""

    plan: StepPlan
    batch: Batch
    started: float
    under_way: BegunPass | None = None

    @property
    def rows(self) -> set[int]:
        return {part.row for part in self.batch.parts}


@dataclass(slots=True, kw_only=True)
class RunnerParts:
    """The parts of a runner, shared by steps run by the host and captured ones."""

    capacity: Capacity
    target: Target
    kv: Sequence[KVCache]
    drafter: Drafter
    verify: Verifier
    sampling: SamplingState
    cost: CostCurve
    prepares: Prepares | None = None  # a drafter that works while the target is busy
    scores_processed: bool = False  # log-probabilities are of processed logits
    rows: RowBuffers = field(init=False)
    grammars: RowGrammars = field(default_factory=RowGrammars)

    def __post_init__(self) -> None:
        self.rows = RowBuffers(self.capacity)


class Passes(Protocol):
    """Captured passes over batches that the host packs."""

    def forward(self, batch: Batch) -> Hidden:
        """The target's states of the batch's tokens; those after them are padding."""

    def prepare(self, size: int, depth: int = 0) -> None:
        """Capture a pass of this many tokens, unless that was done."""

    def rehearse(self, size: int) -> None:
        """Run what would be captured, and keep nothing."""


def passes_to_capture(passes: Passes, *, is_rehearsal: bool) -> list[Callable[[], None]]:
    """Calls that capture the passes of all sizes; a rehearsal keeps none of them."""
    prepare = passes.rehearse if is_rehearsal else passes.prepare
    return [partial(prepare, size) for size in PASSES]


class Piece(IntEnum):
    """The graphs of a step."""

    FORWARD = 0
    FINISH = 1
    STATES = 2  # in place of FORWARD, after a pass over prompts


class GraphSize(NamedTuple):
    """What the graphs of a step have room for."""

    num_rows: int
    num_nodes: int  # of each row
    depth: int  # of trees; 0: drafts are chains


class Lead(FusedTarget, Protocol):
    """Rank 0's part in captured steps that several ranks take together."""

    def captured(
        self,
        piece: Piece,
        size: GraphSize,
        table_XB: Tensor,
        block_size: int,
        graph: Callable[[Callable[[bool], None]], Graph],
    ) -> Graph:
        """What `graph` makes of a function to call each time before the graph runs.

        Raises `torch.OutOfMemoryError` if a rank has no memory for its graph.
        """

    def share_states(self, last_TD: Tensor) -> None:
        """Tell the other ranks the states that stand where FORWARD would have left its own."""

    def share_path(self, rows: StepRows) -> None:
        """Tell the other ranks the accepted nodes, as they move KV too."""

    def check_alive(self) -> None:
        """Raise if a rank has died: the step's results must not be used."""


@runtime_checkable
class LeadsSteps(Protocol):
    """A target over ranks, which all take part in captured passes and steps."""

    def step_lead(self, kv: KVCache) -> Lead:
        """The target that captured steps use."""

    def new_passes(
        self,
        kv: KVCache,
        layers: tuple[int, ...],
        size_XB: tuple[int, int],
        block_size: int,
        pool: Any,
    ) -> Passes | None:
        """Captured passes of all ranks; None: ranks would pad differently."""
