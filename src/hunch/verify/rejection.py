"""Rejection: a drafted token is kept with chance min(1, p/q); else one is drawn from the rest of p.

p is the target's processed distribution at the node before, q what the token was drawn from. The
tokens follow the target's distribution exactly; unlike `exact`'s they are not those of plain
decoding under the same seed. Children of one node are tried in the draft's order: after a rejection
p becomes norm(max(p - q, 0)), and a later sibling was drawn from q without the earlier ones
(recursive rejection without replacement). For a chosen token q is one-hot. When every child is
rejected, or there is none, the token comes from what is left of p.

Why it is right: P(token kept) = q min(1, p/q) = min(p, q), and what is drawn after a rejection adds
max(p - q, 0); the sum is p. Papers: arXiv 2211.17192, 2302.01318; trees: 2402.14160.

Shape letters: V vocabulary.
"""

from __future__ import annotations

from hunch.verify.base import Chances, RowDraft, TargetChoices, Verifier


def walk(draft: RowDraft, target: TargetChoices) -> tuple[list[int], list[int]]:
    """The tokens to commit, and the node of each."""
    path: list[int] = []
    walked: list[int] = []
    node: int | None = -1
    while node is not None:
        p_V = target.p(draft, node, path)
        node, p_V = _try_children(draft, target, node, p_V, len(path))
        path.append(target.draw(p_V, draft, len(path)) if node is None else draft.tokens[node])
        walked.append(-1 if node is None else node)
    return path, walked


rejection = Verifier(walk, wants_q=True)


def _try_children(
    draft: RowDraft, target: TargetChoices, node: int, p_V: Chances, depth: int
) -> tuple[int | None, Chances]:
    """The child that is kept, or None; and what is left of p."""
    tried: list[int] = []
    for number, child in enumerate(draft.children[node + 1]):
        token = draft.tokens[child]
        q_V = without(draft.q(child), tried)
        if target.coin(draft, depth, number) < chance(p_V, q_V, token):
            return child, p_V
        p_V = residual(p_V, q_V, token)
        tried.append(token)
    return None, p_V


def without(q_V: Chances | None, tried: list[int]) -> Chances | None:
    """q without the earlier siblings."""
    if q_V is None:
        return None
    q_V[tried] = 0.0
    total = q_V.sum()
    # If nothing is left to draw from, the sibling was not drawn from q.
    return q_V / total if total > 0 else None


def chance(p_V: Chances, q_V: Chances | None, token: int) -> float:
    """The chance that a drafted token is kept."""
    p, q = float(p_V[token]), 1.0 if q_V is None else float(q_V[token])
    return min(1.0, p / q) if q > 0 else float(p > 0)


def residual(p_V: Chances, q_V: Chances | None, token: int) -> Chances:
    """What is left of p once a token drawn from q was rejected."""
    if q_V is None:
        left_V = p_V.copy()
        left_V[token] = 0.0
    else:
        left_V = (p_V - q_V).clip(min=0.0)
    total = left_V.sum()
    return left_V / total if total > 0 else p_V  # p = q except for rounding
