"""Typical acceptance. LOSSY: it keeps every drafted token that is likely enough, so the text no
longer follows the target's distribution. Opt-in, never a default.

A drafted token is kept if p > min(THRESHOLD, ALPHA exp(-entropy of p)), p being the target's
processed distribution; the longest path of such tokens wins, and the token after it is the target's
own choice. Greedy rows keep only that choice, as in Medusa. Paper: arXiv 2401.10774.

Shape letters: R rows, N nodes, M rows of logits, V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft, Rows, Verdict
from hunch.sampling.state import SamplingState
from hunch.verify.base import Chances, RowDraft, Target, row_drafts, verdict_of

THRESHOLD, ALPHA = 0.09, 0.3  # the paper's


def typical(
    draft: Draft,
    logits_MV: Tensor,
    rows: Rows,
    sampling: SamplingState,
    mask_MV: Tensor | None = None,
) -> Verdict:
    """The verifier of this name."""
    target = Target(logits_MV, sampling, mask_MV)
    walks = [_walk(row, target) for row in row_drafts(draft, rows)]
    return verdict_of([w[0] for w in walks], [w[1] for w in walks], draft.tokens_RN.device)


def _walk(draft: RowDraft, target: Target) -> tuple[list[int], list[int]]:
    nodes = _longest(draft, target, -1, [])
    path = [draft.tokens[node] for node in nodes]
    return [*path, _own_choice(draft, target, nodes[-1] if nodes else -1, path)], [*nodes, -1]


def _longest(draft: RowDraft, target: Target, node: int, path: list[int]) -> list[int]:
    """The longest kept path below a node; of equals, the first in the draft's order."""
    children = draft.children[node + 1]
    if not children:
        return []
    p_V = target.p(draft, node, path)
    least = bar(p_V)
    best: list[int] = []
    for child in children:
        token = draft.tokens[child]
        if p_V[token] > least:
            below = [child, *_longest(draft, target, child, [*path, token])]
            best = below if len(below) > len(best) else best
    return best


def bar(p_V: Chances) -> float:
    """What a token's chance must exceed."""
    chances = p_V[p_V > 0]
    entropy = -float((chances * np.log(chances)).sum())
    return min(THRESHOLD, ALPHA * math.exp(-entropy))


def _own_choice(draft: RowDraft, target: Target, node: int, path: list[int]) -> int:
    """What the target chooses after the path, with its own noise."""
    m, device = draft.first + 1 + node, target.logits_MV.device
    choice = target.sampling.choose(
        target.logits_MV[m : m + 1],
        torch.tensor([draft.row], device=device),
        torch.tensor([draft.known + len(path)], device=device),
        torch.tensor([path], dtype=torch.int64, device=device).view(1, len(path)),
        None if target.mask_MV is None else target.mask_MV[m : m + 1],
    )
    return int(choice[0])
