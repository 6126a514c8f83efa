"""A head on a device: whole drafts as the plain kernels give, and few launches for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from drafting.test_device_draft import Launches, asking
from hunch.drafting.costs import DraftSource
from hunch.drafting.feature import DeviceFeature
from hunch.kernels import draft, gpu_draft, gpu_grow
from hunch.kernels.attention import AttnInputs, KVCache
from hunch.kernels.step import FIRST, TOKENS, RowState, StepRows
from hunch.models.decoder import Hidden
from hunch.models.heads.step import StepNet

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, COLUMNS, LEVELS, WIDTH, SIZE = 90, 40, 3, 4, 16


class Net:
    """States that depend on the state before, the token, its place and its slot."""

    feature_layers = (1, 3)
    tiler = StepNet.tiler
    spec = SimpleNamespace(num_heads=2, num_kv_heads=1, head_dim=16, width=SIZE)
    rope = SimpleNamespace(table_LH=torch.zeros(64, 16, device=DEVICE))
    kv_dtype = torch.float32
    _tiler = None

    def __init__(self) -> None:
        noise = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCAB, SIZE, generator=noise).to(DEVICE)
        self.head = torch.randn(SIZE, COLUMNS, generator=noise).to(DEVICE)
        self.ids_C = torch.randperm(VOCAB, generator=noise)[:COLUMNS].sort().values

    def fuse(self, hidden_TD: Tensor, features: tuple[Tensor, ...]) -> Tensor:
        return hidden_TD + 2 * features[0] - features[1]

    def step(self, token_T: Tensor, hidden_TD: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        x_TD = hidden_TD + self.table[token_T]
        x_TD = x_TD + self.table[attn.pos_T % VOCAB] + self.table[attn.slot_T % VOCAB]
        return torch.where(attn.slot_T[:, None] >= 0, x_TD, 0.0)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return torch.stack([x_D @ self.head for x_D in hidden_TD])


class Silent(Net):
    """Nothing is computed: what is left are the launches around the passes."""

    def fuse(self, hidden_TD: Tensor, features: tuple[Tensor, ...]) -> Tensor:
        return hidden_TD

    def step(self, token_T: Tensor, hidden_TD: Tensor, attn: AttnInputs, kv: KVCache) -> Tensor:
        return hidden_TD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return torch.empty(len(hidden_TD), COLUMNS, device=DEVICE)


def drafter(net: Any, kind: int) -> DeviceFeature:
    kv = KVCache(torch.empty(0, device=DEVICE), torch.empty(0, device=DEVICE))
    return DeviceFeature(
        name="eagle",
        net=net,
        layers=Net.feature_layers,
        kv=kv,
        group=1,
        sampling=asking(kind),
        num_levels=LEVELS,
        max_len=60,
    )


def rows() -> tuple[RowState, StepRows, Hidden]:
    """A row near its end that committed one token, one with room that committed all, padding."""
    state = RowState.create(3, 60, 15, LEVELS, 2, 4, DEVICE)
    noise = torch.Generator().manual_seed(0)
    state.tokens_XL.copy_(torch.randint(1, VOCAB, state.tokens_XL.shape, generator=noise))
    state.table_XB.copy_(torch.randperm(45, generator=noise).view(3, 15))
    state.known_X.copy_(torch.tensor([20, 31, 9]))
    state.end_X.copy_(torch.tensor([50, 34, 40]))
    columns = torch.zeros(3, FIRST + WIDTH + LEVELS, dtype=torch.int64, device=DEVICE)
    columns[:, TOKENS] = torch.tensor([1, WIDTH, 0])
    step = StepRows(
        ids_R=torch.tensor([1, 0, -1], device=DEVICE),
        allowed_R=torch.tensor([9, 9, 9], device=DEVICE),
        room_R=torch.tensor([99, 99, 99], device=DEVICE),
        count_R=torch.tensor([3, 3, -1], device=DEVICE),
        path_RK=torch.zeros(3, WIDTH, dtype=torch.int64, device=DEVICE),
        result_RC=columns,
    )
    states = [torch.randn(3 * WIDTH, SIZE, generator=noise).to(DEVICE) for _ in range(3)]
    return state, step, Hidden(states[0], tuple(states[1:]))


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_whole_drafts(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state, step, hidden = rows()
    drafter(Net(), kind).draft(state, step, hidden, kind, DraftSource.CHAIN)
    monkeypatch.setattr(gpu_draft, "committed_inputs", draft.committed_inputs_ref)
    monkeypatch.setattr(gpu_grow, "grow_level", draft.grow_level_ref)
    other, plain, _ = rows()
    drafter(Net(), kind).draft(other, plain, hidden, kind, DraftSource.CHAIN)
    assert state.count_X.tolist() == [LEVELS, 2, 0]
    assert torch.equal(state.count_X, other.count_X)
    for row, count in enumerate(state.count_X.tolist()):
        assert torch.equal(state.draft_XG[row, :count], other.draft_XG[row, :count])
        assert torch.equal(state.parents_XG[row, :count], other.parents_XG[row, :count])
    assert torch.equal(step.result_RC[:, :FIRST], plain.result_RC[:, :FIRST])
    assert set(state.draft_XG[0].tolist()) <= set(Net().ids_C.tolist())


@pytest.mark.parametrize("kind", [0, 1])
def test_two_launches_between_passes(kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state, step, hidden = rows()
    head = drafter(Silent(), kind)
    monkeypatch.setattr(gpu_draft, "committed_inputs", lambda *inputs: inputs[-1].zero_())
    head.draft(
        state, step, hidden, kind, DraftSource.CHAIN
    )  # tilings come from the host, before a capture
    with Launches(monkeypatch) as seen:
        head.draft(state, step, hidden, kind, DraftSource.CHAIN)
    levels = ["_children_kernel", "_grow_kernel"] * LEVELS
    assert seen.names == ["zero_", "index_select", *levels]  # the first stands for its kernel
