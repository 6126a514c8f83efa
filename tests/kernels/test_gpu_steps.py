"""Sampling, verifying and committing in Triton, against the host's rules."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")

from hunch.draft import Draft
from hunch.kernels import gpu_sampling, gpu_step, noise
from hunch.kernels import step as spec
from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.sampling.filters import filter_ref
from hunch.sampling.stop import REASONS, cut_at_end
from hunch.types import Request, SamplingParams
from hunch.verify.exact import walk_choices
from row_states import DEVICE, cells_of, numbers, step_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def test_argmax_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, 9000, device=DEVICE)
    logits[0, [8000, 70]] = 5.0
    logits[1, 8999] = 1.0
    assert gpu_sampling.argmax(logits).tolist() == [70, 8999, 0]


FILTERS = [  # temperature, top_k, top_p, log of min_p
    (1.0, 0, 1.0, -torch.inf), (0.7, 5, 1.0, -torch.inf), (1.3, 0, 0.6, -torch.inf),
    (0.9, 0, 1.0, -1.5), (1.1, 40, 0.8, -3.0), (0.0, 3, 0.5, -1.0), (1.0, 1, 0.1, -torch.inf),
]  # fmt: skip


@pytest.mark.parametrize("spread", ["smooth", "tied", "flat"])
def test_choice_is_the_definition(spread: str) -> None:
    num_rows, vocab = len(FILTERS), 5000
    logits = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(1)) * 3
    if spread == "tied":
        logits = logits.round()  # equal scores at every edge
    elif spread == "flat":
        logits = logits.clamp(-0.01, 0.01).round(decimals=3)  # more in a bin than are listed
    logits = logits.to(DEVICE)
    state = [numbers(*column, dtype=d) for column, d in zip(
        zip(*FILTERS, strict=True),
        (torch.float32, torch.int64, torch.float64, torch.float32), strict=True)]  # fmt: skip
    temperature, top_k, top_p, min_p = state
    row = torch.arange(num_rows, device=DEVICE)
    seed, sample, pos = row * 2**33 + 7, row + 1, row * 5 + 3
    got = gpu_sampling.choose(logits, row, pos, temperature, top_k, top_p, min_p, seed, sample)
    z = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    kept = filter_ref(z, top_k, top_p, min_p)
    scores = kept + noise.gumbel(seed, sample, pos, noise.TARGET, vocab)
    want = torch.where(temperature > 0, scores.argmax(1), logits.argmax(1))
    assert got.tolist() == want.tolist()


def test_choice_among_some_tokens_has_their_noise() -> None:
    ids = torch.tensor([3, 900, 17, 4000], device=DEVICE)
    logits = torch.zeros(2, 4, device=DEVICE)
    row = numbers(0, 0)
    one, zero, pos = numbers(1.0, dtype=torch.float32), numbers(0), numbers(4, 5)
    got = gpu_sampling.choose(
        logits, row, pos, one, zero, one, one, zero + 9, zero, is_filtered=False, ids_V=ids
    )
    noise_at = noise.gumbel_at(numbers(9, 9), numbers(0, 0), pos, noise.TARGET, ids.expand(2, 4))
    assert got.tolist() == ids[noise_at.argmax(1)].tolist()


FORMS = pytest.mark.parametrize("form", [gpu_step, spec], ids=["triton", "plain"])


def kernel(form: ModuleType, name: str) -> Callable[..., None]:
    return getattr(form, name) if form is gpu_step else getattr(form, f"{name}_ref")


@FORMS
def test_commit_walks_and_stops_as_the_host_does(form: ModuleType) -> None:
    gen = torch.Generator().manual_seed(3)
    num_rows, num_nodes = 40, 6
    tokens = torch.randint(1, 3, (num_rows, num_nodes), generator=gen)
    parents = torch.stack([torch.randint(-1, n, (num_rows,), generator=gen) if n else
                           torch.full((num_rows,), -1) for n in range(num_nodes)], 1)  # fmt: skip
    for r in range(num_rows):  # no two children of one parent say the same
        seen = set()
        for n in range(num_nodes):
            while (int(parents[r, n]), int(tokens[r, n])) in seen:
                tokens[r, n] += 1
            seen.add((int(parents[r, n]), int(tokens[r, n])))
    nodes = torch.randint(0, num_nodes + 1, (num_rows,), generator=gen)
    choice = torch.randint(1, 3, (num_rows * (num_nodes + 1),), generator=gen)
    known = [5 + r % 3 for r in range(num_rows)]
    ends = [length + 1 + r % 4 for r, length in enumerate(known)]
    state = cells_of([[9] * length for length in known], ends=ends, max_nodes=num_nodes)
    state.draft_XG.copy_(tokens)
    state.parents_XG.copy_(parents)
    state.stop_XS[::2, 0] = 2
    state.num_nodes_X.fill_(5)
    first = torch.arange(num_rows) * (num_nodes + 1)
    verdict = walk_choices(Draft(tokens, parents, nodes), choice, first)
    want, reasons = [], []
    for r, (count, said) in enumerate(zip(verdict.num_tokens_R, verdict.tokens_RK, strict=True)):
        request = Request(
            id="", prompt_ids=[], params=SamplingParams(), seed=0, max_tokens=ends[r] - known[r],
            stop_ids=(2,) if r % 2 == 0 else (),
        )  # fmt: skip
        num_kept, reason = cut_at_end(said[: int(count)].tolist(), request, 0)
        want.append(num_kept)
        reasons.append(REASONS.index(reason))
    nodes[7] = -1  # padding, or ended before
    step = step_of(list(range(num_rows)), num_nodes, num_checked=nodes.tolist())
    kernel(form, "commit")(state, step, choice.to(DEVICE))
    for r, line in enumerate(step.result_RC.tolist()):
        num = 0 if r == 7 else want[r]
        assert line[spec.TOKENS] == num
        assert int(state.known_X[r]) == known[r] + num
        said = verdict.tokens_RK[r, :num].tolist()
        assert line[spec.FIRST : spec.FIRST + num] == said
        assert state.tokens_XL[r, known[r] : known[r] + num].tolist() == said
        path = verdict.path_RK[r, : max(num - 1, 0)].tolist()
        assert step.path_RK[r, : max(num - 1, 0)].tolist() == path
        if r != 7:
            assert line[spec.REASON] == reasons[r]
            assert bool(state.is_done_X[r]) == bool(reasons[r])
            assert int(state.num_nodes_X[r]) == 0
    assert max(want) > 2


@FORMS
def test_compact_moves_the_path_to_its_positions(form: ModuleType) -> None:
    k = torch.arange(2 * 20 * 3 * 4, dtype=torch.float32).view(2, 20, 3, 4).to(DEVICE)
    kv = KVCache(k.clone(), -k)
    slot = numbers(5, 6, 7, 12, 13, 14, 0, 1, 2, 3, 8, 9)
    step = step_of([0, 1], 5)
    step.path_RK.copy_(torch.tensor([[0, 2, 4, -1, -1, -1], [1, -1, -1, -1, -1, -1]]))
    step.result_RC[:, 0] = numbers(4, 2)
    kernel(form, "compact")(kv, step, slot)
    want = k.clone()
    for target, source in ((7, 12), (12, 14), (1, 2)):
        want[:, target] = k[:, source]
    assert torch.equal(kv.k_LCMH, want)
    assert torch.equal(kv.v_LCMH, -want)


@FORMS
@pytest.mark.parametrize("is_tree", [False, True])
def test_pack_places_nodes_and_their_ancestors(is_tree: bool, form: ModuleType) -> None:
    state = cells_of([[4, 5, 6], [7], [1] * 30], max_nodes=3)
    table = torch.randperm(30, generator=torch.Generator().manual_seed(0)).view(3, 10).to(DEVICE)
    state.table_XB.copy_(table)
    chain = [[-1, 0, 1], [-1, 0, 1]]
    parents = [[-1, 0, -1], [-1, 0, 0]] if is_tree else chain
    for row, line, above in ((2, [10, 11, 12], parents[0]), (0, [20, 21, 22], parents[1])):
        state.draft_XG[row], state.parents_XG[row] = torch.tensor(line), torch.tensor(above)
    state.num_nodes_X.copy_(numbers(3, 3, 3))
    state.is_done_X[1] = 1
    names = ("pos_T", "slot_T", "seq_T", "base_T")
    out = {name: torch.full((16,), -7, device=DEVICE) for name in names}
    tree = torch.full((16, 3), -7, device=DEVICE) if is_tree else None
    attn = AttnInputs(**out, table_SB=table, tree_TP=tree, block_size=4)
    ids_T = torch.full((16,), -7, device=DEVICE)
    step = step_of([2, 0, -1, 1], 3, max_checked=[9, 2, 9, 9])
    kernel(form, "pack")(state, step, ids_T, attn)

    def slot(row: int, pos: int) -> int:
        return int(table[row, pos // 4]) * 4 + pos % 4

    assert step.num_checked_R.tolist() == [3, 2, -1, -1]
    assert ids_T[:7].tolist() == [1, 10, 11, 12, 6, 20, 21]
    assert out["slot_T"][:7].tolist() == [slot(2, p) for p in (29, 30, 31, 32)] + [
        slot(0, p) for p in (2, 3, 4)
    ]
    assert out["slot_T"][7:].tolist() == [-1] * 9
    assert out["seq_T"][:8].tolist() == [2] * 4 + [0] * 4
    if tree is None:
        assert out["pos_T"][:7].tolist() == [29, 30, 31, 32, 2, 3, 4]
        assert (out["base_T"] > out["pos_T"]).all()
    else:
        assert out["pos_T"][:7].tolist() == [29, 30, 31, 30, 2, 3, 4]
        assert out["base_T"][:7].tolist() == [30] * 4 + [3] * 3
        assert tree[2, :2].tolist() == [slot(2, 30), slot(2, 31)]
        assert tree[3, 0] == slot(2, 32)
        assert tree[6, :2].tolist() == [slot(0, 3), slot(0, 4)]
