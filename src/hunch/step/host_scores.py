"""Log-probabilities and pooled states: of prompts, and of tokens decided in steps by the host.

Shape letters: T packed tokens, M rows of logits, K tokens decided for a row, P longest path,
D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from hunch.pooling import POOL_SCALE
from hunch.sampling.logprobs import entries, logprobs_of, scores_of
from hunch.step.batch import RowPart
from hunch.step.parts import Outcome, RunnerParts
from hunch.types import RowResult


class HostScores:
    """Adds scores and states to the results of a step."""

    def __init__(self, parts: RunnerParts) -> None:
        self.target, self.rows, self.sampling = parts.target, parts.rows, parts.sampling
        self.scores_processed = parts.scores_processed

    def of_decided(self, checked: list[Outcome], logits_MV: Tensor, mask_MV: Tensor | None) -> None:
        """Log-probabilities of the decided tokens; rows that want as many go together."""
        same: dict[int, list[tuple[Outcome, list[int]]]] = {}
        first = 0
        for outcome in checked:
            request = self.rows.requests[outcome.part.row]
            assert request is not None
            num_best = request.params.logprobs
            if num_best is not None:
                at = [first, *(first + 1 + node for node in outcome.accepted)]
                if self.scores_processed:
                    mask_KV = None if mask_MV is None else mask_MV[at]
                    tokens = outcome.result.tokens
                    logits_KV = self._process(outcome.part, logits_MV[at], tokens, mask_KV)
                    outcome.result.logprobs = logprobs_of(logits_KV, tokens, num_best)
                else:
                    same.setdefault(num_best, []).append((outcome, at))
            first += 1 + outcome.part.num_nodes
        for num_best, asked in same.items():
            places = [place for _, at in asked for place in at]
            tokens = [token for outcome, _ in asked for token in outcome.result.tokens]
            scores = iter(logprobs_of(logits_MV, tokens, num_best, places))
            for outcome, at in asked:
                outcome.result.logprobs = list(islice(scores, len(at)))

    def _process(
        self, part: RowPart, logits_KV: Tensor, tokens: list[int], mask_KV: Tensor | None
    ) -> Tensor:
        """The processed logits that tokens were chosen by, each with those before it as history."""
        count, device = len(tokens), logits_KV.device
        path = [tokens[:k] + [-1] * (count - k) for k in range(count)]
        pos_K = part.start + part.num_known + torch.arange(count, device=device)
        row_K = torch.full((count,), part.row, device=device)
        path_KP = torch.tensor(path, device=device)
        return self.sampling.process(logits_KV, row_K, pos_K, path_KP, mask_KV)

    def of_prompts(self, last_TD: Tensor, parts: list[RowPart]) -> PromptScores:
        """Launch the scores and states that requests ask for of their prompts, without waiting."""
        found = PromptScores()
        for part in parts:
            request = self.rows.requests[part.row]
            assert request is not None
            num_best, pooling = request.params.prompt_logprobs, request.params.pooling
            if num_best is not None:
                following = request.prompt_ids[part.start + 1 : part.start + part.num_known + 1]
                state_MD = last_TD[part.first : part.first + len(following)]
                found.logprobs[part.row] = list(self._scores(state_MD, following, num_best))
            num_left = len(request.prompt_ids) - part.start
            if pooling is not None and num_left > 0:
                state_TD = last_TD[part.first : part.first + min(part.num_known, num_left)].double()
                if pooling == "mean":
                    sum_D = (state_TD * POOL_SCALE).round().long().sum(0)
                    found.pooled[part.row] = to_host(sum_D)
                elif part.num_known >= num_left:
                    found.pooled[part.row] = to_host(state_TD[-1])
        found.note_end(last_TD.device)
        return found

    def _scores(
        self, state_MD: Tensor, following: Sequence[int], num_best: int
    ) -> Iterator[tuple[Tensor, ...]]:
        """Scores of the tokens that follow these states."""
        token_M = to_device(torch.tensor(following, dtype=torch.int64), state_MD.device)
        for first in range(0, len(following), 64):  # whole prompts of logits would not fit
            here = slice(first, first + 64)
            logits_MV = self.target.logits(state_MD[here])
            yield tuple(map(to_host, scores_of(logits_MV, token_M[here], num_best)))


@dataclass(slots=True)
class PromptScores:
    """By row: scores of prompt tokens and pooled states, in the host's memory once computed."""

    logprobs: dict[int, list[tuple[Tensor, ...]]] = field(default_factory=dict)
    pooled: dict[int, Tensor] = field(default_factory=dict)
    _end: torch.cuda.Event | None = None  # when the device is done with them

    def __bool__(self) -> bool:
        return bool(self.logprobs or self.pooled)

    def note_end(self, device: torch.device) -> None:
        """All of them were launched."""
        if self and device.type == "cuda":
            self._end = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._end.record()

    def add_to(self, results: Mapping[int, RowResult]) -> None:
        """Wait for them, and add them to the results of rows."""
        if self._end is not None:
            self._end.synchronize()
        for row, some in self.logprobs.items():
            results[row].prompt_logprobs = [
                entry for one in some for entry in entries(*(part.tolist() for part in one))
            ]
        for row, state_D in self.pooled.items():
            results[row].pooled = state_D.tolist()


def to_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, filled once the device gets there."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, made without waiting for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
