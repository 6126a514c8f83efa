"""Rejection, block and typical on drafts by hand: what must hold of a single verdict."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from hunch.draft import Draft, Rows
from hunch.sampling.state import SamplingState
from hunch.types import Request, SamplingParams
from hunch.verify.block import block
from hunch.verify.exact import exact
from hunch.verify.rejection import chance, rejection, residual, without
from hunch.verify.typical import bar, typical
from verdicts import verdict as decide

VOCAB = 8


def rows_of(num_rows: int, known: int = 5) -> Rows:
    nothing = torch.zeros(1, dtype=torch.int64)
    return Rows(
        ids_R=torch.arange(num_rows), tokens_XL=nothing, prompt_X=nothing, end_X=nothing,
        known_X=torch.full((num_rows,), known), computed_GX=nothing, table_XB=nothing,
        max_draft_X=nothing, block_size=16,
    )  # fmt: skip


def state_of(num_rows: int, *, dense: bool = False, **params: float) -> SamplingState:
    state = SamplingState(num_rows, VOCAB, dense=dense)
    for row in range(num_rows):
        request = Request(
            id="", prompt_ids=[1], params=SamplingParams(**params), seed=3, sample_index=row
        )
        state.start(row, request, [1])
    return state


def random_draft(rng: random.Random, num_rows: int, *, is_chain: bool) -> Draft:
    tokens, parents = [], []
    for _ in range(num_rows):
        row: list[tuple[int, int]] = []
        while len(row) < 4:
            node = (len(row) - 1 if is_chain else rng.randint(-1, len(row) - 1), rng.randrange(8))
            if node not in row:
                row.append(node)
        parents.append([node[0] for node in row])
        tokens.append([node[1] for node in row])
    return Draft(torch.tensor(tokens), torch.tensor(parents), torch.full((num_rows,), 4))


def with_draws(draft: Draft) -> Draft:
    q_RNV = torch.rand(*draft.tokens_RN.shape, VOCAB).softmax(-1)
    return Draft(
        draft.tokens_RN, draft.parents_RN, draft.num_nodes_R, q_RNV, torch.full((3, 4), True)
    )


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("verify", [rejection, block, typical])
def test_greedy_rows_get_exactly_the_targets_choices(verify, is_chain):
    rng = random.Random(0)
    for _ in range(20):
        draft = random_draft(rng, 3, is_chain=is_chain)
        logits_MV = torch.randn(15, VOCAB)
        state = state_of(3, temperature=0)
        one, other = (
            decide(weigh, draft, logits_MV, rows_of(3), state) for weigh in (exact, verify)
        )
        assert torch.equal(one.num_tokens_R, other.num_tokens_R)
        assert torch.equal(one.tokens_RK, other.tokens_RK)
        assert torch.equal(one.path_RK, other.path_RK)


@pytest.mark.parametrize("is_chain", [True, False], ids=["chain", "tree"])
@pytest.mark.parametrize("verify", [rejection, block, typical])
def test_a_verdict_is_a_function_of_the_seed_and_the_same_on_both_kinds_of_state(verify, is_chain):
    rng = random.Random(1)
    torch.manual_seed(0)
    for _ in range(10):
        draft = with_draws(random_draft(rng, 3, is_chain=is_chain))
        logits_MV = torch.randn(15, VOCAB) * 2
        params = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}
        first, again, dense = (
            decide(verify, draft, logits_MV, rows_of(3), state_of(3, dense=is_dense, **params))
            for is_dense in (False, False, True)
        )
        for other in (again, dense):
            assert torch.equal(first.tokens_RK, other.tokens_RK)
            assert torch.equal(first.path_RK, other.path_RK)


@pytest.mark.parametrize("verify", [rejection, block, typical])
def test_a_forbidden_token_is_never_committed(verify):
    torch.manual_seed(2)
    draft = with_draws(random_draft(random.Random(2), 3, is_chain=True))
    mask_MV = torch.rand(15, VOCAB) < 0.4
    mask_MV[:, 0] = True
    for seed in range(20):
        verdict = decide(
            verify,
            draft,
            torch.randn(15, VOCAB),
            rows_of(3, 5 + seed),
            state_of(3, temperature=1),
            mask_MV,
        )
        for row in range(3):
            node = -1
            for k in range(int(verdict.num_tokens_R[row])):
                assert mask_MV[row * 5 + 1 + node, verdict.tokens_RK[row, k]]
                node = int(verdict.path_RK[row, k])


def test_chances_of_kept_and_drawn_tokens_add_up_to_p():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    kept = np.array([q[t] * chance(p, q, t) for t in range(6)])
    drawn = sum(q[t] * (1 - chance(p, q, t)) * residual(p, q, t) for t in range(6))
    assert kept + drawn == pytest.approx(p)
    for t in range(6):  # chosen, not drawn
        left = (1 - chance(p, None, t)) * residual(p, None, t)
        assert left + chance(p, None, t) * np.eye(6)[t] == pytest.approx(p)


def test_later_siblings_are_weighed_without_the_earlier_ones():
    q = without(np.array([0.5, 0.25, 0.25]), [0])
    assert q is not None
    assert q == pytest.approx([0, 0.5, 0.5])
    assert without(np.array([1.0, 0.0]), [0]) is None  # nothing is left to draw from
    assert without(None, [0]) is None


def test_typical_keeps_what_is_likely_enough():
    flat, sharp = np.full(100, 0.01), np.array([0.97, 0.01, 0.01, 0.01])
    assert bar(flat) == pytest.approx(0.3 * math.exp(-math.log(100)))
    assert bar(sharp) == 0.09
    logits_MV = torch.tensor([[2.0, 1.9, -9, -9, -9, -9, -9, -9]] * 2)
    draft = Draft(torch.tensor([[1]]), torch.tensor([[-1]]), torch.tensor([1]))
    for known in range(5, 25):  # whatever the noise says, the likely guess is kept
        asked = rows_of(1, known), state_of(1, temperature=1.0)
        verdict = decide(typical, draft, logits_MV, *asked)
        assert verdict.tokens_RK[0, 0] == 1
        assert verdict.num_tokens_R[0] == 2
    unlikely = Draft(torch.tensor([[5]]), torch.tensor([[-1]]), torch.tensor([1]))
    verdict = decide(typical, unlikely, logits_MV, rows_of(1), state_of(1, temperature=1.0))
    assert verdict.num_tokens_R[0] == 1
