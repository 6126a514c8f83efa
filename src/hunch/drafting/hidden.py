"""The target's last hidden state of each row, for drafters that start from it alone.

Shape letters: X rows of the engine, R rows of this step, D width.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft, Rows, TargetStep
from hunch.drafting.base import DrafterContext
from hunch.drafting.judge import Array, Shape
from hunch.drafting.watch import AcceptanceWatch
from hunch.drafting.window import host


def can_fly(context: DrafterContext, shape: Shape, draft_temperature: float | None) -> bool:
    """Whether a captured step can hold such drafts: plain chains, beside a target that flies."""
    is_plain = shape.is_chain and not shape.is_fixed and shape.min_confidence <= 0
    is_drawn = context.wants_q or draft_temperature is not None
    return is_plain and not is_drawn and context.is_fused


class LastHidden:
    """Kept by observe, taken by propose; also counts how the last draft fared."""

    def __init__(self, context: DrafterContext, watch: AcceptanceWatch, depth: int) -> None:
        self.watch, self.depth = watch, depth
        self.state_XD: Tensor | None = None  # made at the first step, which says how wide
        self.known_X = np.full(context.max_rows, -1)  # known length the state belongs to
        self.guessed: dict[int, tuple[int, int]] = {}
        self.max_rows = context.max_rows

    def observe(self, step: TargetStep) -> None:
        assert step.hidden_TD is not None
        ids_R = host(step.rows.ids_R)
        last_R = host(step.offset_R) + host(step.known_R) - host(step.start_R) - 1
        device = step.hidden_TD.device
        rows_R, at_R = torch.from_numpy(ids_R).to(device), torch.from_numpy(last_R).to(device)
        state_RD = step.hidden_TD[at_R]
        if self.state_XD is None:
            self.state_XD = state_RD.new_zeros(self.max_rows, state_RD.shape[1])
        self.state_XD[rows_R] = state_RD
        self.known_X[ids_R] = host(step.known_R) + 1
        known_X = host(step.rows.known_X)
        for row in ids_R.tolist():
            before = self.guessed.pop(row, None)
            if before is not None:
                length, num_nodes = before
                most = min(self.depth, num_nodes)
                self.watch.count(most, min(int(known_X[row]) - length - 1, most))

    def take(self, rows: Rows, ids_R: Array) -> tuple[Tensor, Array]:
        """The states, and how many nodes each row may draft: none where its state is not known."""
        assert self.state_XD is not None, "observe comes before propose"
        is_ready_R = self.known_X[ids_R] == host(rows.known_X)[ids_R]
        limit_R = np.where(is_ready_R, host(rows.max_draft_X)[ids_R], 0)
        return self.state_XD[torch.from_numpy(ids_R).to(self.state_XD.device)], limit_R

    def remember(self, rows: Rows, draft: Draft) -> None:
        ids_R = host(rows.ids_R)
        known_R, counts = host(rows.known_X)[ids_R].tolist(), draft.num_nodes_R.tolist()
        for row, known, count in zip(ids_R.tolist(), known_R, counts, strict=True):
            if count:
                self.guessed[row] = (known, count)

    def forget(self, rows: list[int]) -> None:
        self.known_X[rows] = -1
        for row in rows:
            self.guessed.pop(row, None)
