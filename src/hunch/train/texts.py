"""Prompts with answers, as training reads them.

Shape letters: N texts of the collection.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

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

    def to_bytes(self, **more: Any) -> bytes:
        """The texts as bytes, for a file or another process."""
        data, tokens = io.BytesIO(), self.tokens.astype(np.uint32)
        np.savez(data, tokens=tokens, offset=self.offset, prompt_len=self.prompt_len, **more)
        return data.getvalue()

    @staticmethod
    def from_bytes(data: bytes) -> tuple[Texts, dict[str, Array]]:
        """The texts, and what else was written with them."""
        with np.load(io.BytesIO(data)) as stored:
            more = dict(stored)
        tokens, offset, prompt_len = (more.pop(key) for key in ("tokens", "offset", "prompt_len"))
        return Texts(tokens.astype(np.int64), offset, prompt_len), more

    def split(self, num_held_out: int, seed: int) -> tuple[Texts, Texts]:
        """The texts to learn from, and a few kept aside."""
        order = np.random.default_rng(seed).permutation(len(self))
        return self.take(np.sort(order[num_held_out:])), self.take(np.sort(order[:num_held_out]))

    def hold_out(self, most: int, seed: int) -> tuple[Texts, Texts]:
        """The same with a tenth kept aside, or `most` texts."""
        return self.split(min(max(len(self) // 10, 1), most), seed)

    def count(self, vocab_size: int) -> Array:
        """How often each token occurs in the answers."""
        first, last = int(self.offset[0]), int(self.offset[-1])
        begins = self.offset[:-1] + self.prompt_len
        is_answer = np.arange(first, last) >= np.repeat(begins, self.lengths)
        counts: Array = np.bincount(self.tokens[first:last][is_answer], minlength=vocab_size)
        return counts


def put(x: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for what was launched before."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.contiguous().pin_memory().to(device, non_blocking=True)
