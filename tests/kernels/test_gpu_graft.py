"""Trees that grew level by level: the likeliest nodes stay, the last make room for guesses."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from hunch.kernels import best_first, draft, gpu_graft
from hunch.kernels import step as columns
from hunch.kernels.step import RowState, StepRows
from row_states import DEVICE, cells_of, step_of

WIDTH, NUM_LEVELS, GROWN = 4, 3, 12


def grown(
    rng: random.Random, room: list[int], ends: int
) -> tuple[RowState, StepRows, torch.Tensor]:
    """Rows with trees of three levels, the first of each grown from the first of the one above."""
    state = cells_of([[1, 2, 3]] * len(room), max_nodes=16)
    step = step_of(list(range(len(room))), 0, max_draft=room, num_guesses=16)
    state.end_X[-1] = int(state.known_X[-1]) + ends
    chances: list[list[float]] = []
    for row in range(len(room)):
        line: list[float] = []
        for node in range(GROWN):
            level, place = divmod(node, WIDTH)
            above = rng.randrange((level - 1) * WIDTH, level * WIDTH) if place else node - WIDTH
            parent = above if level else -1
            state.draft_XG[row, node], state.parents_XG[row, node] = 100 + node, parent
            # Steps of a half: some are equal.
            line.append((line[parent] if level else 0.0) - rng.randrange(4) / 2)
        chances.append(line)
    state.num_nodes_X.fill_(GROWN)
    return state, step, torch.tensor(chances, device=DEVICE)


@pytest.mark.parametrize("least", [None, -1.5])
@pytest.mark.parametrize("seed", range(3))
def test_the_likeliest_nodes_stay(seed: int, least: float | None) -> None:
    made: list[tuple[RowState, StepRows]] = []
    for keep in (gpu_graft.keep_likeliest, best_first.keep_likeliest_ref):
        state, step, chances_RN = grown(random.Random(seed), [16, 7, 5, 2, 16], 3)
        state.is_done_X[2] = 1
        keep(state, step, chances_RN, level_size=WIDTH, most=8, least=least)
        made.append((state, step))
    (state, step), (wanted, plain) = made
    assert torch.equal(state.num_nodes_X, wanted.num_nodes_X)
    for row, count in enumerate(state.num_nodes_X.tolist()):
        assert torch.equal(state.draft_XG[row, :count], wanted.draft_XG[row, :count])
        assert torch.equal(state.parents_XG[row, :count], wanted.parents_XG[row, :count])
    assert torch.equal(step.result_RC, plain.result_RC)
    if least is not None:
        return
    # Row 1 has room for 7 nodes. Of row 4 two tokens are to come after the next: two levels.
    assert state.num_nodes_X.tolist() == [8, 7, GROWN, 2, 8]
    for row in (0, 1):
        first_path = [100 + WIDTH * level for level in range(NUM_LEVELS)]
        assert state.draft_XG[row, :NUM_LEVELS].tolist() == first_path
        chance = {100 + node: float(one) for node, one in enumerate(chances_RN[row])}
        kept = state.draft_XG[row, : int(state.num_nodes_X[row])].tolist()
        rest = [chance[token] for token in kept[NUM_LEVELS:]]
        assert rest == sorted(rest, reverse=True)
    assert max(state.draft_XG[4, :8].tolist()) < 100 + 2 * WIDTH
    parents = state.parents_XG[:2, :7]
    assert (parents < torch.arange(7, device=DEVICE)).all(), "a node stands before its parent"


@pytest.mark.parametrize("graft", [gpu_graft.graft, draft.graft_ref], ids=["kernel", "plain"])
def test_the_last_nodes_make_room_for_guesses(graft: Callable[..., None]) -> None:
    state = cells_of([[1, 2, 3]] * 3, max_nodes=16)
    step = step_of([0, 1, 2], 0, max_draft=[16, 16, 16])
    guesses = [[10, 11, 90, 91], [80, 81, 82, 83], [-1, -1, -1, -1]]
    for row in range(3):  # a chain
        for node in range(10):
            state.draft_XG[row, node], state.parents_XG[row, node] = 10 + node, node - 1
        state.num_nodes_X[row] = 10
        first = step.guesses_at
        step.result_RC[row, first : first + 4] = torch.tensor(guesses[row], device=DEVICE)
    graft(state, step, 4, 10)
    assert state.num_nodes_X.tolist() == [10, 10, 10]
    # Two of row 0's guesses were there already.
    assert state.draft_XG[0, :10].tolist() == [*range(10, 18), 90, 91]
    assert state.parents_XG[0, 8:10].tolist() == [1, 8]
    assert state.draft_XG[1, :10].tolist() == [*range(10, 16), 80, 81, 82, 83]
    assert state.parents_XG[1, 6:10].tolist() == [-1, 6, 7, 8]
    assert state.draft_XG[2, :10].tolist() == [*range(10, 20)]
    assert step.result_RC[:, columns.DRAFTED].tolist() == [10, 10, 10]
