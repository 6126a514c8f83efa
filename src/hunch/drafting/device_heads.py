"""Heads that guess from the target's last state alone (Medusa, MLP), on a device: chains.

They keep nothing from step to step: the state behind the last token that a step committed is there
when the step drafts.

Shape letters: R rows of the step, W tokens of a row in the target's pass, D width, C
columns of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from hunch.draft import Rows
from hunch.drafting.pace import StepShape, chains_of, levels_after
from hunch.drafting.watch import AcceptanceWatch
from hunch.kernels.gpu_draft import committed_inputs, new_inputs
from hunch.kernels.gpu_grow import grow_level
from hunch.kernels.gpu_step import RowState, StepRows
from hunch.models.decoder import Hidden
from hunch.sampling.state import SamplingState

# Logits of one level after another, each after the token of the level before was sent.
Guesses = Generator[Tensor, Tensor, None]


@dataclass(slots=True)
class DeviceHeads:
    """Drafts chains of `num_levels` tokens."""

    name: str
    guesses: Callable[[Tensor, Tensor], Guesses]  # from the state, and the token after it
    sampling: SamplingState
    ids_C: Tensor | None  # the target's id of each column; None: the same
    num_levels: int
    watch: AcceptanceWatch
    is_adaptive: bool = True
    margin: float = 0.0
    is_guided: bool = False
    network: None = None
    feature_layers: tuple[int, ...] = ()

    @property
    def num_nodes(self) -> int:
        return self.num_levels

    @property
    def shapes(self) -> tuple[StepShape, ...]:
        return chains_of(self.num_levels, is_adaptive=self.is_adaptive)

    def depth(self, source: int) -> int:
        return 0

    def works(self, source: int) -> bool:
        return source > 0

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

    def draft(
        self, state: RowState, step: StepRows, hidden: Hidden, kind: int, source: int = 0
    ) -> None:
        num_rows = len(step.ids_R)
        width = len(hidden.last_TD) // num_rows
        ids_T, attn = new_inputs(state, num_rows * width)
        last_R = ids_T.new_empty(num_rows)
        committed_inputs(state, step, ids_T, attn, last_R)
        row_R, token_R = attn.seq_T[::width], ids_T.index_select(0, last_R)
        state_RD = hidden.last_TD.index_select(0, last_R)
        guesses = self.guesses(state_RD, token_R)
        chances_R1 = torch.empty(num_rows, 1, dtype=torch.float32, device=ids_T.device)
        logits_RC, num_levels = next(guesses), levels_after(width, self.num_levels)
        for level in range(num_levels):
            is_last = level + 1 == num_levels
            following = None if is_last else new_inputs(state, num_rows)
            grow_level(
                state, step, logits_RC.float(), chances_R1, self.sampling, depth=level,
                num_nodes=self.num_nodes, kind=kind, row_T=row_R, ids_C=self.ids_C,
                following=following,
            )  # fmt: skip
            if following is not None:
                logits_RC = guesses.send(following[0])
