"""Building drafts: guesses with chances become trees."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft
from hunch.drafting.policy import share_nodes

if TYPE_CHECKING:
    from hunch.drafting.base import DrafterContext

S = TypeVar("S")


class Node(NamedTuple):
    """A guess: `chance` is that of the whole path to it."""

    token: int
    parent: int  # index in the same list; -1: the row's last token
    chance: float
    guess_type: int = 0  # by which a method learns chances


def best_first(
    root: S,
    expand: Callable[[S], Iterable[tuple[int, float, int, S]]],
    max_nodes: int,
    min_chance: float = 0.0,
) -> list[Node]:
    """The likeliest nodes of a tree, likeliest first (so parents come before children).

    `expand(state)` yields (token, chance given the parent, guess type, state of the child).
    """
    nodes: list[Node] = []
    heap: list[tuple[float, int, int, int, int, S]] = []
    serial = 0

    def push(parent: int, chance: float, state: S) -> None:
        nonlocal serial
        for token, conditional, guess_type, child in expand(state):
            if chance * conditional > min_chance:
                heapq.heappush(
                    heap, (-chance * conditional, serial, token, parent, guess_type, child)
                )
                serial += 1

    push(-1, 1.0, root)
    while heap and len(nodes) < max_nodes:
        negative, _, token, parent, guess_type, state = heapq.heappop(heap)
        nodes.append(Node(token, parent, -negative, guess_type))
        if len(nodes) < max_nodes:
            push(len(nodes) - 1, -negative, state)
    return nodes


def by_rank(shares: Sequence[float], decay: float, depth: int, max_nodes: int) -> list[Node]:
    """The likeliest nodes of a tree before anything is known; a node's token is its rank.

    shares: the chance of each rank at the first level. From level to level it falls by `decay`.
    """

    def expand(level: int) -> Iterable[tuple[int, float, int, int]]:
        ranks = enumerate(shares if level < depth else ())
        return [(rank, share * decay**level, 0, level + 1) for rank, share in ranks]

    return best_first(0, expand, max_nodes)


def likeliest(tree: list[Node], limit: int) -> list[Node]:
    """The `limit` likeliest nodes, likeliest first; of equals the one nearer to the root."""
    order = sorted(range(len(tree)), key=lambda n: (-tree[n].chance, n))[:limit]
    number = {old: new for new, old in enumerate(order)} | {-1: -1}
    return [tree[old]._replace(parent=number[tree[old].parent]) for old in order]


@lru_cache(maxsize=8)
def _nothing(num_rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The columns of an empty draft; shared, as a draft's tensors are never written to."""
    draft = Draft.empty(num_rows, device)
    return draft.tokens_RN, draft.parents_RN, draft.num_nodes_R


def draft_of(
    trees: list[list[Node]],
    limits: list[int],
    context: DrafterContext,
    *,
    margin: float = 0.0,  # share by which drafting must beat plain decoding
    is_adaptive: bool,
) -> Draft:
    """A draft of the first nodes of each row: as many as pay; not adaptive: as limits allow."""
    counts = [min(len(tree), limit) for tree, limit in zip(trees, limits, strict=True)]
    if is_adaptive:
        chances = [[node.chance for node in tree] for tree in trees]
        counts = share_nodes(chances, limits, context.cost, margin)
    return to_draft(trees, counts, context.device)


def to_draft(trees: list[list[Node]], counts: list[int], device: torch.device | str) -> Draft:
    """A draft of the first `counts` nodes of each row's list."""
    width = max(counts, default=0)
    if not width:
        return Draft(*_nothing(len(trees), torch.device(device)))
    tokens_RN = np.zeros((len(trees), width), np.int64)
    parents_RN = np.zeros((len(trees), width), np.int64)
    for row, (tree, count) in enumerate(zip(trees, counts, strict=True)):
        if count:
            tokens, parents, _, _ = zip(*tree[:count], strict=True)
            tokens_RN[row, :count] = tokens
            parents_RN[row, :count] = parents
    draft = Draft(
        torch.from_numpy(tokens_RN),
        torch.from_numpy(parents_RN),
        torch.from_numpy(np.array(counts)),
    )
    return draft.to(torch.device(device))


class ReusedDraft:
    """The draft of one row with so many nodes, a chain at first; it is overwritten each time."""

    def __init__(self, num_nodes: int) -> None:
        self.tokens_N, self.parents_N = np.zeros(num_nodes, np.int64), np.arange(-1, num_nodes - 1)
        self.address: int = self.tokens_N.ctypes.data  # of the tokens
        self.draft = Draft(
            torch.from_numpy(self.tokens_N)[None],
            torch.from_numpy(self.parents_N)[None],
            torch.tensor([num_nodes]),
            arrays=((self.tokens_N, self.parents_N),) if num_nodes else None,
        )


def nodes_of(draft: Draft) -> list[tuple[list[int], list[int]]]:
    """The tokens and parents of each row's nodes."""
    lines = zip(draft.tokens_RN.tolist(), draft.parents_RN.tolist(), strict=True)
    pairs = zip(lines, draft.num_nodes_R.tolist(), strict=True)
    return [(tokens[:count], parents[:count]) for (tokens, parents), count in pairs]


def accepted_path(
    tokens: Sequence[int], parents: Sequence[int], decided: Sequence[int]
) -> list[int]:
    """The nodes of a draft that the target's tokens follow, from the root on."""
    nodes = {guess: node for node, guess in enumerate(zip(parents, tokens, strict=True))}
    path: list[int] = []
    for token in decided:
        node = nodes.get((path[-1] if path else -1, token))
        if node is None:
            break
        path.append(node)
    return path


def side_by_side(num_rows: int, drafts: Sequence[tuple[list[int], Draft]]) -> Draft:
    """Drafts of different rows as one; nodes that were not drawn have no q."""
    device = drafts[0][1].tokens_RN.device
    width = max(draft.tokens_RN.shape[1] for _, draft in drafts)
    tokens_RN = torch.zeros(num_rows, width, dtype=torch.int64, device=device)
    merged = Draft(tokens_RN, tokens_RN.clone(), tokens_RN.new_zeros(num_rows))
    for places, draft in drafts:
        size = draft.tokens_RN.shape[1]
        merged.tokens_RN[places, :size] = draft.tokens_RN
        merged.parents_RN[places, :size] = draft.parents_RN
        merged.num_nodes_R[places] = draft.num_nodes_R
        if draft.q_RNV is not None and draft.is_sampled_RN is not None:
            merged.q_RNV = draft.q_RNV.new_zeros(num_rows, width, draft.q_RNV.shape[2])
            merged.q_RNV[places, :size] = draft.q_RNV
            merged.is_sampled_RN = draft.is_sampled_RN.new_zeros(num_rows, width)
            merged.is_sampled_RN[places, :size] = draft.is_sampled_RN
    return merged
