"""Rows as steps on a device see them, made from texts."""

from __future__ import annotations

import torch

from hunch.kernels.step import FIRST, RowState, StepRows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(*values: float, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def cells_of(
    texts: list[list[int]], *, ends: list[int] | None = None, room: int = 80, max_nodes: int = 8
) -> RowState:
    state = RowState.create(len(texts), room, 10, max_nodes, 2, 4, DEVICE)
    for row, text in enumerate(texts):
        state.tokens_XL[row, : len(text)] = torch.tensor(text)
    state.known_X.copy_(numbers(*map(len, texts)))
    state.end_X.copy_(numbers(*(ends or [room] * len(texts))))
    state.stop_XS.fill_(-1)
    return state


def step_of(
    ids: list[int], num_nodes: int, *, max_checked: list[int] | None = None,
    max_draft: list[int] | None = None, num_checked: list[int] | None = None, num_guesses: int = 8,
) -> StepRows:  # fmt: skip
    num_rows, many = len(ids), [99] * len(ids)
    return StepRows(
        ids_R=numbers(*ids),
        max_checked_R=numbers(*(max_checked or many)),
        max_draft_R=numbers(*(max_draft or many)),
        num_checked_R=numbers(*(num_checked or [0] * num_rows)),
        path_RK=torch.full((num_rows, num_nodes + 1), -1, device=DEVICE),
        result_RC=torch.zeros(
            num_rows, FIRST + num_nodes + 1 + num_guesses, dtype=torch.int64, device=DEVICE
        ),
    )
