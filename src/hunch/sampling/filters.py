"""min-p, top-k and top-p: which tokens may be drawn.

The order is vLLM's: temperature, min-p, top-k, top-p, each over the tokens that are left. Tokens
rank by score, then by lower id. Probability mass is counted in whole units of 2**-40 of the best
token's. Integer sums do not depend on order, so neither the batch, the device nor the way a kernel
splits a row can move the edge of top-p.

Shape letters: M rows, V vocabulary, K kept tokens.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MASS = 2.0**40
DEPTHS = (-3.0, -7.0, -14.0, -28.0, -math.inf)  # at -28 a token has no whole unit of mass

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


def mass_of(gap: Tensor) -> Tensor:
    """Probability mass of tokens `gap` (<= 0) away from the best one, in whole units."""
    return (gap.exp() * MASS).long()


def filter_ref(z_MV: Tensor, top_k_M: Tensor, top_p_M: Tensor, log_min_p_M: Tensor) -> Tensor:
    """The specification, for any device: z with -inf for the tokens removed."""
    ranked_MV, id_MV = z_MV.sort(dim=1, descending=True, stable=True)
    gap_MV = ranked_MV - ranked_MV[:, :1]
    rank_V = torch.arange(z_MV.shape[1], device=z_MV.device)
    keep_MV = gap_MV >= log_min_p_M[:, None]
    keep_MV &= (rank_V < top_k_M[:, None]) | (top_k_M[:, None] == 0)
    mass_MV = torch.where(keep_MV, mass_of(gap_MV), 0)
    upto_MV = mass_MV.cumsum(1)
    limit_M1 = top_p_M[:, None] * upto_MV[:, -1:].double()
    inside_MV = (upto_MV - mass_MV).double() < limit_M1
    keep_MV &= inside_MV | (top_p_M[:, None] >= 1.0)
    keep_MV[:, 0] = True  # a row always keeps its best token
    removed_MV = torch.empty_like(keep_MV).scatter_(1, id_MV, ~keep_MV)
    return z_MV.masked_fill(removed_MV, -torch.inf)


def keep(z_V: Floats, top_k: int, top_p: float, log_min_p: float) -> Ids:
    """The ids `filter_ref` keeps of one row, ascending, without sorting the vocabulary."""
    top = z_V.max()
    if top == -math.inf:  # nothing is allowed: as argmax would choose
        return np.array([int(z_V.argmax())])
    gap_V = z_V - top
    limit = math.inf
    if top_p < 1.0 and not top_k:
        mass_V = mass_of(torch.from_numpy(gap_V)).numpy()
        is_all = log_min_p == -math.inf
        limit = top_p * float(mass_V.sum() if is_all else mass_V[gap_V >= log_min_p].sum())
    for depth in DEPTHS:  # kept tokens are mostly near the top: look there first
        ids = np.flatnonzero(gap_V >= max(depth, log_min_p))
        if depth <= log_min_p or 0 < top_k <= len(ids):
            break
        if limit < math.inf and float(mass_V[ids].sum()) >= limit:
            break
    if top_k:
        ids = first_of(gap_V, ids, top_k)
    if top_p < 1.0:
        ids = _nucleus(gap_V, ids, top_p, limit)
    # An undefined row (nothing is allowed) falls back to what argmax would choose.
    return ids if len(ids) else np.array([int(z_V.argmax())])


def first_of(gap_V: Floats, ids: Ids, count: int) -> Ids:
    """The `count` best of ascending `ids`, ascending; of equals, the lower ids."""
    gaps = gap_V[ids]
    if len(gaps) <= count:
        return ids
    edge = np.partition(gaps, len(gaps) - count)[len(gaps) - count]
    above = gaps > edge
    at_edge = np.flatnonzero(gaps == edge)[: count - int(above.sum())]
    above[at_edge] = True
    kept: Ids = ids[above]
    return kept


def _nucleus(gap_V: Floats, ids: Ids, top_p: float, limit: float) -> Ids:
    """The `ids` with less than `limit` mass before them (inf: top_p of their own mass)."""
    ids = ids[np.argsort(-gap_V[ids], kind="stable")]
    mass = mass_of(torch.from_numpy(gap_V[ids])).numpy()
    upto = mass.cumsum()
    if limit == math.inf and len(ids):
        limit = top_p * float(upto[-1])
    return np.sort(ids[upto - mass < limit])
