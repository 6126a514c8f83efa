"""What other ranks must know of rank 0's KV caches to keep theirs alike.

Shape letters: P slots that move.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.kernels.kv_store import KVCache


def states_size(kv: KVCache) -> tuple[int, int]:
    """The cache's numbers of rows with recurrent states and of places in their rings; 0: none."""
    if kv.states is None:
        return 0, 0
    _, num_rows, num_places, _ = kv.states.inputs_LXGI.shape
    return num_rows, num_places


class Moves:
    """Slots whose KV moved on rank 0 since its last pass."""

    def __init__(self) -> None:
        self.pairs: list[Tensor] = []

    def append_pair(self, source_P: Tensor, target_P: Tensor) -> None:
        self.pairs.append(torch.stack([source_P.cpu(), target_P.cpu()]))


class Cache:
    """A KV cache of rank 0, under the number by which the others know theirs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.moves = Moves()

    def take_moves(self) -> Tensor:
        """The moves in the order in which they were made; none writes what a later one reads."""
        pairs, self.moves.pairs = self.moves.pairs, []
        return torch.cat(pairs, dim=1) if pairs else torch.empty(2, 0, dtype=torch.int64)
