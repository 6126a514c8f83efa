"""Log-probabilities in Triton against `sampling.logprobs`: to the last bit or the one before."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hunch.kernels import gpu_scores
from hunch.kernels.gpu_filters import CHUNK
from hunch.kernels.gpu_scores import committed, read_scores, scores
from hunch.kernels.step import FIRST, TOKENS, StepRows, committed_ref
from hunch.sampling.logprobs import entries, logprobs_of, scores_ref
from hunch.sampling.state import FILTERED, SAMPLED, SamplingState
from row_states import DEVICE, numbers

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter

Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def found(logits: torch.Tensor, at: list[int], tokens: list[int], num_best: int) -> Found:
    size = 1 + 2 * (1 + num_best)
    lines = torch.full((len(at), 4 + size), -7, device=DEVICE)
    out = lines[:, 2 : 2 + size].unflatten(1, (1, size))
    scores(logits.to(DEVICE), numbers(*at), numbers(*tokens), num_best, out)
    assert (lines[:, :2] == -7).all()  # a part of a wider line: the rest stays
    assert (lines[:, 2 + size :] == -7).all()
    ids_SC, value_SC, rank_S = read_scores(out[:, 0].cpu())
    return ids_SC, value_SC, rank_S


def logits_of(kind: str, num_rows: int = 4, vocab_size: int = CHUNK + 200) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(7)) * 4
    if kind == "tied":
        logits = logits.round()
    elif kind == "sure":  # a best token of nearly all mass: its log is close to 0
        logits[:, 77] += 28.0
    elif kind == "few":  # less allowed than asked for
        logits[:, 3:] = -torch.inf
    elif kind == "zeros":
        logits[:, :40], logits[:, 40:] = 0.0, -0.0
    return logits


def ulps(one: torch.Tensor, other: torch.Tensor) -> int:
    """How many float32 lie between values of the same sign at most."""
    return int((one.view(torch.int32).long() - other.view(torch.int32).long()).abs().max())


CASES = [("smooth", 0), ("smooth", 11), ("tied", 4), ("tied", 9), ("sure", 1), ("few", 5),
         ("zeros", 6)]  # fmt: skip


@pytest.mark.parametrize(("kind", "num_best"), CASES)
def test_scores_are_the_specification_up_to_the_last_bit(
    kind: str, num_best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_scores, "ROUND", 4)  # more than one round of few
    logits, at = logits_of(kind), [2, 0, 0]
    tokens = [1, CHUNK + 199, 77]
    ids, values, rank = found(logits, at, tokens, num_best)
    want_ids, want_values, want_rank = scores_ref(logits[at], torch.tensor(tokens), num_best)
    assert torch.equal(ids, want_ids)
    assert torch.equal(rank, want_rank)
    assert ulps(values, want_values) <= 1
    told = entries(ids.tolist(), values.tolist(), rank.tolist())
    wanted = logprobs_of(logits[at], tokens, num_best)
    assert [list(row) for row in told] == [list(row) for row in wanted]


def test_more_than_the_vocabulary_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_scores, "ROUND", 4)
    logits = logits_of("smooth", num_rows=2, vocab_size=9)
    ids, values, rank = found(logits, [1], [3], 14)
    want_ids, want_values, want_rank = scores_ref(logits[1:], torch.tensor([3]), 9)
    assert ids.tolist() == [want_ids[0].tolist() + [-1] * 5]
    assert ulps(values[:, :10], want_values) <= 1
    assert values[0, 10:].tolist() == [-torch.inf] * 5
    assert torch.equal(rank, want_rank)


def test_filters_leave_what_the_specification_leaves() -> None:
    logits = logits_of("tied", num_rows=5)
    asked = {  # T, top_k, top_p, log of min_p
        "temperature_X": ([1.0, 0.7, 1.3, 0.0, 0.9], torch.float32),
        "top_k_X": ([0, 5, 0, 3, 40], torch.int64),
        "top_p_X": ([1.0, 1.0, 0.6, 0.5, 0.8], torch.float64),
        "log_min_p_X": ([-torch.inf, -torch.inf, -torch.inf, -1.0, -3.0], torch.float32),
    }
    state = SamplingState(5, logits.shape[1], dense=True)
    for name, (values, dtype) in asked.items():
        setattr(state, name, torch.tensor(values, dtype=dtype))
    state.flags_X[:] = SAMPLED | FILTERED
    columns = [getattr(state, name).to(DEVICE) for name in asked]
    rows = [4, 2, 3, 0, 1]
    given = logits[rows].to(DEVICE)
    got = gpu_scores.filtered(given, numbers(*rows), *columns)
    want = state.filtered(logits[rows], torch.tensor(rows))
    assert torch.equal(got.cpu(), want)
    assert (want == -torch.inf).sum(1).gt(0).tolist() == [True, True, False, False, True]


def test_scores_do_not_depend_on_what_else_is_asked() -> None:
    logits = logits_of("smooth")
    together = found(logits, [0, 1, 1], [9, 10, 11], 3)
    for s, (at, token) in enumerate([(0, 9), (1, 10), (1, 11)]):
        alone = found(logits[at : at + 1], [0], [token], 3)
        assert all(
            torch.equal(one[s], other[0]) for one, other in zip(together, alone, strict=True)
        )


def test_places_where_nothing_is_asked_hold_nothing() -> None:
    logits = logits_of("smooth", num_rows=2, vocab_size=9)
    ids, values, rank = found(logits, [-1, 1, 0], [4, 2, -1], 11)
    assert (ids[[0, 2]] == -1).all()
    assert (values[[0, 2]] == -torch.inf).all()
    assert rank[[0, 2]].tolist() == [0, 0]
    assert sorted(ids[1, 1:10].tolist()) == list(range(9))  # more asked for than there are
    assert ids[1, 10:].tolist() == [-1, -1]
    assert values[1, 10:].tolist() == [-torch.inf] * 2


def test_log_probabilities_are_those_of_torch() -> None:
    logits = logits_of("sure")
    _, values, _ = found(logits, [0, 1, 2, 3], [77] * 4, 0)
    want = logits.double().log_softmax(1)[:, 77]
    assert float(want.max()) > -1e-4
    # Of each token less than a whole unit of mass is lost.
    error = (values[:, 0].double() - want).abs()
    assert (error <= 1e-6 * want.abs() + 2 * CHUNK * 2.0**-40).all()


def test_what_a_step_committed_and_by_which_logits() -> None:
    """A row that accepted nodes of a tree, one without, one that had ended, and padding."""
    num_k = 4
    rows = StepRows(
        ids_R=numbers(3, 0, 5, -1), max_checked_R=numbers(3, 3, 3, 0),
        max_draft_R=numbers(0, 0, 0, 0),
        num_checked_R=numbers(3, 2, -1, -1),
        path_RK=torch.tensor([[1, 2, -1, -1], [-1, 9, 9, 9], [9, 9, 9, 9], [9, 9, 9, 9]],
                             device=DEVICE),
        result_RC=torch.arange(4 * (FIRST + num_k + 3), device=DEVICE).view(4, -1),
    )  # fmt: skip
    rows.result_RC[:, TOKENS] = numbers(3, 1, 2, 0)
    got, want = ([numbers(*[-7] * 4 * num_k) for _ in "at"] for _ in "ab")
    committed(rows, *got)
    committed_ref(rows, *want)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert want[0].tolist() == [0, 2, 3, -1, 4, *[-1] * 11]


def test_scores_of_several_tokens_of_a_row_stand_in_its_line() -> None:
    logits = logits_of("smooth", num_rows=6)
    lines = torch.zeros(2, 5 + 3 * 7, dtype=torch.int64, device=DEVICE)
    at, tokens = numbers(0, 2, -1, 3, -1, -1), numbers(5, 6, 7, 8, 9, 10)
    scores(logits.to(DEVICE), at, tokens, 2, lines[:, 5:].unflatten(1, (3, 7)))
    for (r, k), row, token in (((0, 0), 0, 5), ((0, 1), 2, 6), ((1, 0), 3, 8)):
        ids, values, _ = read_scores(lines[r : r + 1, 5 + 7 * k : 12 + 7 * k].cpu())
        (wanted,) = logprobs_of(logits[row : row + 1], [token], 2)
        assert ids[0].tolist() == list(wanted)
        assert ulps(values[0], torch.tensor([one.logprob for one in wanted.values()])) <= 1
