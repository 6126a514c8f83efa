"""Log-probabilities and pooled states that requests ask for, in a step run by the host.

Shape letters: T packed tokens, M rows of logits, K tokens decided for a row, P longest path,
D model width, V vocabulary.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from hunch.pooling import POOL_SCALE
from hunch.sampling.logprobs import logprobs_at, logprobs_of
from hunch.step.batch import RowPart
from hunch.step.parts import Outcome, RunnerParts
from hunch.types import Logprob


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
                    outcome.result.logprobs = logprobs_at(logits_KV, tokens, num_best)
                else:
                    same.setdefault(num_best, []).append((outcome, at))
            first += 1 + outcome.part.num_nodes
        for num_best, asked in same.items():
            places = [place for _, at in asked for place in at]
            tokens = [token for outcome, _ in asked for token in outcome.result.tokens]
            scores = iter(logprobs_of(logits_MV, places, tokens, num_best))
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

    def of_prompts(self, last_TD: Tensor, outcomes: list[Outcome]) -> None:
        """Log-probabilities of the prompt tokens that follow those processed."""
        for outcome in outcomes:
            part, request = outcome.part, self.rows.requests[outcome.part.row]
            assert request is not None
            if request.params.prompt_logprobs is None:
                continue
            following = request.prompt_ids[part.start + 1 : part.start + part.num_known + 1]
            scores: list[dict[int, Logprob]] = []
            for first in range(0, len(following), 64):  # whole prompts of logits would not fit
                chunk = following[first : first + 64]
                hidden_MD = last_TD[part.first + first : part.first + first + len(chunk)]
                logits_MV = self.target.logits(hidden_MD)
                scores += logprobs_at(logits_MV, chunk, request.params.prompt_logprobs)
            outcome.result.prompt_logprobs = scores

    def pool(self, last_TD: Tensor, outcomes: list[Outcome]) -> None:
        """States for embeddings: a prompt's last one, or the sum of those in this step."""
        for outcome in outcomes:
            part, request = outcome.part, self.rows.requests[outcome.part.row]
            assert request is not None
            pooling, num_left = request.params.pooling, len(request.prompt_ids) - part.start
            if pooling is None or num_left <= 0:
                continue
            state_TD = last_TD[part.first : part.first + min(part.num_known, num_left)].double()
            if pooling == "mean":
                outcome.result.pooled = (state_TD * POOL_SCALE).round().long().sum(0).tolist()
            elif part.num_known >= num_left:
                outcome.result.pooled = state_TD[-1].tolist()
