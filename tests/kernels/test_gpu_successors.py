"""Trees of successors in Triton, and the table that they come from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from hunch.kernels import gpu_successors, successors
from hunch.kernels import step as columns
from hunch.kernels.successor_entries import CERTAIN, ONE_TOKEN, WIDTH, Entries, contexts_of
from hunch.kernels.successors import Successors, level_widths
from row_states import DEVICE, cells_of, step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def some_entries(gen: np.random.Generator, vocab: int, contexts: int) -> Entries:
    """Random successors of tokens and of pairs, with chances of few values."""
    lines: list[tuple[int, int, int, int]] = []
    seen = set()
    for _ in range(contexts):
        first = int(gen.integers(ONE_TOKEN, vocab))
        context = first, int(gen.integers(vocab))
        if context in seen:
            continue
        seen.add(context)
        count = int(gen.integers(1, WIDTH + 1))
        tokens = gen.choice(vocab, count, replace=False).tolist()
        chances = sorted(gen.choice([1, 7, 7, 20, 31], count).tolist(), reverse=True)
        lines += [(*context, token, chance) for token, chance in zip(tokens, chances, strict=True)]
    first, last, following, chance = map(np.array, zip(*lines, strict=True))
    return Entries(first, last, following, chance)


@pytest.mark.parametrize("widths", [[3, 1], [5, 3, 1], [8, 8, 5, 3], [1], [2, 8, 1, 1, 1]])
@pytest.mark.parametrize("has_pairs", [False, True])
def test_the_kernel_drafts_the_reference_s_trees(widths: list[int], has_pairs: bool) -> None:
    """Rows at their end, with room for few nodes, ended ones and padding among them."""
    rng, gen = np.random.default_rng(len(widths)), torch.Generator().manual_seed(sum(widths))
    texts = [torch.randint(0, 40, (n,), generator=gen).tolist() for n in (1, 3, 9, 20, 7, 5, 6, 4)]
    known = torch.randint(0, 40, (30,), generator=gen).tolist()
    logits_TV = torch.randn(len(known), 40, generator=gen).to(DEVICE)
    entries = some_entries(rng, 40, 500) if has_pairs else None
    made = []
    for kernel in (gpu_successors.successor_tree, successors.successor_tree_ref):
        state = cells_of(texts, ends=[80, 80, 80, 80, 80, 80, 7, 7], max_nodes=24)
        state.is_done_X[5] = 1
        state.draft_XG.fill_(0)
        state.parents_XG.fill_(0)
        state.num_nodes_X.fill_(3)
        room = [24, 24, 24, 2, 24, 24, 24, 24, 24]
        step = step_of(
            [0, 1, 2, 3, 4, 5, 6, 7, -1], 0, max_draft=room, num_checked=[0] * 8 + [-1],
            num_guesses=24,
        )  # fmt: skip
        table = Successors.create(40, DEVICE, entries, num_best=3, pair_bits=8)
        ids_T = torch.tensor(known, device=DEVICE)
        table.keep(ids_T, torch.ones_like(ids_T, dtype=torch.bool), logits_TV)
        kernel(state, step, table, torch.tensor(widths, device=DEVICE), sum(widths))
        is_node = torch.arange(state.draft_XG.shape[1], device=DEVICE) < state.num_nodes_X[:, None]
        drafts = [torch.where(is_node, cells, -9) for cells in (state.draft_XG, state.parents_XG)]
        made.append((*drafts, state.num_nodes_X, step.result_RC[:, : columns.FIRST]))
    for got, want in zip(*made, strict=True):
        assert torch.equal(got, want)
    drafts, parents, counts = (cells.tolist() for cells in made[0][:3])
    assert counts[5:7] == [3, 0], "ended; at its end"
    assert counts[3] <= 2
    live = [row for row in range(8) if row != 5]
    assert min(sum(widths), 5) <= max(counts[row] for row in live) <= sum(widths)
    for row in live:
        nodes = list(zip(parents[row], drafts[row], strict=True))[: counts[row]]
        assert all(parent < node for node, (parent, _) in enumerate(nodes))
        assert len(set(nodes)) == len(nodes)


@pytest.mark.parametrize("kernel", [gpu_successors.successor_tree, successors.successor_tree_ref])
def test_no_node_stands_past_the_last_token_of_its_row(kernel: Any) -> None:
    """There the model may have no positions any more."""
    state = cells_of([[3, 1, 4]] * 4, ends=[4, 5, 6, 80], max_nodes=12)
    step = step_of([0, 1, 2, 3], 0, max_draft=[12] * 4, num_checked=[0] * 4)
    table = Successors.create(10, DEVICE)
    ids_T = torch.arange(10, device=DEVICE)
    logits_TV = torch.randn(10, 10, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    table.keep(ids_T, ids_T >= 0, logits_TV)
    kernel(state, step, table, torch.tensor([4, 3, 2, 1], device=DEVICE), 10)
    depths = []
    for row, count in enumerate(state.num_nodes_X.tolist()):
        levels: list[int] = []
        for parent in state.parents_XG[row, :count].tolist():
            levels.append(1 + (levels[parent] if parent >= 0 else 0))
        depths.append(max(levels, default=0))
    assert depths == [0, 1, 2, 4]


@pytest.mark.parametrize(
    ("num_tokens", "num_columns", "num_best"),
    [(1, 3, 3), (7, 40, 8), (33, 4097, 8), (5, 9000, 5)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_keeps_what_the_reference_does(
    num_tokens: int, num_columns: int, num_best: int, dtype: torch.dtype
) -> None:
    """Logits of few values, so that many are equal; some tokens are padding."""
    gen = torch.Generator().manual_seed(num_tokens)
    tables = [Successors.create(num_columns, DEVICE, num_best=num_best) for _ in range(2)]
    for _ in range(2):  # the second time on top of the first
        ids_T = torch.randint(0, num_columns, (num_tokens,), generator=gen).to(DEVICE)
        slot_T = torch.randint(-1, 4, (num_tokens,), generator=gen).to(DEVICE)
        logits_TV = torch.randn(num_tokens, num_columns, generator=gen).mul(30).round().div(8)
        logits_TV = logits_TV.to(DEVICE, dtype)
        gpu_successors.keep(tables[0], ids_T, slot_T, logits_TV)
        tables[1].keep(ids_T, slot_T >= 0, logits_TV)
    got, want = (table.after_token_VW[:-1] for table in tables)
    assert torch.equal(got, want)
    assert num_tokens == 1 or int((got[:, 0] > 0).sum()) > 1


def test_of_equal_tokens_the_last_counts_and_padding_does_not() -> None:
    table = Successors.create(20, DEVICE, num_best=2)
    ids_T = torch.tensor([3, 7, 3, 13, 5], device=DEVICE)
    is_token_T = torch.tensor([True, True, True, False, True], device=DEVICE)
    logits_TV = torch.zeros(5, 20, device=DEVICE)
    for place, (first, second) in enumerate([(1, 2), (4, 6), (8, 9), (1, 1), (11, 12)]):
        logits_TV[place, second], logits_TV[place, first] = 1.0, 2.0
    table.keep(ids_T, is_token_T, logits_TV)
    found = {last: [token for token, _ in table.find(0, last)] for last in (3, 7, 13, 5, 0)}
    assert found == {3: [8, 9], 7: [4, 6], 13: [], 5: [11, 12], 0: []}
    table.clear()
    assert table.find(0, 7) == []


def test_pairs_come_first_and_single_tokens_share_what_they_leave() -> None:
    entries = Entries(
        first_E=np.array([ONE_TOKEN, ONE_TOKEN, 4, 4, 6]),
        last_E=np.array([5, 5, 5, 5, 7]),
        next_E=np.array([1, 2, 2, 3, 9]),
        chance_E=np.array([100, 50, 200, 5, 255]),
    )
    table = Successors.create(10, DEVICE, entries)
    share = CERTAIN * CERTAIN
    assert table.find(4, 5) == [(2, 200 * CERTAIN), (3, 5 * CERTAIN), (1, 100 * 50)]
    assert table.find(3, 5) == table.find(-1, 5) == [(1, 100 * CERTAIN), (2, 50 * CERTAIN)]
    assert table.find(6, 7) == [(9, share)]
    assert table.find(5, 4) == []
    table.keep_best(torch.tensor([5], device=DEVICE), torch.tensor([[8, 2]], device=DEVICE))
    assert [token for token, _ in table.find(4, 5)] == [2, 3, 8]
    table.clear()
    assert table.find(3, 5) == [(1, 100 * CERTAIN), (2, 50 * CERTAIN)]


def test_of_pairs_that_share_a_slot_the_first_one_has_it() -> None:
    """Frequent contexts come first."""
    rng = np.random.default_rng(3)
    entries = some_entries(rng, 60, 3000)
    table = Successors.create(60, DEVICE, entries, pair_bits=6)
    contexts = list(
        dict.fromkeys(zip(entries.first_E.tolist(), entries.last_E.tolist(), strict=True))
    )
    slots: dict[int, tuple[int, int]] = {}
    for first, last in contexts:
        if first != ONE_TOKEN:
            pair = contexts_of(np.array([first]), np.array([last]))
            slots.setdefault(int(successors.slots_of(pair, 64)[0]), (first, last))
    kept = [
        context for context in contexts if context[0] != ONE_TOKEN and context in slots.values()
    ]
    assert 50 < len(kept) <= 64
    for first, last in contexts:
        mine = [
            (token, chance * CERTAIN)
            for one, two, token, chance in zip(
                entries.first_E, entries.last_E, entries.next_E, entries.chance_E, strict=True
            )
            if (one, two) == (first, last)
        ]
        if (first, last) in kept:
            assert table.find(first, last)[: len(mine)] == mine
        elif first != ONE_TOKEN:
            assert table.find(first, last) == table.find(-1, last)


@pytest.mark.parametrize(
    ("num_nodes", "num_levels", "widths"),
    [(4, 2, [3, 1]), (9, 3, [5, 3, 1]), (24, 4, [8, 8, 5, 3]), (1, 4, [1]), (99, 2, [8, 8])],
)
def test_levels_are_about_half_as_wide_as_those_above(
    num_nodes: int, num_levels: int, widths: list[int]
) -> None:
    assert level_widths(num_nodes, num_levels) == widths
