"""Recent answers of all requests, in which rows look up what may come next.

They stand one after the other in a ring, each followed by -1; the oldest are written over. As the
token after the newest one's end is -1 too, no match and no guess crosses the ring's seam.

`recall_ref` is the specification of `gpu_recall`.

Shape letters: X rows of the engine, R rows of the step, K places of the ring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hunch.kernels import step as at
from hunch.kernels.draft import write_chain, write_guesses
from hunch.kernels.lookup import MAX_MATCH
from hunch.kernels.step import MATCHED, RowState, StepRows, live_rows

END = -1  # after each answer, and in places that are empty


@dataclass(slots=True)
class SharedTexts:
    """The ring, where the steps run."""

    tokens_K: Tensor  # int32
    first_1: Tensor  # the oldest place, which is written next

    @staticmethod
    def create(num_places: int, device: torch.device | str) -> SharedTexts:
        tokens_K = torch.full((num_places,), END, dtype=torch.int32, device=device)
        return SharedTexts(tokens_K, torch.zeros(1, dtype=torch.int64, device=device))

    def add(self, answer: list[int], first: int) -> int:
        """Put an answer at place `first`, which is the oldest; returns the place that is now."""
        size = len(self.tokens_K)
        kept = torch.tensor([*answer[-size + 1 :], END], dtype=torch.int32)
        before_seam = min(len(kept), size - first)
        self.tokens_K[first : first + before_seam] = kept[:before_seam].to(self.tokens_K.device)
        rest = kept[before_seam:]
        self.tokens_K[: len(rest)] = rest.to(self.tokens_K.device)
        first = (first + len(kept)) % size
        self.first_1.fill_(first)
        return first

    def clear(self) -> None:
        self.tokens_K.fill_(END)


def recall_ref(state: RowState, step: StepRows, num_nodes: int, texts: SharedTexts) -> None:
    """Draft what followed in another answer, if that matches more of a row's end than its own text.

    Among matches of one length the most recent counts. Rows whose requests name a method keep
    their drafts.
    """
    size, first = len(texts.tokens_K), int(texts.first_1)
    ring: list[int] = texts.tokens_K.roll(-first).tolist()  # the oldest first
    for r, row in live_rows(state, step):
        if step.methods is not None and step.methods.settings_XW[row, at.SURE] != at.AS_OTHERS:
            continue
        known = int(state.known_X[row])
        tail: list[int] = state.tokens_XL[row, max(known - MAX_MATCH, 0) : known].tolist()
        best, found = int(step.result_RC[r, MATCHED]), 0
        for place in range(1, size):  # the token there follows the match
            most, length = min(len(tail), place), 0
            while length < most and ring[place - 1 - length] == tail[-1 - length]:
                length += 1
            if ring[place] != END and length >= best + (not found):
                best, found = length, place
        if not found:
            continue
        guesses = ring[found : found + num_nodes]
        guesses = guesses[: guesses.index(END)] if END in guesses else guesses
        step.result_RC[r, MATCHED] = best
        write_guesses(step, r, guesses, num_nodes)
        write_chain(state, step, r, guesses)
