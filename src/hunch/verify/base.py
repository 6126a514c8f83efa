"""What a verifier is, and where each row of logits stands in its draft.

Logits are packed row after row: the root's (after the row's last known token), then one for each
node in the draft's order. Verdicts are in that order too.

Verifiers that weigh chances walk row by row on the host: `row_drafts`, `Target`, `verdict_of`.

Shape letters: R rows of the step, N nodes of a draft, M rows of logits, V vocabulary, P longest
path, K tokens one step can commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hunch.draft import Draft, Rows, Verdict
from hunch.kernels.noise import COIN, LOW, RESIDUAL, gumbel_row, philox_ref, stream_at
from hunch.sampling.state import SamplingState

Chances = npt.NDArray[np.float64]  # over the vocabulary, summing to 1


class Verify(Protocol):
    """A pure function: the draft, the target's logits, the rows' history -> what to commit."""

    def __call__(
        self,
        draft: Draft,
        logits_MV: Tensor,
        rows: Rows,
        sampling: SamplingState,
        mask_MV: Tensor | None = None,  # False where a grammar forbids a token
    ) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class Verifier:
    """A function that verifies, and what a runner should know of it.

    wants_q: it weighs what nodes were drawn from. Drafters then draw with noise of their own, not
    with the target's, and say what they drew from.
    """

    verify: Verify
    wants_q: bool = False
    # Tokens and nodes of one row, where everything is on the host: no tensors in between.
    walk_row: Callable[..., tuple[list[int], list[int]]] | None = None

    def __call__(
        self,
        draft: Draft,
        logits_MV: Tensor,
        rows: Rows,
        sampling: SamplingState,
        mask_MV: Tensor | None = None,
    ) -> Verdict:
        return self.verify(draft, logits_MV, rows, sampling, mask_MV)


def wants_q(verify: Verify) -> Verifier:
    """A verifier that weighs what nodes were drawn from."""
    return Verifier(verify, wants_q=True)


@dataclass(slots=True)
class History:
    """For each row of logits: whose it is, which position it decides, what was drafted before."""

    first_R: Tensor  # where a row's root stands in M
    row_M: Tensor
    pos_M: Tensor
    path_MP: Tensor  # drafted tokens from the root to the node, the node included; then -1


def first_of(draft: Draft) -> Tensor:
    """Where each row's root stands in M."""
    sizes_R = draft.num_nodes_R + 1
    return sizes_R.cumsum(0) - sizes_R


def paths(draft: Draft) -> tuple[Tensor, Tensor]:
    """Depth of each node (1 below the root), and the tokens on its path; no word from the host."""
    num_rows, num_nodes = draft.tokens_RN.shape
    device = draft.tokens_RN.device
    depth_RN = torch.ones((num_rows, num_nodes), dtype=torch.int64, device=device)
    path_RNP = torch.full((num_rows, num_nodes, num_nodes), -1, device=device)
    each_R = torch.arange(num_rows, device=device)
    for node in range(num_nodes):  # a parent stands before its children
        parent_R = draft.parents_RN[:, node]
        has_parent_R = (parent_R >= 0) & (draft.num_nodes_R > node)  # padding hangs at the root
        at_R = parent_R.clamp(min=0)
        depth_R = torch.where(has_parent_R, depth_RN[each_R, at_R], 0)
        path_RP = torch.where(has_parent_R[:, None], path_RNP[each_R, at_R], -1)
        path_RNP[:, node] = path_RP.scatter(1, depth_R[:, None], draft.tokens_RN[:, node, None])
        depth_RN[:, node] = depth_R + 1
    return depth_RN, path_RNP


def history_of(draft: Draft, rows: Rows, num_logits: int) -> History:
    """The history of every row of logits, without asking the host."""
    num_rows, num_nodes = draft.tokens_RN.shape
    device = draft.tokens_RN.device
    depth_RN, path_RNP = paths(draft)
    first_R = first_of(draft)
    offset_N = torch.arange(num_nodes, device=device)
    # Padding nodes all write to one spare place behind the last row of logits.
    is_node_RN = offset_N < draft.num_nodes_R[:, None]
    at_RN = torch.where(is_node_RN, first_R[:, None] + 1 + offset_N, num_logits)
    at = torch.cat([first_R[:, None], at_RN], dim=1).view(-1)
    row_RN = rows.ids_R[:, None].expand(num_rows, num_nodes + 1)
    root_R1 = torch.zeros((num_rows, 1), dtype=torch.int64, device=device)
    pos_RN = rows.known_X[rows.ids_R][:, None] + torch.cat([root_R1, depth_RN], dim=1)
    root_path = torch.full((num_rows, 1, num_nodes), -1, device=device)
    path = torch.cat([root_path, path_RNP], dim=1).flatten(0, 1)

    def spread(values: Tensor) -> Tensor:
        out = values.new_zeros((num_logits + 1, *values.shape[1:]))
        return out.index_copy_(0, at, values)[:num_logits]

    return History(
        first_R=first_R,
        row_M=spread(row_RN.reshape(-1)),
        pos_M=spread(pos_RN.reshape(-1)),
        path_MP=spread(path),
    )


