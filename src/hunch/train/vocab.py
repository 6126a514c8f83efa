"""The draft vocabulary: the tokens a drafter may guess, most frequent first.

How frequent a token is in what users will ask for is not known. Three quarters of the estimate are
what the answers say that training goes over. The rest knows the id alone: tokenizers number what
they merged most often first, and the n-th token's share follows (n + 300)^-1.4, which fits answers
and news in vocabularies of 49,152 and 151,936 tokens within a few hundredths. Answers alone say too
much of themselves: 8,192 tokens counted on 25,000 answers covered hardly more of the same model's
answers to other questions than the first 8,192 ids did. What they lacked was guessed right far less
often than the rest by a draft that had it, so it counts for less than its share.

Shape letters: V vocabulary of the target, C columns (tokens of the draft vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hunch.errors import ConfigError
from hunch.train.texts import Texts

OTHER = 0.25  # share of the tokens a drafter will serve that is unlike the answers it learned from
ENOUGH = 0.955  # share of all tokens, by that estimate, that a draft vocabulary covers by default
_FLAT, _FALLING = 300.0, -1.4  # Mandelbrot's law of words, over ids


@dataclass(frozen=True, slots=True)
class Columns:
    """Column c stands for the target's token ids_C[c]."""

    ids_C: Tensor
    column_V: Tensor  # -1: the token has no column
    coverage: float  # share of the answers' tokens that have one

    def __len__(self) -> int:
        return len(self.ids_C)

    def offsets(self) -> Tensor:
        """The map in published files for sorted columns (d2t): each token's id less its column."""
        return self.ids_C.cpu().sort().values - torch.arange(len(self))

    def to(self, device: torch.device) -> Columns:
        return Columns(self.ids_C.to(device), self.column_V.to(device), self.coverage)


def count_columns(count_V: np.ndarray, size: int | None, num_known: int | None = None) -> Columns:
    """Columns for the `size` most frequent tokens (None: all), from how often each occurs; of the
    first `num_known` alone, where the drafter has no others."""
    vocab_size = len(count_V)
    num_known = vocab_size if num_known is None else num_known
    size = num_known if size is None else size
    if not 2 <= size <= num_known:
        raise ConfigError(f"draft_vocab={size} must be from 2 to the target's {num_known}")
    order = np.argsort(-frequency(count_V)[:num_known], kind="stable")[:size].copy()
    column_V = np.full(vocab_size, -1, dtype=np.int64)
    column_V[order] = np.arange(size)
    coverage = float(count_V[order].sum() / max(count_V.sum(), 1))
    return Columns(torch.from_numpy(order), torch.from_numpy(column_V), coverage)


def frequency(count_V: np.ndarray) -> np.ndarray:
    """The share of each token in what a drafter will serve, from how often answers have it."""
    usual_V = (np.arange(len(count_V)) + _FLAT) ** _FALLING
    counted_V = count_V / max(count_V.sum(), 1)
    return np.asarray((1 - OTHER) * counted_V + OTHER * usual_V / usual_V.sum())


def coverage_of(texts: Texts, vocab_size: int) -> Callable[[int], float]:
    """The share of the tokens a drafter will serve that a draft vocabulary of this size covers:
    counted on half of the texts and tested on the other half, so that few answers do not promise
    too much."""
    halves = [texts.take(np.arange(first, len(texts), 2)).count(vocab_size) for first in (0, 1)]
    order = np.argsort(-frequency(halves[0]), kind="stable")
    share = np.cumsum(frequency(halves[1])[order])
    return lambda size: float(share[min(size, vocab_size) - 1])


def enough_columns(texts: Texts, vocab_size: int) -> int:
    """The size of the smallest draft vocabulary, a power of two, that covers enough tokens."""
    coverage, size = coverage_of(texts, vocab_size), 4096
    while size < vocab_size and coverage(size) < ENOUGH:
        size *= 2
    return min(size, vocab_size)


def columns_of(ids_C: Tensor, vocab_size: int) -> Columns:
    """Columns for given tokens, in their order."""
    column_V = torch.full((vocab_size,), -1)
    column_V[ids_C] = torch.arange(len(ids_C))
    return Columns(ids_C, column_V, float("nan"))
