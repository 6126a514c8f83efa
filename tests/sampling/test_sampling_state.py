"""Every sampling parameter against its plain definition, at roots and at drafted nodes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

import plain_sampling
from hunch.sampling.state import SamplingState
from hunch.types import Request, SamplingParams

VOCAB = 40
PROMPT = [3, 7, 7, 12, 30]
STOPS = (0, 5)
BAD_WORDS = ((9,), (4, 6), (1, 2, 8))

CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.3, top_k=5),
    "top_p": SamplingParams(temperature=0.9, top_p=0.6),
    "min_p": SamplingParams(temperature=1.1, min_p=0.2),
    "filters": SamplingParams(temperature=1.5, top_k=9, top_p=0.8, min_p=0.02),
    "repetition": SamplingParams(temperature=0, repetition_penalty=1.7),
    "presence": SamplingParams(temperature=0, presence_penalty=1.5),
    "frequency": SamplingParams(temperature=0.6, frequency_penalty=0.9),
    "bias": SamplingParams(temperature=0, logit_bias={3: 4.0, 9: -100.0, 11: 2.5}),
    "allowed": SamplingParams(temperature=1.0, allowed_token_ids=[1, 4, 6, 8, 9, 20]),
    "min_tokens": SamplingParams(temperature=0, min_tokens=4),
    "all": SamplingParams(
        temperature=0.8, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=-0.4, logit_bias={2: 3.0, 5: 5.0}, min_tokens=6,
    ),
}  # fmt: skip


def request_of(params: SamplingParams, *, seed: int = 5, bad_words=BAD_WORDS) -> Request:
    return Request(
        id="r", prompt_ids=PROMPT, params=params, seed=seed, sample_index=1, stop_ids=STOPS,
        bad_word_ids=bad_words,
    )  # fmt: skip


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    return (logits * 4).round() / 4  # steps of 1/4: ties occur


def padded(paths: list[list[int]], width: int = 4) -> torch.Tensor:
    return torch.tensor([path + [-1] * (width - len(path)) for path in paths])


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_processed_as_defined(name, dense):
    request = request_of(CASES[name])
    output = [4, 1, 2, 5, 4, 6]
    state = SamplingState(3, VOCAB, dense=dense)
    state.start(1, request, PROMPT + output[:3])
    state.commit([1], [output[3:]])
    paths = [[], [4], [1, 2], [4, 4, 6, 1], [0, 5]]
    logits = logits_of(len(paths))
    pos = torch.tensor([len(PROMPT) + len(output) + len(path) for path in paths])
    row = torch.ones(len(paths), dtype=torch.int64)
    got = state.process(logits, row, pos, padded(paths))
    chosen = state.choose(logits, row, pos, padded(paths)).tolist()
    for m, path in enumerate(paths):
        history = output + path
        x = plain_sampling.with_history(logits[m].numpy(), request, history)
        want = plain_sampling.filtered(x, request)
        assert np.array_equal(np.isinf(got[m].numpy()), np.isinf(want))
        np.testing.assert_allclose(got[m].numpy(), want, rtol=1e-6)
        assert chosen[m] == plain_sampling.choose(logits[m].numpy(), request, history)


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
@pytest.mark.parametrize("name", CASES)
def test_a_path_counts_as_output(name, dense):
    """A node's logits are processed as they will be once its ancestors are committed."""
    request = request_of(CASES[name])
    logits, path = logits_of(1, seed=3), [1, 2, 4]
    ahead, behind = SamplingState(1, VOCAB, dense=dense), SamplingState(1, VOCAB, dense=dense)
    ahead.start(0, request, PROMPT)
    behind.start(0, request, PROMPT)
    behind.commit([0], [path])
    row, pos = torch.tensor([0]), torch.tensor([len(PROMPT) + len(path)])
    by_path = ahead.process(logits, row, pos, padded([path]))
    by_commit = behind.process(logits, row, pos, padded([[]]))
    assert torch.equal(by_path, by_commit)


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
def test_rows_do_not_touch_each_other(dense):
    names = list(CASES)
    state = SamplingState(len(names), VOCAB, dense=dense)
    for row, name in enumerate(names):
        state.start(row, request_of(CASES[name], seed=row), [*PROMPT, 1])
    logits = logits_of(len(names), seed=9)
    row, pos = torch.arange(len(names)), torch.full((len(names),), len(PROMPT) + 1)
    together = state.choose(logits, row, pos, padded([[]] * len(names))).tolist()
    for m, name in enumerate(names):
        alone = SamplingState(1, VOCAB, dense=dense)
        alone.start(0, request_of(CASES[name], seed=m), [*PROMPT, 1])
        one = alone.choose(logits[m : m + 1], torch.tensor([0]), pos[:1], padded([[]]))
        assert together[m] == int(one)


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
def test_a_row_that_left_leaves_nothing_behind(dense):
    state = SamplingState(1, VOCAB, dense=dense)
    state.start(0, request_of(CASES["all"]), PROMPT)
    state.leave(0)
    greedy = request_of(CASES["greedy"], bad_words=())
    state.start(0, greedy, PROMPT)
    logits = logits_of(1)
    args = torch.tensor([0]), torch.tensor([5]), padded([[]])
    assert state.is_plain(args[0])
    assert torch.equal(state.process(logits, *args), logits)


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
def test_a_mask_forbids_tokens(dense):
    state = SamplingState(1, VOCAB, dense=dense)
    state.start(0, request_of(CASES["greedy"], bad_words=()), PROMPT)
    logits = logits_of(1)
    mask = torch.ones(1, VOCAB, dtype=torch.bool)
    best = int(logits.argmax())
    mask[0, best] = False
    args = torch.tensor([0]), torch.tensor([5]), padded([[]])
    assert int(state.choose(logits, *args)) == best
    logits[0, best] = -torch.inf
    assert int(state.choose(logits, *args, mask)) == int(logits.argmax())


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.05, 0.5, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 50]),
    top_p=st.sampled_from([0.01, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_host_and_dense_agree(seed, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = (torch.randn(2, 400, generator=torch.Generator().manual_seed(seed)) * 12).round() / 4
    results = []
    for dense in (False, True):
        state = SamplingState(2, 400, dense=dense)
        for row in range(2):
            state.start(row, request_of(params, seed=seed + row, bad_words=()), PROMPT)
        args = logits, torch.arange(2), torch.tensor([8, 9])
        path = torch.full((2, 1), -1)
        results.append((state.process(*args, path), state.choose(*args, path), state.draw(*args)))
    for host, dense_result in zip(*results, strict=True):
        assert torch.equal(host, dense_result)
    assert torch.equal(results[0][1], results[0][2])  # without history a draw is the choice


def test_choices_follow_the_distribution_over_seeds():
    num = 6000
    logits_V = torch.tensor([1.0, 0.5, 0.0, -0.5, -1.0, -4.0])
    params = SamplingParams(temperature=0.8, top_k=5)
    state = SamplingState(num, 6)
    for row in range(num):
        state.start(row, request_of(params, seed=row * 7919, bad_words=()), PROMPT)
    rows, pos = torch.arange(num), torch.full((num,), 5)
    chosen = state.choose(logits_V.expand(num, 6), rows, pos, torch.full((num, 1), -1))
    counts = torch.bincount(chosen, minlength=6).numpy()
    p = torch.softmax(logits_V[:5] / 0.8, 0).double().numpy()
    assert counts[5] == 0
    assert stats.chisquare(counts[:5], p / p.sum() * num).pvalue > 1e-3
    flatter = torch.softmax(logits_V[:5] / 0.9, 0).double().numpy()
    assert stats.chisquare(counts[:5], flatter / flatter.sum() * num).pvalue < 1e-3


def test_ties_go_to_the_lowest_id():
    state = SamplingState(1, 8)
    state.start(0, request_of(SamplingParams(temperature=0), bad_words=()), PROMPT)
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, 0, 0, 0]])
    assert int(state.choose(logits, torch.tensor([0]), torch.tensor([5]), padded([[]]))) == 1
    params = SamplingParams(temperature=1.0, top_k=2)
    state.start(0, request_of(params, bad_words=()), PROMPT)
    kept = state.process(logits, torch.tensor([0]), torch.tensor([5]), padded([[]]))
    assert torch.isfinite(kept[0]).nonzero().flatten().tolist() == [1, 3]


