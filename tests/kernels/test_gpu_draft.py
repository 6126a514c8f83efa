"""What a network needs before its first pass, in Triton, against the plain form of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from hunch.kernels import draft, gpu_activation, gpu_draft, gpu_wide
from hunch.kernels.attention import AttnInputs
from hunch.kernels.step import FIRST, TOKENS, RowState, StepRows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NODES = 6


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


@pytest.fixture
def state() -> RowState:
    """Four rows: one with room, one near its end, one that ended, one with a single token."""
    made = RowState.create(4, 60, 15, NODES, 2, 4, DEVICE)
    noise = torch.Generator().manual_seed(0)
    made.tokens_XL.copy_(torch.randint(1, 99, made.tokens_XL.shape, generator=noise))
    made.table_XB.copy_(torch.randperm(60, generator=noise).view(4, 15))
    made.known_X.copy_(numbers(20, 30, 9, 1))
    made.end_X.copy_(numbers(50, 33, 40, 40))
    made.is_done_X.copy_(numbers(0, 0, 1, 0))
    return made


def step_of(committed: tuple[int, ...] = ()) -> StepRows:
    """Two that go on, padding, one whose nodes were checked, one that just ended."""
    step = StepRows(
        ids_R=numbers(3, 1, -1, 0, 2),
        max_checked_R=numbers(9, 9, 9, 9, 9),
        max_draft_R=numbers(6, 6, 6, 4, 6),
        num_checked_R=numbers(0, 0, -1, 0, 0),
        path_RK=torch.zeros(5, 1, dtype=torch.int64, device=DEVICE),
        result_RC=torch.zeros(5, FIRST + 1 + NODES, dtype=torch.int64, device=DEVICE),
    )
    for r, count in enumerate(committed):
        step.result_RC[r, TOKENS] = count
    return step


def inputs(
    fill: Callable[..., None], state: RowState, width: int, step: StepRows, *more: torch.Tensor
) -> list:
    packed = torch.full((5, 5 * width), -7, device=DEVICE)
    attn = AttnInputs(
        packed[1], packed[2], packed[3], state.table_XB, packed[4], None, state.block_size
    )
    fill(state, step, packed[0], attn, *more)
    is_live = packed[2] >= 0
    found = [packed[2], packed[3], *(line[is_live] for line in packed)]
    return [tensor.tolist() for tensor in found]


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_inputs_of_known_tokens(width: int, state: RowState) -> None:
    got = inputs(gpu_draft.known_inputs, state, width, step_of())
    assert got == inputs(draft.level_inputs_ref, state, width, step_of())
    assert any(slot >= 0 for slot in got[0])
    assert any(slot < 0 for slot in got[0])


@pytest.mark.parametrize("width", [1, 2, 6, 7])
def test_inputs_of_committed_tokens(width: int, state: RowState) -> None:
    """Each beside the state before it; those of a row that ended too, as others may share them."""
    state.known_X[3] = 2
    committed = (1, min(2, width), 99, width, min(3, width))
    last, other = numbers(*[-7] * 5), numbers(*[-7] * 5)
    got = inputs(gpu_draft.committed_inputs, state, width, step_of(committed), last)
    assert got == inputs(draft.committed_inputs_ref, state, width, step_of(committed), other)
    num_live = [1, committed[1], 0, width, committed[4]]
    places = [[slot >= 0 for slot in got[0][r * width : (r + 1) * width]] for r in range(5)]
    assert places == [[place < count for place in range(width)] for count in num_live]
    expected = [r * width + max(count - 1, 0) for r, count in enumerate(num_live)]
    assert last.tolist() == other.tolist() == expected


def test_gated_rows() -> None:
    x = torch.randn(5, 60, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    y = torch.full((5, 30), float("nan"), device=DEVICE)
    gpu_activation.activated(x, y, 3)
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
