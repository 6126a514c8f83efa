"""What a draft model needs between its passes, in Triton, against the plain form of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

import plain_steps
from hunch.kernels import gpu_draft, gpu_wide
from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_spec import FIRST, Cells, StepRows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NODES = 6


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.fixture
def cells() -> Cells:
    """Four rows: one with room, one near its end, one that ended, one with a single token."""
    made = Cells.create(4, 60, 15, NODES, 2, 4, DEVICE)
    noise = torch.Generator().manual_seed(0)
    made.tokens_XL.copy_(torch.randint(1, 99, made.tokens_XL.shape, generator=noise))
    made.table_XB.copy_(torch.randperm(60, generator=noise).view(4, 15))
    made.draft_XG.copy_(torch.randint(1, 99, made.draft_XG.shape, generator=noise))
    made.parents_XG.copy_(torch.tensor([-1, -1, 0, 1, 2, 2]).expand(4, NODES))
    made.known_X.copy_(numbers(20, 30, 9, 1))
    made.end_X.copy_(numbers(50, 33, 40, 40))
    made.is_done_X.copy_(numbers(0, 0, 1, 0))
    return made


def step_of() -> StepRows:
    return StepRows(
        ids_R=numbers(3, 1, -1, 0, 2),
        allowed_R=numbers(9, 9, 9, 9, 9),
        room_R=numbers(6, 6, 6, 4, 6),
        count_R=numbers(0, 0, -1, 0, 0),
        path_RK=torch.zeros(5, 1, dtype=torch.int64, device=DEVICE),
        result_RC=torch.zeros(5, FIRST + 1 + NODES, dtype=torch.int64, device=DEVICE),
    )


def inputs(fill: Callable[..., None], cells: Cells, width: int, most: int, **level: int) -> list:
    packed = torch.full((5, 5 * width), -7, device=DEVICE)
    tree = torch.full((5 * width, 3), -7, device=DEVICE) if most else None
    attn = AttnInputs(
        packed[1], packed[2], packed[3], cells.table_XB, packed[4], tree, cells.block_size
    )
    fill(cells, step_of(), packed[0], attn, **level)
    is_live = packed[2] >= 0
    found = [packed[2], packed[3], *(line[is_live] for line in packed)]
    if tree is not None:
        levels = torch.arange(3, device=DEVICE) < level["depth"]
        found.append(tree[is_live][:, levels])
    return [tensor.tolist() for tensor in found]


@pytest.mark.parametrize(
    ("width", "max_depth", "level"),
    [
        (2, 0, {}),
        (4, 0, {}),
        (1, 0, {"first_node": 2, "depth": 3}),
        (2, 3, {"first_node": 0, "depth": 1}),
        (2, 3, {"first_node": 2, "depth": 2}),
        (2, 3, {"first_node": 4, "depth": 3}),
    ],
)
def test_inputs_of_a_level(width: int, max_depth: int, level: dict[str, int], cells: Cells) -> None:
    got = inputs(gpu_draft.level_inputs, cells, width, max_depth, **level)
    assert got == inputs(plain_steps.level_inputs, cells, width, max_depth, **level)
    assert any(slot >= 0 for slot in got[0])
    assert any(slot < 0 for slot in got[0])


@pytest.mark.parametrize("first", [0, 4])
def test_new_nodes(first: int, cells: Cells) -> None:
    other = copy.deepcopy(cells)
    tokens, parents = torch.arange(10, device=DEVICE) + 100, torch.arange(10, device=DEVICE) % 3
    step, plain = step_of(), step_of()
    gpu_draft.add_nodes(cells, step, tokens, parents, first, NODES)
    plain_steps.add_nodes(other, plain, tokens, parents, first, NODES)
    for name in ("draft_XG", "parents_XG", "count_X"):
        assert torch.equal(getattr(cells, name), getattr(other, name)), name
    assert torch.equal(step.result_RC[:, :FIRST], plain.result_RC[:, :FIRST])
    guesses = step.result_RC[0, FIRST + 1 + first : FIRST + 3 + first]
    assert guesses.tolist() == [100, 101]


def test_gated_rows() -> None:
    x = torch.randn(5, 60, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    y = torch.full((5, 30), float("nan"), device=DEVICE)
    gpu_wide.gated(x, y, 3)
    gate, up = x.double().chunk(2, dim=1)
    want = torch.nn.functional.silu(gate) * up
    assert torch.allclose(y[:3].double(), want[:3], atol=1e-5)
    assert y[3:].isnan().all()


@pytest.mark.parametrize("num_rows", [256, 768, 8192, 14592])
def test_cuts_cover_all_rows_in_sizes_that_were_compared(num_rows: int) -> None:
    parts = gpu_wide.cuts(num_rows)
    assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])]
    assert parts[-1][1] == num_rows
    for first, last in parts:
        size = last - first
        assert gpu_wide.SMALLEST <= size <= gpu_wide.LARGEST
        assert size & (size - 1) == 0
