"""A request in the engine: its state, its known tokens, and its pending steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hunch.engine.blocks import BlockTable
from hunch.engine.output import SequenceOutput
from hunch.types import Request, RowWork


class State(Enum):
    """Where a sequence is."""

    WAITING = 0
    RUNNING = 1
    LEAVING = 2  # its row is free, its blocks are freed after the last pending step that names it
    GONE = 3


@dataclass(slots=True, eq=False)
class Sequence:
    """One sample of a request in the engine."""

    request: Request
    job_id: str  # the user's request it belongs to
    arrival: int  # its place in the order of all sequences
    output: SequenceOutput
    max_nodes: int  # most nodes it may draft in a step
    tokens: list[int]  # everything known: prompt, and output so far
    end: int  # known length at which max_tokens is reached
    leader: Sequence | None = None  # the first sample of the same request
    is_streaming: bool = False  # its output is reported at every step that adds to it
    handle: int = -1  # by which its tokens are reported, see Engine.take_tokens
    table: BlockTable = field(default_factory=BlockTable)
    state: State = State.WAITING
    runs_alone: bool = False  # it lost its recurrent state in a step that ran out of memory
    is_over: bool = False  # it has its finish reason; results of pending steps are dropped
    row: int = -1
    snapshot_lengths: list[int] = field(default_factory=list)  # its state is kept after so many
    num_cached: int | None = None  # prompt tokens found in the cache when it first got a row
    num_computed: int = 0  # tokens whose target KV is written, by all collected steps
    num_nodes: int = 0  # most nodes that may wait to be checked in the next planned step
    num_pending: int = 0  # steps that name it and are not collected
    num_partial: int = 0  # of these, steps that catch up only in part, and so decide no token
    pending_more: int = 0  # known tokens they process, beyond one each
    pending_nodes: int = 0  # nodes they check
    member: Member | None = None  # its part in the last step, mostly the same as in the next one
    # Its work in the next step is that of the last one, and is not planned again, until pending
    # steps are sure to leave it with more than `steady_until` known tokens, or may leave it with
    # more than `steady_slots`.
    steady_until: int = 0
    steady_slots: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the queue; the lower one goes first."""
        return self.request.priority, self.arrival

    @property
    def pending_least(self) -> int:
        """The fewest tokens that pending steps commit."""
        return self.num_pending - self.num_partial

    @property
    def num_lacking(self) -> int:
        """Known tokens that no step has processed; those of pending steps count as processed."""
        return len(self.tokens) - self.num_computed - self.num_pending - self.pending_more

    def count_pending(self, work: RowWork, sign: int, *, is_deciding: bool) -> None:
        """A step with this work was planned (`sign` is 1), or is collected (-1)."""
        self.num_pending += sign
        self.num_partial += 0 if is_deciding else sign
        self.pending_more += sign * (work.num_tokens - 1)
        self.pending_nodes += sign * work.num_nodes

    @property
    def most_known(self) -> int:
        """Known tokens, once pending steps have committed as many as they can."""
        return min(len(self.tokens) + self.pending_least + self.pending_nodes, self.end)


@dataclass(slots=True, eq=False)
class Member:
    """A sequence's part in one pending step."""

    sequence: Sequence
    work: RowWork
    is_deciding: bool  # it catches up on all known tokens, so that the target decides the next