def test_a_part_of_the_vocabulary_gets_the_noise_of_its_own_tokens():
    state = SamplingState(1, VOCAB)
    state.start(0, request_of(SamplingParams(temperature=1.0), bad_words=()), PROMPT)
    logits = logits_of(1, seed=4)
    ids = torch.tensor([2, 3, 11, 17, 25, 39])
    hidden = torch.full_like(logits, -torch.inf)
    hidden[:, ids] = logits[:, ids]
    args = torch.tensor([0]), torch.tensor([9])
    assert int(state.draw(logits[:, ids], *args, ids)) == int(state.draw(hidden, *args))


def test_scores_rank_the_draw_first():
    state = SamplingState(1, VOCAB)
    state.start(0, request_of(SamplingParams(temperature=0.9, top_p=0.9), bad_words=()), PROMPT)
    logits = logits_of(1, seed=6)
    for pos in range(5, 25):
        args = logits, torch.tensor([0]), torch.tensor([pos])
        assert int(state.scores(*args).argmax()) == int(state.draw(*args))


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
def test_a_perfect_drafter_that_follows_the_rules_guesses_the_targets_choice(dense):
    """Also where it knows only a part of the vocabulary."""
    names, output = list(CASES), [4, 1, 2]
    state = SamplingState(len(names), VOCAB, dense=dense)
    for row, name in enumerate(names):
        state.start(row, request_of(CASES[name], seed=row), PROMPT + output)
    row, pos = torch.arange(len(names)), torch.full((len(names),), len(PROMPT) + len(output) + 2)
    for seed in range(5):
        args, path = (logits_of(len(names), seed), row, pos), padded([[1, 2]] * len(names))
        chosen = state.choose(*args, path)
        assert torch.equal(state.draw(state.apply_rules(*args, path), row, pos), chosen)
        ids = torch.arange(3, VOCAB)
        part = state.apply_rules(args[0][:, ids], row, pos, path, ids)
        guess = state.draw(part, row, pos, ids)
        is_near = torch.isin(chosen, ids) & torch.tensor([not CASES[n].top_p < 1 for n in names])
        assert torch.equal(guess[is_near], chosen[is_near])
        assert int(is_near.sum()) > 5


