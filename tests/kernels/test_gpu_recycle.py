"""Trees of successors in Triton, and the table that they come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hunch.kernels import gpu_recycle, successors
from hunch.kernels import step as columns
from hunch.kernels.successors import RankTree, Successors
from row_states import DEVICE, cells_of, step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

RANKS, PARENTS = [0, 1, 0, 0, 2, 1, 0, 1], [-1, -1, 0, 2, -1, 0, 1, 3]


@pytest.mark.parametrize("num_slots", [8, 40])
def test_trees_have_no_nodes_after_tokens_without_successors(num_slots: int) -> None:
    """Tokens that share a slot take it from each other."""
    gen = torch.Generator().manual_seed(num_slots)
    texts = [torch.randint(0, 40, (n,), generator=gen).tolist() for n in (1, 3, 9, 20, 7, 5, 6, 4)]
    known = [text[-1] for text in texts] + torch.randint(0, 40, (25,), generator=gen).tolist()
    logits_TV = torch.randn(len(known), 40, generator=gen).to(DEVICE)
    made = []
    for kernel in (gpu_recycle.recycled, successors.recycled_ref):
        state = cells_of(texts, ends=[80, 80, 80, 80, 80, 80, 7, 80])
        state.is_done_X[5] = 1
        state.draft_XG.fill_(0)
        state.parents_XG.fill_(0)
        state.num_nodes_X.fill_(3)
        room = [8, 8, 8, 2, 8, 8, 8, 8]
        step = step_of([0, 1, 2, 3, 4, 5, 6, -1], 0, max_draft=room, num_checked=[0] * 7 + [-1])
        table = Successors.create(num_slots, 3, DEVICE)
        ids_T = torch.tensor(known, device=DEVICE)
        table.keep(ids_T, torch.ones_like(ids_T, dtype=torch.bool), logits_TV)
        tree = RankTree.of(RANKS, PARENTS, DEVICE)
        kernel(state, step, table, tree)
        is_node = torch.arange(8, device=DEVICE) < state.num_nodes_X[:, None]
        drafts = [torch.where(is_node, cells, -9) for cells in (state.draft_XG, state.parents_XG)]
        made.append((*drafts, state.num_nodes_X, step.result_RC[:, : columns.FIRST]))
    for got, want in zip(*made, strict=True):
        assert torch.equal(got, want)
    counts = made[0][2].tolist()
    assert counts[5:] == [3, 0, 3], "ended, at its end, no part of the step"
    assert counts[3] <= 2
    assert max(counts) > 3
    assert num_slots == 40 or min(counts[:5]) < max(counts[:5])


@pytest.mark.parametrize(
    ("num_tokens", "num_columns", "width", "num_slots"),
    [(1, 3, 3, 5), (7, 40, 8, 11), (33, 4097, 8, 16), (5, 9000, 5, 9000)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_keeps_what_the_reference_does(
    num_tokens: int, num_columns: int, width: int, num_slots: int, dtype: torch.dtype
) -> None:
    """Logits of few values, so that many are equal; some tokens are padding."""
    gen = torch.Generator().manual_seed(num_tokens)
    tables = [Successors.create(num_slots, width, DEVICE) for _ in range(2)]
    for _ in range(2):  # the second time on top of the first
        ids_T = torch.randint(0, num_columns, (num_tokens,), generator=gen).to(DEVICE)
        slot_T = torch.randint(-1, 4, (num_tokens,), generator=gen).to(DEVICE)
        logits_TV = torch.randn(num_tokens, num_columns, generator=gen).mul(30).round().div(8)
        logits_TV = logits_TV.to(DEVICE, dtype)
        gpu_recycle.keep(tables[0], ids_T, slot_T, logits_TV)
        tables[1].keep(ids_T, slot_T >= 0, logits_TV)
    made = [(table.token_S[:-1], table.next_SC[:-1]) for table in tables]
    for got, want in zip(*made, strict=True):
        assert torch.equal(got, want)
    assert num_tokens == 1 or int((made[0][0] >= 0).sum()) > 1


@pytest.mark.parametrize("kernel", [gpu_recycle.recycled, successors.recycled_ref])
def test_no_node_stands_past_the_last_token_of_its_row(kernel: Any) -> None:
    """There the model may have no positions any more."""
    texts = [[3, 1, 4]] * 4
    state = cells_of(texts, ends=[4, 5, 6, 80])
    step = step_of([0, 1, 2, 3], 0, max_draft=[8] * 4, num_checked=[0] * 4)
    table = Successors.create(10, 3, DEVICE)
    ids_T = torch.arange(10, device=DEVICE)
    gen = torch.Generator().manual_seed(0)
    logits_TV = torch.randn(10, 10, generator=gen).to(DEVICE)
    table.keep(ids_T, ids_T >= 0, logits_TV)
    kernel(state, step, table, RankTree.of(RANKS, PARENTS, DEVICE))
    depths = []
    for row, count in enumerate(state.num_nodes_X.tolist()):
        parents = state.parents_XG[row, :count].tolist()
        levels: list[int] = []
        for parent in parents:
            levels.append(1 + (levels[parent] if parent >= 0 else 0))
        depths.append(max(levels, default=0))
    assert depths == [0, 1, 2, 4]


def test_of_equal_tokens_the_last_counts_and_padding_does_not() -> None:
    table = Successors.create(10, 2, DEVICE)
    ids_T = torch.tensor([3, 7, 3, 13, 5], device=DEVICE)
    is_token_T = torch.tensor([True, True, True, False, True], device=DEVICE)
    logits_TV = torch.zeros(5, 20, device=DEVICE)
    for place, (first, second) in enumerate([(1, 2), (4, 6), (8, 9), (1, 1), (11, 12)]):
        logits_TV[place, second], logits_TV[place, first] = 1.0, 2.0
    table.keep(ids_T, is_token_T, logits_TV)
    found = {token: table.find(token) for token in (3, 7, 13, 5, 0)}
    assert found == {3: [8, 9], 7: [4, 6], 13: [], 5: [11, 12], 0: []}
    table.clear()
    assert table.find(7) == []
