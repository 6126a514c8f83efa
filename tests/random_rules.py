"""Requests with rules of every kind, made at random, and drafted paths that meet them."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from hunch.types import Request, SamplingParams


def request_of(rng: random.Random, vocab_size: int) -> Request:
    """About half of the rules each, over few tokens, so that they meet."""

    def tokens(count: int) -> list[int]:
        return [token(rng, vocab_size) for _ in range(count)]

    def maybe(value: object, other: object) -> object:
        return value if rng.random() < 0.5 else other

    bias = {t: rng.choice([-100.0, -1.3, 0.0, 2.7]) for t in tokens(rng.randint(1, 9))}
    params = SamplingParams(
        temperature=0,
        repetition_penalty=maybe(rng.choice([0.7, 1.3, 1.9]), 1.0),
        frequency_penalty=maybe(rng.choice([-0.4, 0.9]), 0.0),
        presence_penalty=maybe(rng.choice([-1.1, 0.3]), 0.0),
        logit_bias=maybe(bias, None),
        allowed_token_ids=maybe(tokens(12), None) if rng.random() < 0.4 else None,
        min_tokens=maybe(rng.randint(1, 6), 0),
    )
    words = [tuple(tokens(rng.randint(1, 4))) for _ in range(rng.randint(0, 12))]
    return Request(
        id="r",
        prompt_ids=tokens(rng.randint(1, 20)),
        params=params,
        seed=0,
        stop_ids=tuple(tokens(rng.randint(0, 3))),
        bad_word_ids=maybe(tuple(words), ()),
    )


def token(rng: random.Random, vocab_size: int) -> int:
    """One of few: the first ones, and the last of the vocabulary."""
    return rng.choice([*range(10), vocab_size - 2, vocab_size - 1])


def logits_of(seed: int, num_rows: int, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_MV = torch.randn(num_rows, vocab_size, generator=generator) * 4
    logits_MV[:, ::7] = 0.0
    logits_MV[:, 3::11] = -0.0
    return logits_MV


def padded(paths: list[list[int]], width: int) -> Tensor:
    lines = [path + [-1] * (width - len(path)) for path in paths]
    return torch.tensor(lines, dtype=torch.int64).view(len(paths), width)
