"""Lookup by brute force over the rows' tokens on a device: what `ngram` and `suffix` are there."""

from __future__ import annotations

from dataclasses import dataclass

from hunch.draft import Rows
from hunch.kernels.gpu_spec import Cells, StepRows, lookup


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceLookup:
    """The most recent of the longest matches of a row's end goes on as it went on then."""

    name: str
    min_match: int
    max_match: int
    num_nodes: int
    margin: float = 0.0
    is_adaptive: bool = True
    depth: int = 0
    needs_host: bool = False

    @property
    def options(self) -> tuple[int, ...]:
        """A step takes as long for 4, 8 or 16 tokens as for a few less."""
        if not self.is_adaptive:
            return (self.num_nodes,)
        some = [n for n in (3, 7, 15) if n <= self.num_nodes]
        return (0, *(some or [self.num_nodes]))

    def draft(self, cells: Cells, step: StepRows, kind: int) -> None:
        lookup(cells, step, self.num_nodes, self.min_match, self.max_match)

    def is_ready(self, rows: Rows) -> bool:
        return True
