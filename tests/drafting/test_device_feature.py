"""A head on a device: whole drafts as the plain kernels give, and few launches for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from drafting.test_device_draft import Launches, asking
from hunch.drafting.feature import DeviceFeature
from hunch.drafting.step_shapes import DraftSource
from hunch.kernels import draft, gpu_draft, gpu_grow
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.kernels.step import FIRST, TOKENS, RowState, StepRows
from hunch.models.heads.step import StepNet
from hunch.models.target import Hidden

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, COLUMNS, LEVELS, WIDTH, SIZE = 90, 40, 3, 4, 16


class Net:
    """States that depend on the state before, the token, its place and its slot."""

    feature_layers = (1, 3)
    tiler = StepNet.tiler
    spec = SimpleNamespace(num_heads=2, num_kv_heads=1, head_dim=16, value_dim=16, width=SIZE)
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


def drafter(net: Any, draws: int, **tree: Any) -> DeviceFeature:
    kv = KVCache(torch.empty(0, device=DEVICE), torch.empty(0, device=DEVICE))
    return DeviceFeature(
        name="eagle",
        net=net,
        layers=Net.feature_layers,
        kv=kv,
        group=1,
        sampling=asking(draws),
        num_levels=LEVELS,
        max_len=60,
        **tree,
    )


def rows(level_size: int = 1) -> tuple[RowState, StepRows, Hidden]:
    """A row near its end that committed one token, one with room that committed all, padding."""
    state = RowState.create(3, 60, 15, LEVELS * level_size, 2, 4, DEVICE)
    noise = torch.Generator().manual_seed(0)
    state.tokens_XL.copy_(torch.randint(1, VOCAB, state.tokens_XL.shape, generator=noise))
    state.table_XB.copy_(torch.randperm(45, generator=noise).view(3, 15))
    state.known_X.copy_(torch.tensor([20, 31, 9]))
    state.end_X.copy_(torch.tensor([50, 34, 40]))
    num_columns = FIRST + WIDTH + LEVELS * level_size
    columns = torch.zeros(3, num_columns, dtype=torch.int64, device=DEVICE)
    columns[:, TOKENS] = torch.tensor([1, WIDTH, 0])
    step = StepRows(
        ids_R=torch.tensor([1, 0, -1], device=DEVICE),
        max_checked_R=torch.tensor([9, 9, 9], device=DEVICE),
        max_draft_R=torch.tensor([99, 99, 99], device=DEVICE),
        num_checked_R=torch.tensor([3, 3, -1], device=DEVICE),
        path_RK=torch.zeros(3, WIDTH, dtype=torch.int64, device=DEVICE),
        result_RC=columns,
    )
    states = [torch.randn(3 * WIDTH, SIZE, generator=noise).to(DEVICE) for _ in range(3)]
    return state, step, Hidden(states[0], tuple(states[1:]))


@pytest.mark.parametrize("draws", [0, 1, 2])
def test_whole_drafts(draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state, step, hidden = rows()
    step.draws = draws
    drafter(Net(), draws).draft(state, step, hidden, DraftSource.CHAIN)
    monkeypatch.setattr(gpu_draft, "committed_inputs", draft.committed_inputs_ref)
    monkeypatch.setattr(gpu_grow, "grow_level", draft.grow_level_ref)
    other, plain, _ = rows()
    plain.draws = draws
    drafter(Net(), draws).draft(other, plain, hidden, DraftSource.CHAIN)
    assert state.num_nodes_X.tolist() == [LEVELS, 2, 0]
    assert torch.equal(state.num_nodes_X, other.num_nodes_X)
    for row, count in enumerate(state.num_nodes_X.tolist()):
        assert torch.equal(state.draft_XG[row, :count], other.draft_XG[row, :count])
        assert torch.equal(state.parents_XG[row, :count], other.parents_XG[row, :count])
    assert torch.equal(step.result_RC[:, :FIRST], plain.result_RC[:, :FIRST])
    assert set(state.draft_XG[0].tolist()) <= set(Net().ids_C.tolist())


@pytest.mark.parametrize(("size", "width", "branch"), [(3, 3, 3), (3, 2, 2), (4, 1, 4)])
def test_every_node_of_a_tree_goes_on_its_parents_state(size: int, width: int, branch: int) -> None:
    """Replayed node by node: the target's states of what was accepted, then the head's own."""
    state, step, hidden = rows(size)
    step.path_RK.copy_(torch.tensor([[-1] * 4, [0, 2, -1, -1], [-1] * 4]))
    step.result_RC[1, TOKENS] = 3
    net, known = Net(), 20
    tree = {"level_size": size, "width": width, "branch": branch}
    drafter(net, 0, **tree).draft(state, step, hidden, DraftSource.TREE)
    assert state.num_nodes_X.tolist() == [LEVELS * size, 2 * size, 0]
    # Row 0, the second of the step, committed nodes 0 and 2 of its tree, and one more token.
    last = WIDTH + 1 + 2
    fused = net.fuse(hidden.last_TD[last], tuple(f[last] for f in hidden.features))

    def slot(pos: int) -> int:
        return int(state.table_XB[0, pos // 4]) * 4 + pos % 4

    def step_of(token: int, before: Tensor, pos: int, at: int) -> Tensor:
        return before + net.table[token] + net.table[pos % VOCAB] + net.table[at % VOCAB]

    root = step_of(int(state.tokens_XL[0, known - 1]), fused, known - 2, slot(known - 2))
    states: dict[int, Tensor] = {-1: root}
    for node in range(LEVELS * size):
        parent, token = int(state.parents_XG[0, node]), int(state.draft_XG[0, node])
        level = node // size
        assert parent == -1 if not level else 0 <= parent - (level - 1) * size < width
        best = net.ids_C[(states[parent] @ net.head).topk(branch if level else size).indices]
        assert token in best.tolist()
        at = known - 1 + node
        states[node] = step_of(token, states[parent], known - 1 + level, slot(at))


@pytest.mark.parametrize("draws", [0, 1])
def test_two_launches_between_passes(draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    state, step, hidden = rows()
    head = drafter(Silent(), draws)
    monkeypatch.setattr(gpu_draft, "committed_inputs", lambda *inputs: inputs[-1].zero_())
    step.draws = draws
    # Tilings come from the host, before a capture.
    head.draft(state, step, hidden, DraftSource.CHAIN)
    with Launches(monkeypatch) as seen:
        head.draft(state, step, hidden, DraftSource.CHAIN)
    levels = ["_children_kernel", "_grow_kernel"] * LEVELS
    assert seen.names == ["zero_", "index_select", *levels]  # the first stands for its kernel
