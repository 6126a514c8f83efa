"""The draft vocabulary: the tokens a drafter may guess, most frequent first.

Shape letters: V vocabulary of the target, C columns (tokens of the draft vocabulary).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hunch.errors import ConfigError
from hunch.train.batches import Texts


@dataclass(frozen=True, slots=True)
class Columns:
    """Column c stands for the target's token ids_C[c]."""

    ids_C: Tensor
    column_V: Tensor  # -1: the token has no column
    coverage: float  # share of the answers' tokens that have one

    def __len__(self) -> int:
        return len(self.ids_C)

    def first(self, count: int) -> Columns:
        """The most frequent ones alone."""
        column_V = torch.where(self.column_V < count, self.column_V, -1)
        return Columns(self.ids_C[:count], column_V, float("nan"))

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
    order = np.argsort(-count_V[:num_known], kind="stable")[:size].copy()
    column_V = np.full(vocab_size, -1, dtype=np.int64)
    column_V[order] = np.arange(size)
    coverage = float(count_V[order].sum() / max(count_V.sum(), 1))
    return Columns(torch.from_numpy(order), torch.from_numpy(column_V), coverage)


def coverage_of(texts: Texts, vocab_size: int) -> Callable[[int], float]:
    """How much of answers a draft vocabulary of a size covers: counted on half of the texts, looked
    for in the other half, so that few answers do not promise too much."""
    halves = [texts.take(np.arange(first, len(texts), 2)).count(vocab_size) for first in (0, 1)]
    order = np.argsort(-halves[0], kind="stable")
    share = np.cumsum(halves[1][order]) / max(halves[1].sum(), 1)
    return lambda size: float(share[min(size, vocab_size) - 1])


def enough_columns(texts: Texts, vocab_size: int, share: float = 0.985) -> int:
    """The smallest draft vocabulary, a power of two, that covers this share of the answers."""
    coverage, size = coverage_of(texts, vocab_size), 4096
    while size < vocab_size and coverage(size) < share:
        size *= 2
    return min(size, vocab_size)


def columns_of(ids_C: Tensor, vocab_size: int) -> Columns:
    """Columns for given tokens, in their order."""
    column_V = torch.full((vocab_size,), -1)
    column_V[ids_C] = torch.arange(len(ids_C))
    return Columns(ids_C, column_V, float("nan"))
