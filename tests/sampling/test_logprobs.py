"""Log-probabilities against float64 log-softmax, and their independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hunch.kernels.native_library import is_available
from hunch.kernels.native_sampling import scores
from hunch.sampling.logprobs import best, logprobs_of, scores_ref


def test_values_ranks_and_order():
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(1)) * 5
    tokens = [17, 499, int(logits[2].argmax())]
    want = logits.double().log_softmax(1)
    rows = logprobs_of(logits, tokens, 4)
    for m, (row, token) in enumerate(zip(rows, tokens, strict=True)):
        ranked = want[m].argsort(descending=True).tolist()
        assert next(iter(row)) == token
        assert set(row) == {token, *ranked[:4]}
        for t, entry in row.items():
            assert abs(entry.logprob - float(want[m, t])) < 1e-5
            assert entry.rank == ranked.index(t) + 1


def test_zero_best_tokens_gives_the_own_one_only():
    (row,) = logprobs_of(torch.zeros(1, 10), [3], 0)
    assert list(row) == [3]
    assert abs(row[3].logprob + np.log(10)) < 1e-6
    assert row[3].rank == 4  # of equals, lower ids come first


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(16, 2000, generator=torch.Generator().manual_seed(2)) * 4
    together = logprobs_of(logits, list(range(16)), 3)
    for m in range(16):
        assert logprobs_of(logits[m : m + 1], [m], 3) == together[m : m + 1]


def test_best_breaks_ties_by_id():
    logits = torch.randint(0, 5, (4, 60), generator=torch.Generator().manual_seed(3)).float()
    want = logits.sort(dim=1, descending=True, stable=True).indices[:, :20]
    assert torch.equal(best(logits, 20), want)


def test_removed_tokens_stand_at_minus_infinity():
    logits = torch.tensor([[1.0, -torch.inf, 0.0]])
    (row,) = logprobs_of(logits, [1], 3)
    assert row[1].logprob == -np.inf
    assert abs(np.exp(row[0].logprob) + np.exp(row[2].logprob) - 1) < 1e-6


@pytest.mark.skipif(not is_available(), reason="no compiler for the CPU's kernels")
@pytest.mark.parametrize("num_best", [0, 1, 5, 300])
def test_native_scores_are_the_reference_s(num_best: int) -> None:
    generator = torch.Generator().manual_seed(num_best)
    logits = 6 * torch.randn(9, 300, generator=generator)
    logits[1] = logits[1].round()  # many equals
    logits[2, 5:] = -torch.inf
    logits[3] = 0.0
    logits[4, 7] = 60.0
    at, tokens = [0, 8, 1, 2, 3, 4, 4, 2], [3, 0, 17, 2, 299, 7, 8, 200]
    ids, values, ranks = scores(logits, at, tokens, num_best)
    want = scores_ref(logits[at], torch.tensor(tokens), num_best)
    assert torch.equal(ids, want[0])
    assert torch.equal(ranks, want[2])
    torch.testing.assert_close(values, want[1], rtol=2e-7, atol=1e-7)
