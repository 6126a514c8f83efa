"""A level of a draft in Triton against the plain form of it: nodes, guesses and next inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from cases import every_pair
from hunch.kernels import gpu_grow
from hunch.kernels.attention import AttnInputs
from hunch.kernels.draft import grow_level_ref
from hunch.kernels.step import FIRST, Draws, RowState, StepRows
from hunch.sampling.state import SamplingState
from hunch.types import Request, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEVELS = 4
KNOWN, END, DONE = (20, 30, 9, 1, 25), (50, 33, 40, 40, 26), (0, 0, 1, 0, 0)
ROOM = {0: 99, 1: 99, 2: 99, 3: 5, 4: 99, -1: 99}  # by row; -1 is padding
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7},
    {"temperature": 1.1, "top_k": 2},  # fewer than a level has nodes
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9},
)


class Level:
    """Everything a level reads and writes, the same for the same seed."""

    def __init__(
        self, rows: list[int], width: int, depth: int, num_columns: int, grown: int | None = None
    ) -> None:
        noise = torch.Generator().manual_seed(1)
        grown = grown or width
        num_parents, num_nodes = grown if depth else 1, LEVELS * width
        self.state = RowState.create(5, 60, 15, num_nodes, 2, 4, DEVICE)
        for cell, values in (("known_X", KNOWN), ("end_X", END), ("is_done_X", DONE)):
            getattr(self.state, cell).copy_(torch.tensor(values))
        self.state.table_XB.copy_(torch.randperm(75, generator=noise).view(5, 15))
        for node in range(num_nodes):
            above = max((node // width - 1) * width, 0)
            parent = torch.randint(above, above + width, (5,), generator=noise)
            self.state.parents_XG[:, node] = parent if node >= width else -1
        ids_R = torch.tensor(rows, device=DEVICE)
        columns = FIRST + 1 + num_nodes
        self.step = StepRows(
            ids_R=ids_R,
            max_checked_R=ids_R,
            max_draft_R=torch.tensor([ROOM[row] for row in rows], device=DEVICE),
            num_checked_R=torch.tensor([min(row, 0) for row in rows], device=DEVICE),
            path_RK=torch.zeros(len(rows), 1, dtype=torch.int64, device=DEVICE),
            result_RC=torch.full((len(rows), columns), -7, device=DEVICE),
        )
        # Steps of a quarter: many children of a node are equal.
        logits = torch.randn(len(rows) * num_parents, num_columns, generator=noise) * 3
        self.logits_TC = ((logits * 4).round() / 4).to(DEVICE)
        self.width = width
        self.chances_RN = -torch.rand(len(rows), num_nodes, generator=noise).to(DEVICE) * 5
        self.packed = torch.full((5, len(rows) * grown), -7, device=DEVICE)
        self.row_T = ids_R.clamp(min=0).repeat_interleave(num_parents)
        self.depth, self.num_nodes = depth, num_nodes
        shape = len(rows) * grown, LEVELS
        self.tree_TP = torch.full(shape, -7, device=DEVICE) if width > 1 else None

    def grow(self, grow_level: Callable[..., None], **how: Any) -> None:
        how = {"ids_C": None, "asked": SamplingState(5, 9, DEVICE), **how}
        self.step.draws = how.pop("draws", Draws.GREEDY)
        attn = AttnInputs(
            self.packed[1], self.packed[2], self.packed[3], self.state.table_XB, self.packed[4],
            self.tree_TP, self.state.block_size,
        )  # fmt: skip
        following = None if how.pop("is_last", False) else (self.packed[0], attn)
        grow_level(
            self.state, self.step, self.logits_TC, self.chances_RN, how.pop("asked"),
            depth=self.depth, level_size=self.width, row_T=self.row_T,
            following=following, **how,
        )  # fmt: skip

    def assert_grew_as(self, other: Level) -> None:
        for name in ("draft_XG", "parents_XG", "num_nodes_X"):
            assert torch.equal(getattr(self.state, name), getattr(other.state, name)), name
        assert torch.equal(self.step.result_RC, other.step.result_RC)
        if self.width > 1:
            assert torch.allclose(self.chances_RN, other.chances_RN, atol=1e-5)
        slot_T = self.packed[2]
        assert torch.equal(slot_T, other.packed[2])
        assert torch.equal(self.packed[3], other.packed[3])
        assert torch.equal(self.packed[:, slot_T >= 0], other.packed[:, slot_T >= 0])
        if self.tree_TP is not None and other.tree_TP is not None:
            levels = slice(0, self.depth + 1)
            mine, theirs = (tree[slot_T >= 0, levels] for tree in (self.tree_TP, other.tree_TP))
            assert torch.equal(mine, theirs)


def compare(level: Level, **how: Any) -> Level:
    other = copy.deepcopy(level)
    level.grow(gpu_grow.grow_level, **how)
    other.grow(grow_level_ref, **how)
    level.assert_grew_as(other)
    return level


def states(vocab_size: int) -> SamplingState:
    state = SamplingState(5, vocab_size, DEVICE, dense=True)
    for row, asked in enumerate(ASKED):
        params = SamplingParams(**asked)
        request = Request(id=str(row), prompt_ids=[1], params=params, seed=7 + row)
        state.start(row, request, [1])
    return state


@pytest.mark.parametrize("rows", [[0], [2], [4, 1], [3, 1, -1, 0, 2]])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_likeliest_paths_become_nodes(width: int, depth: int, rows: list[int]) -> None:
    level = compare(Level(rows, width, depth, 1000))
    is_row = [row >= 0 and not DONE[row] for row in rows]
    guesses_RG = level.step.result_RC[:, -level.num_nodes :]
    assert (guesses_RG[:, depth * width] != -7).tolist() == is_row


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("num_columns", [5, 1024, 16384])
def test_any_number_of_columns_which_may_be_a_part_of_the_vocabulary(
    num_columns: int, width: int
) -> None:
    ids = torch.randperm(40000, generator=torch.Generator().manual_seed(0))[:num_columns]
    level = compare(Level([0, 3], width, 1, num_columns), ids_C=ids.sort().values.to(DEVICE))
    assert set(level.state.draft_XG[0, width : 2 * width].tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("width", [2, 4])
def test_among_equals_the_lowest_column_of_the_first_path(width: int) -> None:
    level = Level([0, 3], width, 1, 3000)
    level.logits_TC.fill_(1.5)
    level.chances_RN.fill_(-2.0)
    compare(level)
    nodes = slice(width, 2 * width)
    assert level.state.draft_XG[0, nodes].tolist() == list(range(width))
    assert level.state.parents_XG[0, nodes].tolist() == [0] * width


def test_the_first_path_goes_on_though_others_are_likelier() -> None:
    level = Level([0], 3, 1, 1000)
    level.chances_RN[0, 0] = -500.0
    compare(level)
    best = int(level.logits_TC[0].argmax())
    assert int(level.state.draft_XG[0, 3]) == best
    assert level.state.parents_XG[0, 3:6].tolist()[0] == 0
    assert 0 not in level.state.parents_XG[0, 4:6].tolist()


@pytest.mark.parametrize(("width", "draws", "has_ids"), every_pair([1, 3], [1, 2], [False, True]))
def test_sampled_rows_draft_by_their_noise_and_filters(
    width: int, draws: int, has_ids: bool
) -> None:
    num_columns, vocab = 1000, 1500 if has_ids else 1000
    ids = torch.arange(vocab, device=DEVICE)[vocab - num_columns :] if has_ids else None
    rows = [3, 1, -1, 0, 4] if draws > 1 else [0, 2]
    for depth in (0, 2):
        level = Level(rows, width, depth, num_columns)
        compare(level, draws=draws, ids_C=ids, asked=states(vocab))


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("width", [1, 3])
def test_keys_one_position_early(width: int, depth: int) -> None:
    rows = [3, 1, -1, 0, 2]
    level = compare(Level(rows, width, depth, 1000), sees_next=True)
    usual = compare(Level(rows, width, depth, 1000))
    is_live_T = level.packed[2] >= 0
    assert torch.equal(level.state.draft_XG, usual.state.draft_XG)
    assert torch.equal(level.packed[1, is_live_T], usual.packed[1, is_live_T] - 1)


def test_a_last_level_has_no_next_inputs() -> None:
    level = compare(Level([0, 1], 2, 3, 100), is_last=True)
    assert (level.packed == -7).all()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(("width", "branch"), [(4, 1), (4, 2), (3, 8)])
def test_few_children_of_each_node(width: int, branch: int, depth: int) -> None:
    rows = [3, 1, -1, 0]
    level = compare(Level(rows, width, depth, 1000), branch=branch, sees_next=True)
    parents = level.state.parents_XG[0, depth * width : (depth + 1) * width].tolist()
    most = branch if depth else width
    assert max(parents.count(parent) for parent in parents) <= most


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("grown", [1, 2])
def test_the_first_nodes_of_a_level_alone_are_grown_on(grown: int, depth: int) -> None:
    level = compare(Level([3, 1, -1, 0], 4, depth, 1000, grown), branch=4)
    parents = level.state.parents_XG[0, 4 * depth : 4 * depth + 4].tolist()
    assert set(parents) <= ({-1} if not depth else set(range(4 * depth - 4, 4 * depth - 4 + grown)))


@pytest.mark.parametrize(("width", "depth", "draws"), every_pair([1, 3], [0, 1, 3], [0, 2]))
def test_a_draft_ends_where_no_path_is_likely_enough(width: int, depth: int, draws: int) -> None:
    rows, counts = [0, 3, 4], set()
    for least in (-0.5, -1.5, -2.5, -4.0, -50.0):
        level = Level(rows, width, depth, 1000)
        level.state.num_nodes_X.fill_(depth * width)
        compare(level, least=least, draws=draws, asked=states(1000))
        counts.add(int(level.state.num_nodes_X[0]))
    assert len(counts) > 1
    assert counts <= {depth * width + nodes for nodes in range(width + 1)}