@dataclass(slots=True)
class RowDraft:
    """One row's draft on the host."""

    row: int
    known: int  # position of the token after the root
    first: int  # where its root's logits stand in M
    tokens: list[int]
    children: list[list[int]]  # of the root, then of each node, in the draft's order
    is_chain: bool
    q_NV: Tensor | None = None
    is_sampled: list[bool] | None = None

    def q(self, node: int) -> Chances | None:
        """What the node was drawn from; None: it was chosen."""
        if self.q_NV is None or self.is_sampled is None or not self.is_sampled[node]:
            return None
        return self.q_NV[node].double().cpu().numpy()


def row_drafts(draft: Draft, rows: Rows) -> Iterator[RowDraft]:
    """The drafts of a step, row by row."""
    first = 0
    tokens_RN, parents_RN = draft.tokens_RN.tolist(), draft.parents_RN.tolist()
    sampled_RN = None if draft.is_sampled_RN is None else draft.is_sampled_RN.tolist()
    ids, known = rows.ids_R.tolist(), rows.known_X.tolist()
    for place, (row, num_nodes) in enumerate(zip(ids, draft.num_nodes_R.tolist(), strict=True)):
        parents = parents_RN[place][:num_nodes]
        children: list[list[int]] = [[] for _ in range(num_nodes + 1)]
        for node, parent in enumerate(parents):
            children[parent + 1].append(node)
        yield RowDraft(
            row=row,
            known=known[row],
            first=first,
            tokens=tokens_RN[place][:num_nodes],
            children=children,
            is_chain=parents == list(range(-1, num_nodes - 1)),
            q_NV=None if draft.q_RNV is None else draft.q_RNV[place],
            is_sampled=None if sampled_RN is None else sampled_RN[place],
        )
        first += 1 + num_nodes


class Target:
    """What the target says at single nodes, and the noise of verdicts, on the host."""

    def __init__(self, logits_MV: Tensor, sampling: SamplingState, mask_MV: Tensor | None) -> None:
        self.logits_MV, self.sampling, self.mask_MV = logits_MV, sampling, mask_MV

    def p(self, draft: RowDraft, node: int, path: list[int]) -> Chances:
        """The processed distribution after `node` (-1: the root), whose drafted tokens are `path`.

        Greedy rows put everything on one token.
        """
        z_V = self._processed(draft, draft.first + 1 + node, draft.known + len(path), path)
        top = z_V.argmax()
        if self.sampling.is_greedy(draft.row) or z_V[top] == -np.inf:
            one_V: Chances = np.eye(1, len(z_V), int(top))[0]
            return one_V
        p_V: Chances = np.exp(z_V - z_V[top])
        p_V /= p_V.sum()
        return p_V

    def _processed(self, draft: RowDraft, m: int, pos: int, path: list[int]) -> Chances:
        logits_MV, mask_MV, sampling = self.logits_MV, self.mask_MV, self.sampling
        z_V: Chances
        if not sampling.is_dense:
            mask_V = None if mask_MV is None else mask_MV[m].numpy()
            x_V = logits_MV[m].float().numpy()
            z_V = sampling.process_row(x_V, draft.row, pos, path, mask_V).astype(np.float64)
            return z_V
        z_1V = sampling.process(
            logits_MV[m : m + 1],
            torch.tensor([draft.row], device=logits_MV.device),
            torch.tensor([pos], device=logits_MV.device),
            torch.tensor([path], dtype=torch.int64, device=logits_MV.device).view(1, len(path)),
            None if mask_MV is None else mask_MV[m : m + 1],
        )
        z_V = z_1V[0].double().cpu().numpy()
        return z_V

    def coin(self, draft: RowDraft, depth: int, number: int = 0) -> float:
        """A number in (0, 1) for one decision about the token at this depth."""
        seed, index = self._key(draft)
        counter = number >> 2, draft.known + depth, index, stream_at(COIN, depth)
        word = philox_ref(counter, (seed & LOW, seed >> 32))[number & 3]
        return (word + 0.5) * 2.0**-32

    def draw(self, p_V: Chances, draft: RowDraft, depth: int) -> int:
        """A token from p for this depth."""
        seed, index = self._key(draft)
        ids = np.flatnonzero(p_V)
        stream = stream_at(RESIDUAL, depth)
        noise = gumbel_row(seed, index, draft.known + depth, stream, ids)
        return int(ids[(np.log(p_V[ids]) + noise).argmax()])

    def _key(self, draft: RowDraft) -> tuple[int, int]:
        return int(self.sampling.seed_X[draft.row]), int(self.sampling.sample_X[draft.row])


def verdict_of(
    committed: Sequence[list[int]], walked: Sequence[list[int]], device: torch.device | str = "cpu"
) -> Verdict:
    """Per row the tokens to commit and the node behind each (-1: the bonus)."""
    num_k = max(map(len, committed), default=0)
    tokens = [tokens + [0] * (num_k - len(tokens)) for tokens in committed]
    nodes = [nodes + [-1] * (num_k - len(nodes)) for nodes in walked]
    shape = len(committed), num_k
    return Verdict(
        tokens_RK=torch.tensor(tokens, dtype=torch.int64, device=device).view(shape),
        num_tokens_R=torch.tensor([len(t) for t in committed], dtype=torch.int64, device=device),
        path_RK=torch.tensor(nodes, dtype=torch.int64, device=device).view(shape),
    )
