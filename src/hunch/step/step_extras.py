"""What some captured steps do beside the rest: masks, scores, drafts shown, sources of drafts.

Shape letters: R rows of the step, N nodes of a step's draft, K tokens one step can commit (N + 1),
M rows of logits (R times K), P longest path, V vocabulary, W words of a mask, S scored tokens (R
times K), E the scores in a row's result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hunch.drafting.base import RowSource
from hunch.kernels.gpu_process import draft_paths
from hunch.kernels.gpu_scores import committed, scores
from hunch.kernels.step import RowSources, RowState, StepRows
from hunch.step.results import Columns

MAX_EXPECTED = 16384  # tokens of a prediction that captured steps look in


class StepMasks:
    """What a grammar allows after each root and node: written by the host, read by `finish`.

    The device reads the host's memory: copies would take longer, and few of the masks are in use.
    The host writes those of a step after it has received the step before.
    """

    def __init__(self, num_logits: int, vocab_size: int, device: torch.device) -> None:
        size, is_cuda = (num_logits, -(-vocab_size // 32)), device.type == "cuda"
        self._mask_MW = torch.zeros(size, dtype=torch.int32, pin_memory=is_cuda)
        self._is_masked_M = torch.zeros(num_logits, dtype=torch.bool, pin_memory=is_cuda)
        self._words, self._flags = self._mask_MW.numpy(), self._is_masked_M.numpy()

    def of(self, num_logits: int) -> tuple[Tensor, Tensor]:
        """The masks of so many rows of logits, and which of them have one."""
        return self._mask_MW[:num_logits], self._is_masked_M[:num_logits]

    def fill(
        self, num_logits: int, write: Callable[[np.ndarray, np.ndarray], dict[int, int]]
    ) -> dict[int, int]:
        """Let `write` fill in words, and which rows of logits they hold for."""
        flags_M = self._flags[:num_logits]
        flags_M[...] = False
        return write(self._words[:num_logits], flags_M)


class StepSources:
    """What rows are drafted from where their requests say so: written by the host as they come."""

    def __init__(self, num_rows: int, room: int, device: torch.device) -> None:
        self.tables = RowSources.create(num_rows, min(room, MAX_EXPECTED), device)
        self._usual_W = self.tables.rules_XW[0].clone()
        self._is_own = [False] * num_rows

    def put(
        self, row: int, source: RowSource | None, expected: Sequence[int], num_prompt: int
    ) -> None:
        """The row's request names a method (None: it does not), or says what it expects."""
        rules_XW, expected_XE = self.tables.rules_XW, self.tables.expected_XE
        expected = expected[: expected_XE.shape[1]]
        source = source or RowSource(name="")
        matches = source.sure, source.min_match, source.max_match, source.has_table
        line = (*matches, len(expected), source.is_alone, num_prompt, 0)
        rules_XW[row] = torch.tensor(line, dtype=torch.int64)
        if expected:
            expected_XE[row, : len(expected)] = torch.tensor(expected, dtype=torch.int32)
        self._is_own[row] = True

    def clear(self, row: int) -> None:
        """The row's request is drafted for as the others are."""
        if self._is_own[row]:
            self.tables.rules_XW[row] = self._usual_W
            self._is_own[row] = False


def drafted_paths(state: RowState, rows: StepRows, num_nodes: int) -> Tensor:
    """For each root and node of a step, the drafted tokens that lead to it; -1 after the last."""
    num_rows = len(rows.ids_R)
    path_MP = rows.ids_R.new_empty(num_rows * (num_nodes + 1), num_nodes)
    draft_paths(rows.ids_R, rows.count_R, state.draft_XG, state.parents_XG, -1, path_MP)
    return path_MP


def write_drafts(state: RowState, rows: StepRows, columns: Columns) -> None:
    """Tokens and parents of the drafts that now wait, into the result."""
    row_R, count = rows.ids_R.clamp(min=0), columns.num_guesses
    at = columns.draft
    rows.result_RC[:, at : at + count] = state.draft_XG[row_R, :count]
    rows.result_RC[:, at + count : at + 2 * count] = state.parents_XG[row_R, :count]


def write_scores(logits_MV: Tensor, rows: StepRows, num_best: int, columns: Columns) -> None:
    """Log-probabilities of the committed tokens and of the best ones beside them."""
    num_rows, num_k = rows.path_RK.shape
    at_S, token_S = (rows.ids_R.new_empty(num_rows * num_k) for _ in range(2))
    committed(rows, at_S, token_S)
    line_RE = rows.result_RC[:, columns.scores_at : columns.scores_end]
    scores(logits_MV, at_S, token_S, num_best, line_RE.view(num_rows, num_k, -1))