@pytest.mark.parametrize("dense", [False, True], ids=["host", "dense"])
def test_a_drafter_that_knows_no_allowed_token_keeps_its_logits(dense):
    state = SamplingState(1, VOCAB, dense=dense)
    params = SamplingParams(temperature=0, allowed_token_ids=[39])
    state.start(0, request_of(params, bad_words=()), PROMPT)
    logits, ids = logits_of(1)[:, :10], torch.arange(10)
    args = torch.tensor([0]), torch.tensor([5]), padded([[]])
    assert torch.equal(state.apply_rules(logits, *args, ids), logits)


def test_what_rows_ask_of_a_step_is_known_to_the_host():
    state = SamplingState(4, VOCAB, dense=True)
    for row, name in enumerate(("greedy", "temperature", "top_p", "bias")):
        state.start(row, request_of(CASES[name], bad_words=()), PROMPT)
    kinds = [state.draws(np.array(rows)) for rows in ([0], [0, 1], [2, 0], [3], [1, 3])]
    assert kinds == [0, 1, 2, 0, 1]
    assert [state.has_rules(row) for row in range(4)] == [False, False, False, True]
    state.leave(3)
    assert not state.has_rules(3)


class Copies(TorchDispatchMode):
    """Counts copies of single numbers: on a GPU each waits until all its work is done."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.copy_.default and args[0].dim() == 0
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["filters", "all"])
def test_a_request_comes_and_goes_without_waiting_for_the_device(name):
    state = SamplingState(2, VOCAB, dense=True)
    with Copies() as copies:
        state.start(1, request_of(CASES[name]), PROMPT)
        state.leave(1)
    assert copies.count == 0


class Sets(TorchDispatchMode):
    """Counts the values that are set."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.fill_.Scalar
        return func(*args, **(kwargs or {}))


def test_a_row_holds_what_its_request_asks_for_whoever_had_it_before():
    used = SamplingState(1, VOCAB)
    for name in ("filters", "greedy", "temperature", "top_p", "min_p", "greedy", "filters"):
        fresh, request = SamplingState(1, VOCAB), request_of(CASES[name])
        for state in (used, fresh):
            state.start(0, request, PROMPT)
        pairs = list(zip(used.columns_X, fresh.columns_X, strict=True))
        for held_X, wanted_X in pairs if name != "greedy" else pairs[:1]:
            assert torch.equal(held_X, wanted_X)
        used.leave(0)


def test_a_request_like_the_one_before_sets_nothing_but_its_seed():
    state = SamplingState(1, VOCAB)
    for seed, most in ((5, 6), (6, 1), (6, 0)):
        with Sets() as sets:
            state.start(0, request_of(CASES["filters"], seed=seed), PROMPT)
            state.leave(0)
        assert sets.count <= most
