"""Typical acceptance. LOSSY: it keeps every drafted token that is likely enough, so the text no
longer follows the target's distribution. Opt-in, never a default.

A drafted token is kept if p > min(THRESHOLD, ALPHA exp(-entropy of p)), p being the target's
processed distribution; the longest path of such tokens wins, and the token after it is the target's
own choice. Greedy rows keep only that choice, as in Medusa. Paper: arXiv 2401.10774.

Shape letters: V vocabulary.
"""

from __future__ import annotations

import math

import numpy as np

from hunch.verify.base import Chances, RowDraft, TargetChoices, Verifier

THRESHOLD, ALPHA = 0.09, 0.3  # the paper's


def walk(draft: RowDraft, target: TargetChoices) -> tuple[list[int], list[int]]:
    """The tokens to commit, and the node of each."""
    nodes = _longest(draft, target, -1, [])
    path = [draft.tokens[node] for node in nodes]
    return [*path, target.choice(draft, nodes[-1] if nodes else -1, path)], [*nodes, -1]


typical = Verifier(walk)


def _longest(draft: RowDraft, target: TargetChoices, node: int, path: list[int]) -> list[int]:
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
