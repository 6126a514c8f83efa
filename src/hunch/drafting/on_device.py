"""Lookup by brute force over the rows' tokens on a device: what `ngram` and `suffix` are there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hunch.draft import Rows
from hunch.drafting.pace import REST, StepShape
from hunch.kernels.gpu_lookup import DevicePhrases, lookup
from hunch.kernels.gpu_step import RowState, StepRows


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLookup:
    """The most recent of the longest matches of a row's end goes on as it went on then.

    With a phrase table that says what comes next where it is right more often.
    """

    name: str
    min_match: int
    max_match: int
    num_nodes: int
    margin: float = 0.0
    is_adaptive: bool = True
    phrases: DevicePhrases | None = None
    network: None = None
    watch: None = None
    feature_layers: tuple[int, ...] = ()
    num_levels: int = 0

    @property
    def is_guided(self) -> bool:
        return self.phrases is not None

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        """A step takes as long for 2, 4, 8 or 16 tokens as for a few less."""
        if not self.is_adaptive:
            return (StepShape(self.num_nodes),)
        sizes = (1, 3, 7, 15) if self.num_nodes > 2 else (self.num_nodes,)
        return (StepShape(0), *(StepShape(n) for n in sizes if n <= self.num_nodes))

    def depth(self, source: int) -> int:
        return 0

    def draft(
        self, state: RowState, step: StepRows, hidden: Any, kind: int, source: int = 0
    ) -> None:
        self.look(state, step, self.num_nodes)

    def look(self, state: RowState, step: StepRows, num_nodes: int) -> None:
        """A chain of so many nodes for each row."""
        lookup(state, step, num_nodes, self.min_match, self.max_match, phrases=self.phrases)

    def works(self, source: int) -> bool:
        return source != REST

    def writes_kv(self, source: int) -> bool:
        return False

    def can_follow(self, rows: Rows) -> bool:
        return True

    def needs_host(self, rows: Rows) -> bool:
        return False

    def is_ready(self, rows: Rows) -> None:
        return None

    def drafted_by(self, source: int, matched: int) -> str:
        return self.name
