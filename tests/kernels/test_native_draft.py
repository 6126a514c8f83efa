"""The kernels' help for drafters: the best few tokens, and vocabularies that are a part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hunch.kernels import native_library, native_sampling
from hunch.kernels.native_draft import best
from hunch.kernels.noise import TARGET, gumbel, gumbel_at
from hunch.sampling.filters import filter_ref

pytestmark = pytest.mark.skipif(not native_library.is_available(), reason="no C++ compiler")

NUM_ROWS = 24
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_k": 40},
    {"min_p": 0.02},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.01},
]


def asked(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> Any:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((NUM_ROWS,), value, dtype=dtype)

    return (
        full(temperature, torch.float32),
        full(top_k, torch.int64),
        full(top_p, torch.float64),
        full(math.log(min_p) if min_p else -math.inf, torch.float32),
    )


def keys() -> tuple[Tensor, Tensor, Tensor]:
    row = torch.arange(NUM_ROWS)
    return row * 0x123456789AB, row % 3, row + 100


def random_logits(size: int) -> Tensor:
    return torch.randn(NUM_ROWS, size, generator=torch.Generator().manual_seed(size)) * 3


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("size", [7, 1000, 16000])
def test_columns_are_chosen_by_the_noise_of_their_tokens(
    filters: dict[str, Any], size: int
) -> None:
    logits, params = random_logits(size), asked(0.8, **filters)
    ids = torch.randperm(49152, generator=torch.Generator().manual_seed(1))[:size]
    got = native_sampling.choose(logits, *params, *keys(), ids_C=ids)
    z = filter_ref(logits / 0.8, *params[1:])
    noise = gumbel_at(*keys(), TARGET, ids.expand(NUM_ROWS, size))
    assert got.equal(ids[(z + noise).argmax(1)])


@pytest.mark.parametrize("is_part", [False, True])
def test_greedy_rows_get_the_likeliest_tokens_and_their_shares(is_part: bool) -> None:
    logits = random_logits(1000)
    ids = torch.randperm(5000)[:1000] if is_part else None
    tokens, gains = best(logits, *asked(0.0), *keys(), 5, ids)
    top = logits.log_softmax(-1).topk(5, -1)
    assert tokens.equal(top.indices if ids is None else ids[top.indices])
    torch.testing.assert_close(gains, top.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("num", [1, 4])
def test_sampled_rows_get_the_best_with_noise(filters: dict[str, Any], num: int) -> None:
    logits, params = random_logits(100), asked(0.8, **filters)  # all of them are near
    tokens, gains = best(logits, *params, *keys(), num)
    assert tokens[:, 0].equal(native_sampling.choose(logits, *params, *keys()))
    z = filter_ref(logits / 0.8, *params[1:])
    scores = z + gumbel(*keys(), TARGET, 100)
    top = scores.log_softmax(-1).topk(num, -1)
    is_left = top.values > -math.inf
    assert tokens[is_left].equal(top.indices[is_left])
    torch.testing.assert_close(gains, top.values, rtol=1e-3, atol=1e-3)
    assert all(len(set(row)) == num for row in tokens.tolist())


def test_the_first_is_what_would_be_chosen_though_most_tokens_get_no_noise() -> None:
    logits, params = random_logits(49152) / 6, asked(1.5)
    tokens, gains = best(logits, *params, *keys(), 4)
    assert tokens[:, 0].equal(native_sampling.choose(logits, *params, *keys()))
    assert bool((gains <= 0).all())
    assert bool((gains.diff(dim=1) <= 0).all())
