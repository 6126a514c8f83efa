"""Texts to batches: neighbours in length side by side, in an order that seed and epoch decide.

Shape letters: B texts, L their padded length, N texts of the collection.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray


@dataclass(slots=True)
class Texts:
    """Prompts with answers, one after the other in one array."""

    tokens: Array
    offset: Array  # N + 1 of them
    prompt_len: Array  # leading tokens of each text that are not the target's

    def __len__(self) -> int:
        return len(self.prompt_len)

    @property
    def lengths(self) -> Array:
        return np.diff(self.offset)

    def text(self, index: int) -> Array:
        return np.asarray(self.tokens[self.offset[index] : self.offset[index + 1]])

    def answer(self, index: int) -> Array:
        return self.text(index)[self.prompt_len[index] :]

    def take(self, indices: Array) -> Texts:
        parts = [self.text(int(i)) for i in indices]
        offset = np.cumsum([0, *map(len, parts)])
        tokens = np.concatenate(parts) if parts else self.tokens[:0]
        return Texts(tokens, offset, self.prompt_len[indices])

    def split(self, num_held_out: int, seed: int) -> tuple[Texts, Texts]:
        """The texts to learn from, and a few kept aside."""
        order = np.random.default_rng(seed).permutation(len(self))
        return self.take(np.sort(order[num_held_out:])), self.take(np.sort(order[:num_held_out]))

    def count(self, vocab_size: int) -> Array:
        """How often each token occurs in the answers."""
        first, last = int(self.offset[0]), int(self.offset[-1])
        begins = self.offset[:-1] + self.prompt_len
        is_answer = np.arange(first, last) >= np.repeat(begins, self.lengths)
        counts: Array = np.bincount(self.tokens[first:last][is_answer], minlength=vocab_size)
        return counts


@dataclass(slots=True)
class Batch:
    """Some texts, padded at their ends."""

    ids_BL: Tensor
    length_B: Tensor
    prompt_len_B: Tensor
    index_B: Array  # of its texts in their collection
    host: Batch | None = None  # the same where it was made, for what need not wait for a device

    @property
    def num_tokens(self) -> int:
        """Padding left out."""
        return int((self.host or self).length_B.sum())

    def is_taught_BL(self) -> Tensor:
        """Positions whose next token the target wrote."""
        pos_L = torch.arange(self.ids_BL.shape[1], device=self.ids_BL.device)
        first_B1 = (self.prompt_len_B - 1).clamp(min=0)[:, None]
        return (pos_L >= first_B1) & (pos_L < self.length_B[:, None] - 1)

    def part(self, count: int) -> Batch:
        """The first texts alone."""
        ids_BL, length_B, prompt_len_B, index_B = self._parts()
        return Batch(ids_BL[:count], length_B[:count], prompt_len_B[:count], index_B[:count])

    def to(self, device: torch.device) -> Batch:
        ids_BL, length_B, prompt_len_B, index_B = self._parts()
        ids_BL, length_B, prompt_len_B = (put(x, device) for x in (ids_BL, length_B, prompt_len_B))
        return Batch(ids_BL, length_B, prompt_len_B, index_B, self.host or self)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor, Array]:
        return self.ids_BL, self.length_B, self.prompt_len_B, self.index_B


def put(x: Tensor, device: torch.device) -> Tensor:
    """On the device; nobody waits until it is there, or all that was launched before were done."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.contiguous().pin_memory().to(device, non_blocking=True)


def collate(texts: Texts, indices: Array, multiple: int, context: int) -> Batch:
    parts = [texts.text(int(i))[:context] for i in indices]
    longest = max(map(len, parts))
    longest = -(-longest // multiple) * multiple
    ids_BL = np.zeros((len(parts), longest), dtype=np.int64)
    for row, part in enumerate(parts):
        ids_BL[row, : len(part)] = part
    return Batch(
        torch.from_numpy(ids_BL),
        torch.tensor([len(part) for part in parts]),
        torch.from_numpy(texts.prompt_len[indices].astype(np.int64)),
        np.asarray(indices),
    )


def batches(
    texts: Texts, num_tokens: int, context: int, seed: int, epoch: int, multiple: int = 64
) -> Iterator[Batch]:
    """One pass over the texts, about `num_tokens` a batch, padding counted."""
    rng = np.random.default_rng((seed, epoch))
    lengths = np.minimum(texts.lengths, context)
    # Equal lengths are shuffled among themselves, so that batches differ between epochs.
    order = np.argsort(lengths + rng.uniform(0, multiple, len(lengths)), kind="stable")
    groups: list[Array] = []
    first = 0
    for at in range(len(order)):
        longest = lengths[order[first : at + 1]].max()
        longest = -(-longest // multiple) * multiple
        if at > first and longest * (at + 1 - first) > num_tokens:
            groups.append(order[first:at])
            first = at
    if first < len(order):
        groups.append(order[first:])
    for group in rng.permutation(len(groups)):
        yield collate(texts, groups[int(group)], multiple, context)
