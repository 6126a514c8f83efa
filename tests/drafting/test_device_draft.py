"""A draft model on a device: whole drafts as the plain kernels give, and few launches for them."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from hunch.drafting.draft_model import DeviceDraftModel
from hunch.drafting.step_shapes import DraftSource
from hunch.kernels import draft, gpu_draft, gpu_grow
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.kernels.step import FIRST, RowState, StepRows
from hunch.models.target import Hidden
from hunch.sampling.state import SamplingState
from hunch.types import Request, SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, LEVELS = 90, 3
NO_STATES = None  # of the target: a draft model has its own
MAKES_NO_KERNEL = {"empty", "empty_like", "new_empty", "slice", "select", "unbind", "view"}
MAKES_NO_KERNEL |= {"alias", "detach"}


class Model:
    """Scores that depend on a node's token, its place and its ancestors' slots."""

    def __init__(self) -> None:
        noise = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCAB, 16, generator=noise).to(DEVICE)
        self.head = torch.randn(16, VOCAB, generator=noise).to(DEVICE)

    def tiling(self, *size: Any) -> None:
        return None

    def forward(self, ids_T: Tensor, attn: AttnInputs, kv: object) -> Hidden:
        x_TD = self.table[ids_T] + self.table[attn.pos_T % VOCAB] + self.table[attn.slot_T % VOCAB]
        if attn.tree_TP is not None:
            for t in (attn.slot_T >= 0).nonzero()[:, 0].tolist():
                above = attn.tree_TP[t, : int(attn.pos_T[t] - attn.base_T[t]) + 1]
                x_TD[t] += self.table[above % VOCAB].sum(0)
        return Hidden(torch.where(attn.slot_T[:, None] >= 0, x_TD, 0.0), ())

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return torch.stack([x_D @ self.head for x_D in hidden_TD])


class Silent(Model):
    """Nothing is computed: what is left are the launches around the passes."""

    def forward(self, ids_T: Tensor, attn: AttnInputs, kv: object) -> Hidden:
        return Hidden(torch.empty(len(ids_T), 16, device=DEVICE), ())

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return torch.empty(len(hidden_TD), VOCAB, device=DEVICE)


def asking(draws: int) -> SamplingState:
    """A row that asks as much as these draws allow, and a greedy one."""
    state = SamplingState(3, VOCAB, DEVICE, dense=True)
    filters = {"top_k": 4, "top_p": 0.9} if draws > 1 else {}
    asked = SamplingParams(temperature=0.8 if draws else 0.0, **filters)
    for row, params in enumerate((asked, SamplingParams(temperature=0.0))):
        request = Request(id=str(row), prompt_ids=[1], params=params, seed=row)
        state.start(row, request, [1])
    return state


def drafter(model: Model, width: int, draws: int) -> DeviceDraftModel:
    kv = KVCache(torch.empty(0), torch.empty(0))
    return DeviceDraftModel(
        name="draft",
        model=model,
        kv=kv,
        sampling=asking(draws),
        ids_C=None,
        num_levels=LEVELS,
        level_size=width,
        width=width,
        branch=width,
        max_len=60,
    )


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def rows(width: int) -> tuple[RowState, StepRows]:
    """One row with room, one near its end, and padding."""
    state = RowState.create(3, 60, 15, LEVELS * width, 2, 4, DEVICE)
    noise = torch.Generator().manual_seed(0)
    state.tokens_XL.copy_(torch.randint(1, VOCAB, state.tokens_XL.shape, generator=noise))
    state.table_XB.copy_(torch.randperm(45, generator=noise).view(3, 15))
    state.known_X.copy_(torch.tensor([20, 31, 9]))
    state.end_X.copy_(torch.tensor([50, 34, 40]))
    step = StepRows(
        ids_R=numbers(1, 0, -1),
        max_checked_R=numbers(9, 9, 9),
        max_draft_R=numbers(99, 99, 99),
        num_checked_R=numbers(0, 0, -1),
        path_RK=numbers(0, 0, 0)[:, None],
        result_RC=numbers(0, 0, 0)[:, None].repeat(1, FIRST + 1 + LEVELS * width),
    )
    return state, step


@pytest.mark.parametrize("draws", [0, 1, 2])
@pytest.mark.parametrize("width", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_whole_drafts(width: int, draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state, step = rows(width)
    source = DraftSource.TREE if width > 1 else DraftSource.CHAIN
    step.draws = draws
    drafter(Model(), width, draws).draft(state, step, NO_STATES, source)
    monkeypatch.setattr(gpu_draft, "known_inputs", draft.level_inputs_ref)
    monkeypatch.setattr(gpu_grow, "grow_level", draft.grow_level_ref)
    other, plain = rows(width)
    plain.draws = draws
    drafter(Model(), width, draws).draft(other, plain, NO_STATES, source)
    assert state.num_nodes_X.tolist() == [LEVELS * width, 2 * width, 0]  # two levels before its end
    assert torch.equal(state.num_nodes_X, other.num_nodes_X)
    for row, count in enumerate(state.num_nodes_X.tolist()):
        assert torch.equal(state.draft_XG[row, :count], other.draft_XG[row, :count])
        assert torch.equal(state.parents_XG[row, :count], other.parents_XG[row, :count])
    assert torch.equal(step.result_RC[:, :FIRST], plain.result_RC[:, :FIRST])


class Kernel:
    """Stands for one of ours and writes its name down."""

    def __init__(self, name: str, names: list[str]) -> None:
        self.name, self.names = name, names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *_, **__: self.names.append(self.name)


class Launches(TorchDispatchMode):
    """Counts kernels of ours, and of torch's."""

    def __init__(
        self, patch: pytest.MonkeyPatch, modules: tuple[ModuleType, ...] = (gpu_draft, gpu_grow)
    ) -> None:
        super().__init__()
        self.names: list[str] = []
        for module in modules:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                patch.setattr(module, name, Kernel(name, self.names))

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name().removeprefix("aten::").split(".")[0]
        if name not in MAKES_NO_KERNEL:
            self.names.append(name)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("draws", [0, 1])
@pytest.mark.parametrize("width", [1, 3])
def test_two_launches_between_passes(
    width: int, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, step = rows(width)
    source = DraftSource.TREE if width > 1 else DraftSource.CHAIN
    step.draws = draws
    model = drafter(Silent(), width, draws)
    with Launches(monkeypatch) as seen:
        model.draft(state, step, NO_STATES, source)
    assert seen.names == ["_text_kernel", *["_children_kernel", "_grow_kernel"] * LEVELS]
