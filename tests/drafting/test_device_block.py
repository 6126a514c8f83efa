"""A block drafter's trees on a device: as the plain kernels give, and as the host would grow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from drafting.test_device_draft import asking
from hunch.drafting.best_first import BestFirst
from hunch.drafting.block import DeviceBlock
from hunch.drafting.step_shapes import DraftSource
from hunch.drafting.tree_shape import TreeShape
from hunch.kernels import best_first, draft, gpu_best_first, gpu_draft
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.kernels.step import FIRST, TOKENS, RowState, StepRows
from hunch.models.heads.step import StepNet
from hunch.models.target import Hidden

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB, COLUMNS, LEVELS, NODES, BRANCH, SIZE = 90, 40, 3, 6, 2, 16


class Net:
    """Scores depend on the place and on the token before it."""

    feature_layers = (1, 3)
    tiler = StepNet.tiler
    spec = SimpleNamespace(num_heads=2, num_kv_heads=1, head_dim=16, value_dim=16, width=SIZE)
    rope = SimpleNamespace(table_LH=torch.zeros(64, 16, device=DEVICE))
    shape = SimpleNamespace(num_places=LEVELS, is_causal=True)
    _tiler = None

    def __init__(self) -> None:
        noise = torch.Generator().manual_seed(0)
        self.table = torch.randn(VOCAB, COLUMNS, generator=noise).to(DEVICE)
        self.places = torch.randn(LEVELS, COLUMNS, generator=noise).to(DEVICE)
        self.ids_C = torch.randperm(VOCAB, generator=noise)[:COLUMNS].sort().values
        self.covered: list[tuple[Tensor, ...]] = []

    def cover_tiled(self, features: tuple[Tensor, ...], attn: AttnInputs, kv: KVCache) -> None:
        self.covered.append((features[0].clone(), attn.pos_T.clone(), attn.slot_T.clone()))

    def told_tiled(self, token_R: Tensor, blocks: Any) -> Any:
        return SimpleNamespace(
            is_alike=False,
            level=lambda depth, token_M: self.table[token_M] + self.places[depth],
            odds=lambda depth, token_M: self.table[token_M, depth],
        )


def drafter(net: Any) -> DeviceBlock:
    kv = KVCache(torch.empty(0, device=DEVICE), torch.empty(0, device=DEVICE))
    return DeviceBlock(
        name="dspark", net=net, layers=Net.feature_layers, kv=kv, group=1, sampling=asking(0),
        num_levels=LEVELS, num_nodes=NODES, max_len=60, tree_nodes=NODES, width=NODES,
        branch=BRANCH,
    )  # fmt: skip


def rows(path: list[list[int]], counts: list[int]) -> tuple[RowState, StepRows, Hidden]:
    """Two rows whose steps checked trees, and padding."""
    state = RowState.create(3, 60, 15, NODES, 2, 4, DEVICE)
    noise = torch.Generator().manual_seed(0)
    state.tokens_XL.copy_(torch.randint(1, VOCAB, state.tokens_XL.shape, generator=noise))
    state.table_XB.copy_(torch.randperm(45, generator=noise).view(3, 15))
    state.known_X.copy_(torch.tensor([20, 31, 9]))
    state.end_X.copy_(torch.tensor([50, 50, 40]))
    result = torch.zeros(3, FIRST + NODES + 1 + NODES, dtype=torch.int64, device=DEVICE)
    result[:, TOKENS] = torch.tensor(counts)
    step = StepRows(
        ids_R=torch.tensor([1, 0, -1], device=DEVICE),
        max_checked_R=torch.tensor([9, 9, 9], device=DEVICE),
        max_draft_R=torch.tensor([99, 99, 99], device=DEVICE),
        num_checked_R=torch.tensor([NODES, NODES, -1], device=DEVICE),
        path_RK=torch.tensor(path, device=DEVICE),
        result_RC=result,
    )
    states = [torch.randn(3 * (NODES + 1), SIZE, generator=noise).to(DEVICE) for _ in range(3)]
    return state, step, Hidden(states[0], tuple(states[1:]))


PATH = [[1, 3, -1, -1, -1, -1, -1], [-1] * 7, [-1] * 7]  # of the first row, two were accepted


def test_states_of_a_tree_are_those_of_the_path_it_took() -> None:
    net = Net()
    state, step, hidden = rows(PATH, [3, 1, 0])
    drafter(net).draft(state, step, hidden, DraftSource.TREE)
    ((feature_TD, pos_T, slot_T),) = net.covered
    size = NODES + 1
    # The root's state, then those of nodes 1 and 3, which stand at places 2 and 4.
    assert torch.equal(feature_TD[:3], hidden.features[0][[0, 2, 4]])
    assert pos_T[:3].tolist() == [27, 28, 29]  # before the last of 31 known tokens
    assert torch.equal(feature_TD[size], hidden.features[0][size])
    assert (slot_T >= 0).tolist() == [True] * 3 + [False] * 4 + [True] + [False] * 13


def test_trees_are_those_of_the_plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    net, plain_net = Net(), Net()
    state, step, hidden = rows(PATH, [3, 1, 0])
    drafter(net).draft(state, step, hidden, DraftSource.TREE)
    monkeypatch.setattr(gpu_draft, "committed_inputs", draft.committed_inputs_ref)
    monkeypatch.setattr(gpu_best_first, "extend", best_first.extend_ref)
    other, plain, _ = rows(PATH, [3, 1, 0])
    drafter(plain_net).draft(other, plain, hidden, DraftSource.TREE)
    assert state.num_nodes_X.tolist() == [NODES, NODES, 0]
    assert torch.equal(state.draft_XG[:2], other.draft_XG[:2])
    assert torch.equal(state.parents_XG[:2], other.parents_XG[:2])


class Greedy:
    """Takes the likeliest tokens on the host."""

    ids_R = np.array([1, 0])
    sampling = SimpleNamespace(is_greedy=lambda row: True)

    def __init__(self, net: Net) -> None:
        self.net = net

    def best(self, logits: Tensor, place_M: Any, depth: int, num: int) -> tuple[Any, Any]:
        top = logits.log_softmax(-1).topk(num, dim=-1)
        return self.net.ids_C[top.indices.cpu()].numpy(), top.values.double().cpu().numpy()


@pytest.mark.parametrize("checked", [0, 2, 4, NODES])
def test_the_host_grows_the_same_trees(checked: int) -> None:
    """As many nodes as the step checked, or all."""
    net: Any = Net()
    state, step, hidden = rows([[-1] * (checked + 1)] * 3, [1, 1, 0])
    states = tuple(state_TD[: 3 * (checked + 1)] for state_TD in hidden.features)
    hidden = Hidden(hidden.last_TD[: 3 * (checked + 1)], states)
    drafter(net).draft(state, step, hidden, DraftSource.TREE)
    last = torch.stack([state.tokens_XL[1, 30], state.tokens_XL[0, 19]])
    size, levels = checked or NODES, net.told_tiled(None, None)
    shape = TreeShape(depth=LEVELS, num_nodes=size, width=size, branch=BRANCH)
    context: Any = SimpleNamespace(device=torch.device("cpu"))
    chooser: Any = Greedy(net)

    def after(token_M: Any) -> Tensor:
        return torch.from_numpy(token_M).to(DEVICE)

    tree = BestFirst(
        context, chooser, np.array([size, size]), shape,
        odds=lambda place_M, depth, token_M: levels.odds(depth, after(token_M)),
    )  # fmt: skip
    draft = tree.grow(
        levels.level(0, last),
        lambda level: levels.level(level.path_MP.shape[1], after(level.token_M)),
        last.cpu().numpy(),
    )
    assert state.num_nodes_X.tolist()[:2] == [size, size]
    assert torch.equal(draft.tokens_RN, state.draft_XG[[1, 0], :size].cpu())
    assert torch.equal(draft.parents_RN, state.parents_XG[[1, 0], :size].cpu())
