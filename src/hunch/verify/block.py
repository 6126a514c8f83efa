"""Block: a chain is verified as a whole, which keeps a little more than token by token.

Like `rejection` it follows the target's distribution exactly. With x_i the drafted tokens, p_i and
q_i the distributions of the one after i of them, and w_0 = 1:

    w_i+1 = min(1, w_i p_i(x_i) / q_i(x_i))
    left_i = sum max(w_i p_i - q_i, 0)
    i tokens are kept with chance h_i = left_i / (left_i + 1 - w_i), all of them with h = w

The longest kept prefix wins; the next token comes from max(w_i p_i - q_i, 0), or from p after the
whole chain. Why it is right: given x_1 .. x_i, at least i are kept with chance w_i. (At the end by
definition; before it, more than i are kept with chance sum min(w_i p_i, q_i) = w_i - left_i, and
h_i adds left_i.) So prefix and next token y come together with chance q(x_1 .. x_i) times
[min(w_i p_i(y), q_i(y)) + max(w_i p_i(y) - q_i(y), 0)] = q(x_1 .. x_i) w_i p_i(y), as they should.
Paper: arXiv 2403.10444. A draft that branches is verified by `rejection`'s rule.

Shape letters: K tokens, N nodes, V vocabulary.
"""

from __future__ import annotations

import numpy as np

from hunch.verify.base import Chances, RowDraft, TargetChoices, Verifier
from hunch.verify.rejection import walk as walk_tree


def walk(draft: RowDraft, target: TargetChoices) -> tuple[list[int], list[int]]:
    """The tokens to commit, and the node of each."""
    if not draft.is_chain:
        return walk_tree(draft, target)
    tokens, num_nodes = draft.tokens, len(draft.tokens)
    p_KV = [target.p(draft, node - 1, tokens[:node]) for node in range(num_nodes + 1)]
    q_NV = [_q(draft, node, len(p_KV[0])) for node in range(num_nodes)]
    weight, num_kept, best_weight = 1.0, 0, 1.0
    for node, token in enumerate(tokens):
        p, q = float(p_KV[node][token]), float(q_NV[node][token])
        weight = min(1.0, weight * p / q) if q > 0 else 0.0
        chance = weight
        if node + 1 < num_nodes:
            left = float(left_of(p_KV[node + 1], q_NV[node + 1], weight).sum())
            total = left + 1.0 - weight
            chance = left / total if total > 0 else 1.0
        if target.coin(draft, node) < chance:
            num_kept, best_weight = node + 1, weight
    p_V = p_KV[num_kept]
    if num_kept < num_nodes:
        left_V = left_of(p_V, q_NV[num_kept], best_weight)
        total = float(left_V.sum())
        p_V = left_V / total if total > 0 else p_V  # 0 only because of rounding
    bonus = target.draw(p_V, draft, num_kept)
    return [*tokens[:num_kept], bonus], [*range(num_kept), -1]


block = Verifier(walk, wants_q=True)


def left_of(p_V: Chances, q_V: Chances, weight: float) -> Chances:
    return (weight * p_V - q_V).clip(min=0.0)


def _q(draft: RowDraft, node: int, vocab_size: int) -> Chances:
    q_V = draft.q(node)
    if q_V is None:
        q_V = np.zeros(vocab_size)
        q_V[draft.tokens[node]] = 1.0
    return q_V
