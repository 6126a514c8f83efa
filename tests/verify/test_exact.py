"""The exact verifier commits what plain decoding would, whatever was drafted."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hunch.draft import Draft, Rows
from hunch.sampling.state import SamplingState
from hunch.types import Request, SamplingParams
from hunch.verify.base import history_of, paths
from hunch.verify.exact import exact, walk_choices
from verdicts import verdict as decide

VOCAB = 12
PROMPT = [1, 2, 3]


def rows_of(ids: list[int], known: list[int]) -> Rows:
    nothing = torch.zeros(1, dtype=torch.int64)
    known_X = torch.zeros(max(ids) + 1, dtype=torch.int64)
    known_X[ids] = torch.tensor(known)
    return Rows(
        ids_R=torch.tensor(ids), tokens_XL=nothing, known_X=known_X, prompt_X=nothing,
        end_X=nothing, computed_GX=nothing, table_XB=nothing, max_draft_X=nothing, block_size=16,
    )  # fmt: skip


def draft_of(trees: list[tuple[list[int], list[int]]]) -> Draft:
    width = max((len(tokens) for tokens, _ in trees), default=0)
    pad = [[t + [0] * (width - len(t)) for t in column] for column in zip(*trees, strict=True)]
    tokens, parents = (torch.tensor(c, dtype=torch.int64).view(len(trees), width) for c in pad)
    return Draft(tokens, parents, torch.tensor([len(tokens) for tokens, _ in trees]))


def random_tree(rng: random.Random, max_nodes: int) -> tuple[list[int], list[int]]:
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(rng.randint(0, max_nodes)):
        parent, token = rng.randint(-1, len(tokens) - 1), rng.randrange(VOCAB)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents


def model(history: list[int]) -> torch.Tensor:
    """Logits that depend on the last two tokens."""
    seed = history[-1] * 31 + history[-2]
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def packed_logits(draft: Draft, texts: list[list[int]]) -> torch.Tensor:
    """What the target would say after each root and each node."""
    out = []
    for r, text in enumerate(texts):
        out.append(model(text))
        after: list[list[int]] = []
        for n in range(int(draft.num_nodes_R[r])):
            parent = int(draft.parents_RN[r, n])
            after.append((after[parent] if parent >= 0 else text) + [int(draft.tokens_RN[r, n])])
            out.append(model(after[-1]))
    return torch.stack(out)


def decode(params: SamplingParams, num_nodes: int, dense: bool, seed: int) -> list[list[int]]:
    """Two rows decoded to 24 tokens with drafts of random trees, half of their tokens good."""
    rng = random.Random(seed)
    state = SamplingState(2, VOCAB, dense=dense)
    texts = [list(PROMPT), list(PROMPT)]
    for row in range(2):
        request = Request(
            id="", prompt_ids=PROMPT, params=params, seed=40 + row, stop_ids=(0,),
            bad_word_ids=((4, 5), (7,)),
        )  # fmt: skip
        state.start(row, request, PROMPT)
    while min(map(len, texts)) < 27:
        draft = draft_of([random_tree(rng, num_nodes) for _ in range(2)])
        rows = rows_of([0, 1], [len(text) for text in texts])
        verdict = decide(exact, draft, packed_logits(draft, texts), rows, state)
        new = [verdict.tokens_RK[r, : int(verdict.num_tokens_R[r])].tolist() for r in range(2)]
        state.commit([0, 1], new)
        texts = [text + tokens for text, tokens in zip(texts, new, strict=True)]
    return [text[:27] for text in texts]


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.9, top_k=6, top_p=0.9, min_p=0.02),
        SamplingParams(
            temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.2,
            logit_bias={3: 1.0}, min_tokens=9,
        ),
    ],
    ids=["greedy", "sampled", "filtered", "history"],
)  # fmt: skip
def test_text_does_not_depend_on_the_draft(params, dense):
    plain = decode(params, 0, dense=False, seed=0)
    assert plain[0] != plain[1] or params.temperature == 0
    for seed in range(4):
        assert decode(params, 12, dense=dense, seed=seed) == plain


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), num_rows=st.integers(1, 4), max_nodes=st.integers(0, 10))
def test_the_two_walks_agree(seed, num_rows, max_nodes):
    rng = random.Random(seed)
    draft = draft_of([random_tree(rng, max_nodes) for _ in range(num_rows)])
    num_logits = int((draft.num_nodes_R + 1).sum())
    choice_M = torch.tensor([rng.randrange(VOCAB) for _ in range(num_logits)])
    logits_MV = torch.nn.functional.one_hot(choice_M, VOCAB).float()
    rows = rows_of(list(range(num_rows)), [5] * num_rows)
    host = decide(exact, draft, logits_MV, rows, SamplingState(num_rows, VOCAB))
    device = walk_choices(draft, choice_M, history_of(draft, rows, num_logits).first_R)
    assert torch.equal(host.num_tokens_R, device.num_tokens_R)
    num_k = host.tokens_RK.shape[1]
    assert torch.equal(host.tokens_RK, device.tokens_RK[:, :num_k])
    assert torch.equal(host.path_RK, device.path_RK[:, :num_k])
    for r in range(num_rows):  # the accepted path is a path of the tree
        at = -1
        for k in range(int(host.num_tokens_R[r]) - 1):
            node = int(host.path_RK[r, k])
            assert int(draft.parents_RN[r, node]) == at
            assert int(draft.tokens_RN[r, node]) == int(host.tokens_RK[r, k])
            at = node
        assert int(host.path_RK[r, int(host.num_tokens_R[r]) - 1]) == -1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_history_names_ancestors_and_positions(seed):
    rng = random.Random(seed)
    trees = [random_tree(rng, 8) for _ in range(3)]
    draft = draft_of(trees)
    num_logits = int((draft.num_nodes_R + 1).sum())
    history = history_of(draft, rows_of([2, 0, 1], [10, 20, 30]), num_logits)
    m = 0
    for (tokens, parents), row, known in zip(trees, [2, 0, 1], [10, 20, 30], strict=True):
        for node in range(-1, len(tokens)):
            path: list[int] = []
            while node >= 0:
                path.insert(0, tokens[node])
                node = parents[node]
            assert int(history.row_M[m]) == row
            assert int(history.pos_M[m]) == known + len(path)
            assert [t for t in history.path_MP[m].tolist() if t >= 0] == path
            m += 1
    depth_RN, _ = paths(draft)
    assert int(depth_RN.max() if depth_RN.numel() else 0) <= 8


def test_an_empty_draft_is_plain_decoding():
    state = SamplingState(1, VOCAB)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 1
    for verdict in (
        decide(exact, Draft.empty(1), logits, rows_of([0], [3]), state),
        walk_choices(Draft.empty(1), torch.tensor([7]), torch.tensor([0])),
    ):
        assert verdict.tokens_RK.tolist() == [[7]]
        assert verdict.num_tokens_R.tolist() == [1]
        assert verdict.path_RK.tolist() == [[-1]]
