"""Log-probabilities of tokens under the target: raw, before any processor, as in vLLM.

The normaliser is an integer sum of mass in units of 2**-40 of the best token's, from exponentials
in float64: a value does not depend on the batch, and from device to device its float32 differs by
at most the last bit. Ranks count tokens by (logit, then lower id), from 1. Handing in processed
logits gives processed log-probabilities: removed tokens are then left out.

Shape letters: M rows, V vocabulary, C the asked token and the best ones, E numbers of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, count

import torch
from torch import Tensor

from hunch.kernels.native_library import is_available
from hunch.kernels.native_sampling import scores as native_scores
from hunch.sampling.filters import MASS
from hunch.types import Logprob


def log_normaliser(x_MV: Tensor) -> Tensor:
    """log of the sum of exp, float64 [M]."""
    top_M1 = x_MV.amax(dim=1, keepdim=True)
    gap_MV = torch.where(x_MV == top_M1, 0.0, x_MV.double() - top_M1.double())
    mass_M = (gap_MV.exp_() * MASS).long().sum(dim=1)
    return top_M1[:, 0].double() + (mass_M.double() / MASS).log()


def best(x_MV: Tensor, count: int) -> Tensor:
    """Ids of the `count` best tokens of each row, ties by id, int64 [M, count]."""
    # topk may take any of equals, so that it only gives the edge value here.
    edge_M1 = x_MV.topk(count, dim=1).values[:, -1:]
    rank_MV = torch.where(x_MV > edge_M1, 0, torch.where(x_MV == edge_M1, 1, 2)).to(torch.int8)
    near_MC = rank_MV.sort(dim=1, stable=True).indices[:, :count]
    order_MC = x_MV.gather(1, near_MC).sort(dim=1, descending=True, stable=True).indices
    return near_MC.gather(1, order_MC)


def scores_ref(x_MV: Tensor, token_M: Tensor, num_best: int) -> tuple[Tensor, Tensor, Tensor]:
    """Per row the ids of the token and the best ones, their log-probabilities, the token's rank."""
    own_M1 = x_MV.gather(1, token_M[:, None])
    ids_V = torch.arange(x_MV.shape[1], device=x_MV.device)
    is_before_MV = (x_MV > own_M1) | ((x_MV == own_M1) & (ids_V < token_M[:, None]))
    ids_MC = token_M[:, None]
    if num_best:
        ids_MC = torch.cat([ids_MC, best(x_MV, min(num_best, x_MV.shape[1]))], dim=1)
    x_MC = x_MV.gather(1, ids_MC)
    gap_MC = (x_MC.double() - log_normaliser(x_MV)[:, None]).float()
    return ids_MC, torch.where(x_MC == -math.inf, x_MC, gap_MC), is_before_MV.sum(dim=1) + 1


def entries(
    ids: list[list[int]], values: list[list[float]], ranks: list[int]
) -> list[dict[int, Logprob]]:
    """Scores as requests get them: the token's entry first, then those of the best tokens.

    Removed tokens are left out, unless one is the token itself.
    """
    rows = []
    for tokens, some, rank in zip(ids, values, ranks, strict=True):
        if some[-1] == -math.inf:  # the best come first, removed ones last
            own, *best = some
            some = [own, *(value for value in best if value > -math.inf)]
            tokens = tokens[: len(some)]
        # If the token is also among the best, its entry stays first.
        rows.append(dict(zip(tokens, map(Logprob, some, chain((rank,), count(1))), strict=True)))
    return rows


def logprobs_of(
    logits_MV: Tensor,
    tokens: Sequence[int],
    num_best: int,
    at: Sequence[int] | None = None,  # the row of each token; None: all rows in order
) -> list[dict[int, Logprob]]:
    """For each token its entry first, then those of the `num_best` best tokens.

    Prompt log-probabilities are the same thing: logits at a position, and the token after it.
    """
    at = range(len(tokens)) if at is None else at
    if logits_MV.device.type == "cpu" and is_available():
        found = _scores_cpu(logits_MV, at, tokens, num_best)
    else:
        token_M = torch.tensor(tokens, device=logits_MV.device)
        found = scores_of(logits_MV[list(at)], token_M, num_best)
    return entries(*(part.tolist() for part in found))


def scores_of(logits_MV: Tensor, token_M: Tensor, num_best: int) -> tuple[Tensor, Tensor, Tensor]:
    """`scores_ref`, bit for bit, by kernels where there are some; nobody waits for a device."""
    if logits_MV.device.type == "cpu" and is_available():
        return _scores_cpu(logits_MV, range(len(token_M)), token_M.tolist(), num_best)
    score = _scores_gpu if logits_MV.device.type == "cuda" else scores_ref
    return score(logits_MV.float(), token_M, min(num_best, logits_MV.shape[1]))


def _scores_cpu(
    logits_MV: Tensor, at: Sequence[int], tokens: Sequence[int], num_best: int
) -> tuple[Tensor, Tensor, Tensor]:
    x_MV, num_best = logits_MV.float(), min(num_best, logits_MV.shape[1])
    return native_scores(x_MV if x_MV.stride(1) == 1 else x_MV.contiguous(), at, tokens, num_best)


def _scores_gpu(x_MV: Tensor, token_M: Tensor, num_best: int) -> tuple[Tensor, Tensor, Tensor]:
    """The scores, bit for bit, by the kernels that captured steps use."""
    from hunch.kernels.gpu_scores import read_scores, scores

    num_rows = len(x_MV)
    line_M1E = token_M.new_empty(num_rows, 1, 1 + 2 * (1 + num_best))
    at_M = torch.arange(num_rows, device=x_MV.device)
    scores(x_MV.contiguous(), at_M, token_M, num_best, line_M1E)
    return read_scores(line_M1E[:, 0])
