"""What recurrent layers remember of rows: states, folded in token by token.

A row's state holds known tokens alone. Drafted nodes are folded into a copy that is dropped. Their
inputs stay in a ring, and the next pass first folds in those of the accepted nodes. So a rejected
node leaves no trace, and there is one state per row, not one per node. Every token is folded in by
itself, in order: chunks and drafts do not change a bit.

Shape letters: X rows of the engine, L recurrent layers, G places of the ring, I inputs of a token,
N heads, H width of a key, D width of a value, C channels of the convolution, J its taps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor


class Recurrence(ABC):
    """The sizes of one kind of recurrent layer, and how a token is folded into its state."""

    num_taps: int  # tokens that the convolution sees, its own included

    @property
    @abstractmethod
    def num_inputs(self) -> int:
        """Inputs of a token, as the layer's product gives them."""

    @property
    @abstractmethod
    def state(self) -> tuple[int, int, int]:
        """Heads, width of a key and of a value; a key without width: there is no state."""

    @property
    def value_width(self) -> int:
        """Numbers that a token reads."""
        num_heads, _, width = self.state
        return num_heads * width

    @abstractmethod
    def fold(self, weights: Any, window_JI: Tensor, state_NHD: Tensor) -> tuple[Tensor, Tensor]:
        """One token: the state after it, and what it reads, ND. The window ends with it."""


def convolved(channels_JC: Tensor, conv_JC: Tensor) -> Tensor:
    """The sum over the taps of a window, the oldest token's first."""
    mixed_C = channels_JC[0] * conv_JC[0]
    for tap in range(1, len(channels_JC)):
        mixed_C = mixed_C + channels_JC[tap] * conv_JC[tap]
    return mixed_C


@dataclass(frozen=True, slots=True)
class StatesShape:
    """How much recurrent layers keep."""

    recurrence: Recurrence
    num_layers: int
    num_rows: int
    max_nodes: int  # of a draft

    @property
    def states(self) -> tuple[int, ...]:
        return self.num_layers, self.num_rows, *self.recurrence.state

    @property
    def inputs(self) -> tuple[int, ...]:
        """The ring has room for a draft and for what its first node's convolution sees."""
        num_places = 1 << (self.max_nodes + self.recurrence.num_taps - 1).bit_length()
        return self.num_layers, self.num_rows, num_places, self.recurrence.num_inputs

    def num_bytes(self, dtype: torch.dtype) -> int:
        return 4 * prod(self.states) + dtype.itemsize * prod(self.inputs)


@dataclass(slots=True)
class RecurrentStates:
    """What recurrent layers remember of each row; a row that begins at position 0 begins anew."""

    state_LXNHD: Tensor  # float32
    inputs_LXGI: Tensor  # of position p in place p % G, as the layer's product gave them
    folded_LX: Tensor  # tokens of the row that the state holds
    on_copy: list[Callable[[int, int], None]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)  # rows, where no layer here says so

    def copy(self, source: int, target: int) -> None:
        """Let a row remember what another one does."""
        for tensor in (self.state_LXNHD, self.inputs_LXGI, self.folded_LX):
            tensor[:, target] = tensor[:, source]
        for tell in self.on_copy:
            tell(source, target)

    def is_ahead(self, row: int, num_computed: int) -> bool:
        """Whether a step that failed has left states with more tokens than were computed.

        Then the step cannot be repeated: the row has to begin again, at position 0.
        """
        if not num_computed:
            self.lost.discard(row)
            return False
        return row in self.lost or bool((self.folded_LX[:, row] > num_computed).any())

    def lose(self, rows: Sequence[int]) -> None:
        """Let rows count as ahead: a pass failed on another rank, which has changed its states."""
        for row in rows:
            self.folded_LX[:, row] = torch.iinfo(torch.int64).max
        if not len(self.folded_LX):  # all recurrent layers are on other ranks
            self.lost.update(rows)

    @staticmethod
    def create(
        shape: StatesShape | None,
        dtype: torch.dtype,
        device: torch.device,
        zeros: Callable[..., Tensor] = torch.zeros,
    ) -> RecurrentStates | None:
        """Inputs are of the model's precision."""
        if shape is None:
            return None
        num_rows = shape.num_layers, shape.num_rows
        return RecurrentStates(
            (zeros if prod(shape.states) else torch.zeros)(
                shape.states, dtype=torch.float32, device=device
            ),
            zeros(shape.inputs, dtype=dtype, device=device),
            torch.zeros(num_rows, dtype=torch.int64, device=device),
        )
