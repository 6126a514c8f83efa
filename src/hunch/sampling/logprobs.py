"""Log-probabilities of tokens under the target: raw, before any processor, as in vLLM.

The normaliser is an integer sum of mass (see filters), so a value does not depend on the batch.
Ranks count tokens by (logit, then lower id), from 1. Handing in processed logits gives processed
log-probabilities: removed tokens are then left out.

Shape letters: M rows, V vocabulary, C best tokens asked for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hunch.sampling.filters import MASS, Floats, Ids, first_of, mass_of
from hunch.types import Logprob


def log_normaliser(x_MV: Tensor) -> Tensor:
    """log of the sum of exp, float64 [M]."""
    top_M1 = x_MV.amax(dim=1, keepdim=True)
    mass_M = mass_of(x_MV - top_M1).sum(dim=1)
    return top_M1[:, 0].double() + mass_M.double().log() - math.log(MASS)


def best(x_MV: Tensor, count: int) -> Tensor:
    """Ids of the `count` best tokens of each row, ties by id, int64 [M, C]."""
    count = min(count, x_MV.shape[1])
    if x_MV.device.type == "cpu":
        return torch.from_numpy(np.stack([_best_row(x_V, count) for x_V in x_MV.numpy()]))
    return best_dense(x_MV, count)


def best_dense(x_MV: Tensor, count: int) -> Tensor:
    """The same in tensors, for any device."""
    # topk leaves open which of equals it takes, so it only finds the edge value here.
    edge_M1 = x_MV.topk(count, dim=1).values[:, -1:]
    rank_MV = torch.where(x_MV > edge_M1, 0, torch.where(x_MV == edge_M1, 1, 2)).to(torch.int8)
    near_MC = rank_MV.sort(dim=1, stable=True).indices[:, :count]
    order_MC = x_MV.gather(1, near_MC).sort(dim=1, descending=True, stable=True).indices
    return near_MC.gather(1, order_MC)


def _best_row(x_V: Floats, count: int) -> Ids:
    ids = first_of(x_V, np.arange(len(x_V)), count)
    ranked: Ids = ids[np.argsort(-x_V[ids], kind="stable")]
    return ranked


def logprobs_at(
    logits_MV: Tensor, tokens: Sequence[int], num_best: int
) -> list[dict[int, Logprob]]:
    """For each row its token's entry first, then those of the `num_best` best tokens.

    Prompt log-probabilities are the same thing: logits at a position, and the token after it.
    """
    x_MV = logits_MV.float()
    norm_M1 = log_normaliser(x_MV)[:, None]
    token_M1 = torch.tensor(tokens, device=x_MV.device)[:, None]
    own_M1 = x_MV.gather(1, token_M1)
    ids_V = torch.arange(x_MV.shape[1], device=x_MV.device)
    is_before_MV = (x_MV > own_M1) | ((x_MV == own_M1) & (ids_V < token_M1))
    rank_M = (is_before_MV.sum(dim=1) + 1).tolist()
    own_M = (own_M1 - norm_M1).float()[:, 0].tolist()
    rows = [
        {token: Logprob(logprob=own, rank=rank)}
        for token, own, rank in zip(tokens, own_M, rank_M, strict=True)
    ]
    if num_best:
        best_MC = best(x_MV, num_best)
        value_MC = (x_MV.gather(1, best_MC) - norm_M1).float()
        for entries, ids, values in zip(rows, best_MC.tolist(), value_MC.tolist(), strict=True):
            for rank, (token, value) in enumerate(zip(ids, values, strict=True), start=1):
                if value > -math.inf:  # removed tokens have no chance to speak of
                    entries.setdefault(token, Logprob(logprob=value, rank=rank))
    return rows
