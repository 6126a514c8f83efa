"""Best-first trees in Triton against their plain form, and that against a search without levels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from cases import every_pair
from hunch.drafting.trees import best_first
from hunch.kernels import gpu_best_first
from hunch.kernels.best_first import Growth, RankedLevel, extend_ref, ranked_ref, trusted
from hunch.kernels.step import FIRST, Draws, RowState, StepRows
from hunch.sampling.state import SamplingState
from hunch.types import Request, SamplingParams
from kernels.test_gpu_grow import DEVICE, DONE, END, KNOWN, ROOM, states

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
LEVELS, COLUMNS = 4, 60


class Trees:
    """Rows and a network whose scores depend on the depth and the token before."""

    def __init__(
        self, rows: list[int], size: int, branch: int = 3, *, is_shared: bool = False,
        has_odds: bool = False, most: int | None = None, num_columns: int = COLUMNS,
        ids_C: Tensor | None = None,
    ) -> None:  # fmt: skip
        noise = torch.Generator().manual_seed(1)
        self.size, self.branch, self.most, self.is_shared = size, branch, most, is_shared
        self.ids_C, vocab = ids_C, num_columns if ids_C is None else int(ids_C.max()) + 1
        scale = 1 if is_shared else vocab
        self.scores = 3 * torch.randn(LEVELS, scale, num_columns, generator=noise).to(DEVICE)
        self.odds = torch.randn(LEVELS, vocab, generator=noise).to(DEVICE) if has_odds else None
        self.state = RowState.create(5, 60, 15, size + 2, 2, 4, DEVICE)
        for cell, values in (("known_X", KNOWN), ("end_X", END), ("is_done_X", DONE)):
            getattr(self.state, cell).copy_(torch.tensor(values))
        self.state.tokens_XL.copy_(torch.randint(0, vocab, (5, 60), generator=noise))
        ids_R = torch.tensor(rows, device=DEVICE)
        self.step = StepRows(
            ids_R=ids_R,
            max_checked_R=ids_R,
            max_draft_R=torch.tensor([ROOM[row] for row in rows], device=DEVICE),
            num_checked_R=torch.tensor([min(row, 0) for row in rows], device=DEVICE),
            path_RK=torch.zeros(len(rows), 1, dtype=torch.int64, device=DEVICE),
            result_RC=torch.full((len(rows), FIRST + 1 + size), -7, device=DEVICE),
        )

    def last(self, row: int) -> int:
        return int(self.state.tokens_XL[row, KNOWN[row] - 1])

    def grow(self, extend: Callable[..., Any], **how: Any) -> Trees:
        asked = how.pop("asked", None) or SamplingState(5, COLUMNS, DEVICE)
        self.step.draws = how.pop("draws", Draws.GREEDY)
        growth = Growth.begin(self.step.ids_R, self.size, LEVELS, self.branch, self.most)
        row_R = self.step.ids_R.clamp(min=0)
        token_T = self.state.tokens_XL[row_R, self.state.known_X[row_R] - 1]
        self.fed: list[tuple[list[int], list[int]]] = []
        for depth in range(LEVELS):
            line_T = torch.zeros_like(row_R) if self.is_shared else token_T
            odds_T = None if self.odds is None else self.odds[depth, token_T]
            found = extend(
                self.state, self.step, growth, self.scores[depth, line_T].contiguous(), asked,
                depth=depth, ids_C=self.ids_C, odds_T=odds_T, **{"least": None, **how},
            )  # fmt: skip
            assert (found is None) == (depth == LEVELS - 1)
            if found is not None:
                token_T, up_T = found
                self.fed.append((token_T.tolist(), up_T.tolist()))
        self.chance_RG = growth.chance_RG
        return self

    def tree(self, row: int) -> list[tuple[int, int]]:
        count = int(self.state.num_nodes_X[row])
        nodes = self.state.draft_XG[row, :count], self.state.parents_XG[row, :count]
        return list(zip(*(part.tolist() for part in nodes), strict=True))


def compare(make: Callable[[], Trees], **how: Any) -> Trees:
    mine = make().grow(gpu_best_first.extend, **how)
    other = make().grow(extend_ref, **how)
    for name in ("draft_XG", "parents_XG", "num_nodes_X"):
        assert torch.equal(getattr(mine.state, name), getattr(other.state, name)), name
    assert torch.equal(mine.step.result_RC, other.step.result_RC)
    assert mine.fed == other.fed
    rows = mine.step.ids_R.tolist()
    live = [r for r, row in enumerate(rows) if row >= 0 and not DONE[row]]
    assert torch.allclose(mine.chance_RG[live], other.chance_RG[live], atol=1e-4)
    return mine


def searched(trees: Trees, row: int) -> list[tuple[int, int]]:
    """The tree by a search over paths, which knows no levels."""

    def expand(state: tuple[int, int]) -> list[tuple[int, float, int, tuple[int, int]]]:
        depth, before = state
        if depth == LEVELS:
            return []
        gain_B, column_B = trees.scores[depth, before].log_softmax(-1).topk(trees.branch)
        if trees.odds is not None:
            gain_B = trusted(gain_B[None], trees.odds[depth, before][None])[0]
        children = zip(column_B.tolist(), gain_B.double().exp().tolist(), strict=True)
        return [(token, chance, 0, (depth + 1, token)) for token, chance in children]

    nodes = best_first((0, trees.last(row)), expand, trees.size)
    return [(node.token, node.parent) for node in nodes]


@pytest.mark.parametrize("has_odds", [False, True])
@pytest.mark.parametrize(("size", "branch"), [(1, 3), (7, 2), (15, 4), (31, 3)])
def test_the_likeliest_of_all_paths(size: int, branch: int, has_odds: bool) -> None:
    trees = compare(lambda: Trees([0, 3], size, branch, has_odds=has_odds))
    assert trees.tree(0) == searched(trees, 0)
    assert trees.tree(3) == searched(trees, 3)[: ROOM[3]]  # the likeliest few are a tree too


@pytest.mark.parametrize("rows", [[2], [4, 1], [3, 1, -1, 0, 2]])
@pytest.mark.parametrize("is_shared", [False, True])
def test_rows_that_ended_or_end_soon(rows: list[int], is_shared: bool) -> None:
    trees = compare(lambda: Trees(rows, 9, is_shared=is_shared))
    is_row = [row >= 0 and not DONE[row] for row in rows]
    assert (trees.step.result_RC[:, -1] != -7).tolist() == is_row
    if 1 in rows:  # three tokens before its end: two levels, and the token after them
        assert {parent for _, parent in trees.tree(1)} <= {-1, *range(9)}
        assert max(depth_of(trees, 1)) == 2
    if 4 in rows:
        assert trees.tree(4) == []


def depth_of(trees: Trees, row: int) -> list[int]:
    depths: list[int] = []
    for _, parent in trees.tree(row):
        depths.append(1 if parent < 0 else 1 + depths[parent])
    return depths


def test_of_equals_the_one_nearer_to_the_root_then_the_lowest_column() -> None:
    def make() -> Trees:
        trees = Trees([0, 3], 9, 2)
        trees.scores.fill_(1.0)
        trees.scores[:, :, :2] = 90.0  # two sure children of every node
        trees.scores[1:, :, 1] = 0.0  # and then one
        return trees

    trees = compare(make)
    # All nodes have a chance of a half, so they stand level by level.
    assert trees.tree(0)[:8] == [(0, -1), (1, -1), (0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5)]


@pytest.mark.parametrize(
    ("is_shared", "draws", "has_ids"), every_pair([False, True], [1, 2], [False, True])
)
def test_sampled_rows_by_their_noise_and_filters(
    is_shared: bool, draws: int, has_ids: bool
) -> None:
    ids = torch.arange(40, 40 + COLUMNS, device=DEVICE) if has_ids else None
    vocab = 40 + COLUMNS if has_ids else COLUMNS
    rows = [3, 1, -1, 0, 4] if draws > 1 else [0, 2]
    compare(
        lambda: Trees(rows, 9, 4, is_shared=is_shared, has_odds=True, ids_C=ids),
        draws=draws,
        asked=states(vocab),
    )


@pytest.mark.parametrize("is_shared", [False, True])
def test_rules_follow_each_path(is_shared: bool) -> None:
    """A token that was drafted once is not drafted again below it, though heads all say it."""
    asked = SamplingState(5, COLUMNS, DEVICE, dense=True)
    params = SamplingParams(temperature=0, presence_penalty=2.0, frequency_penalty=2.0)
    for row in (0, 3):
        asked.start(row, Request(id=str(row), prompt_ids=[1], params=params, seed=0), [1])

    def make() -> Trees:
        trees = Trees([0, 3], 9, is_shared=is_shared)
        trees.scores[:, :, 7] = trees.scores[:, :, :].amax(-1) + 1.0
        trees.step.has_rules = True
        return trees

    trees = compare(make, asked=asked)
    nodes = trees.tree(0)
    assert nodes[0] == (7, -1)
    assert max(depth_of(trees, 0)) > 1
    assert (7, 0) not in nodes


def test_nodes_are_above_the_least_chance() -> None:
    whole = compare(lambda: Trees([0, 3], 15))
    some = compare(lambda: Trees([0, 3], 15), least=-2.0)
    assert 0 < len(some.tree(0)) < len(whole.tree(0))
    assert some.tree(0) == whole.tree(0)[: len(some.tree(0))]


def test_fewer_nodes_get_children() -> None:
    trees = compare(lambda: Trees([0, 3], 15, most=2))
    assert {len(token) for token, _ in trees.fed} == {2 * 2}
    depths, parents = depth_of(trees, 0), [parent for _, parent in trees.tree(0)]
    for depth in range(1, LEVELS):
        assert len({p for p in parents if p >= 0 and depths[p] == depth}) <= 2


def test_many_columns() -> None:
    compare(lambda: Trees([0], 7, is_shared=True, num_columns=5000))


@pytest.mark.parametrize("draws", [0, 2])
@pytest.mark.parametrize("has_ids", [False, True])
def test_trees_of_one_shape(draws: int, has_ids: bool) -> None:
    ids = torch.arange(40, 40 + COLUMNS, device=DEVICE) if has_ids else None
    parents, ranks = [[-1, -1, -1], [0, 0, 1], [3]], [[0, 1, 3], [0, 2, 0], [1]]

    def grow(ranked: Callable[..., None]) -> Trees:
        trees, first = Trees([3, 1, -1, 0, 2, 4], 7), 0
        trees.step.draws = Draws(draws)
        for depth, (above, rank) in enumerate(zip(parents, ranks, strict=True)):
            rank_N, parent_N = (torch.tensor(cells, device=DEVICE) for cells in (rank, above))
            level = RankedLevel(depth, first, rank_N, parent_N, max(rank) + 1)
            logits_RC = trees.scores[depth, :6].contiguous()
            ranked(
                trees.state, trees.step, logits_RC, states(100 if has_ids else COLUMNS), level,
                ids,
            )  # fmt: skip
            first += len(rank)
        return trees

    mine, other = grow(gpu_best_first.ranked), grow(ranked_ref)
    assert torch.equal(mine.state.flat, other.state.flat)
    assert torch.equal(mine.step.result_RC, other.step.result_RC)
    assert [parent for _, parent in mine.tree(0)] == [p for some in parents for p in some]
    assert mine.state.num_nodes_X.tolist() == [7, 6, 0, 5, 0]
    if not draws:
        best = mine.scores[0, 3].topk(4).indices
        assert mine.tree(0)[2][0] == int(best[3] if ids is None else ids[best[3]])
