"""How deep and wide the trees are that a network drafts level by level, and one of their levels.

Shape letters: M packed nodes, P depth so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeShape:
    """How deep and how wide drafts are."""

    depth: int  # longest path
    num_nodes: int  # nodes kept
    width: int = 1  # nodes of a level that get children
    branch: int = 1  # children considered per node
    is_fixed: bool = False  # one shape whatever the tokens: one node per level gets children
    min_confidence: float = 0.0  # a path of a lower value is not followed

    @property
    def is_chain(self) -> bool:
        return self.width == 1 and self.branch == 1

    @property
    def is_dynamic(self) -> bool:
        return not self.is_chain and not self.is_fixed

    @property
    def level_size(self) -> int:
        """Nodes of every level in captured steps, where all levels have as many."""
        most = min(self.num_nodes // self.depth, self.width * self.branch)
        return 1 if self.is_chain else max(most, 1)

    @property
    def least(self) -> float | None:
        """Log of the value below which a path is not followed."""
        return log(self.min_confidence) if self.min_confidence > 0 else None


@dataclass(slots=True)
class Level:
    """Drafted nodes of one depth, for a network to process, packed row after row."""

    place_M: Array  # the row's place in the step
    token_M: Array
    parent_M: Array  # packed index in the level before
    path_MP: Array  # numbers of the nodes on its path, itself included; see `grow`
