"""What a verifier is, and which node of a draft each row of logits belongs to.

Logits are packed row after row: the root's (after the row's last known token), then one for each
node in the draft's order. Verdicts are in that order too.

A verifier is a walk over one row's draft on the host, which asks what the target chooses at each
node; `exact` also has a form in tensors, for a device.

Shape letters: R rows of the step, N nodes of a draft, M rows of logits, V vocabulary, P longest
path, K tokens one step can commit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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


class Walk(Protocol):
    """A verifier for one row on the host: the tokens to commit, and each one's node (-1: bonus)."""

    def __call__(self, draft: RowDraft, target: TargetChoices) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True, slots=True)
class Verifier:
    """How drafts are verified.

    wants_q: it uses q, the distributions that nodes were drawn from. Drafters then draw with noise
    of their own, not with the target's, and add q to their drafts.
    """

    walk: Walk  # row by row on the host
    in_tensors: Verify | None = None  # all rows on a device, without the host
    wants_q: bool = False


@dataclass(slots=True)
class History:
    """For each row of logits: its row, the position that it decides, and the path to it."""

    first_R: Tensor  # place of each row's root in M
    row_M: Tensor
    pos_M: Tensor
    path_MP: Tensor  # drafted tokens from the root to the node, the node included; then -1


def paths(draft: Draft) -> tuple[Tensor, Tensor]:
    """Depth of each node (1 below the root), and the tokens on its path; without the host."""
    num_rows, num_nodes = draft.tokens_RN.shape
    device = draft.tokens_RN.device
    depth_RN = torch.ones((num_rows, num_nodes), dtype=torch.int64, device=device)
    path_RNP = torch.full((num_rows, num_nodes, num_nodes), -1, device=device)
    each_R = torch.arange(num_rows, device=device)
    for node in range(num_nodes):  # parents come before children
        parent_R = draft.parents_RN[:, node]
        has_parent_R = (parent_R >= 0) & (draft.num_nodes_R > node)  # padding has none
        at_R = parent_R.clamp(min=0)
        depth_R = torch.where(has_parent_R, depth_RN[each_R, at_R], 0)
        path_RP = torch.where(has_parent_R[:, None], path_RNP[each_R, at_R], -1)
        path_RNP[:, node] = path_RP.scatter(1, depth_R[:, None], draft.tokens_RN[:, node, None])
        depth_RN[:, node] = depth_R + 1
    return depth_RN, path_RNP


def history_of(draft: Draft, rows: Rows, num_logits: int) -> History:
    """The history of every row of logits, computed without the host."""
    num_rows, num_nodes = draft.tokens_RN.shape
    device = draft.tokens_RN.device
    if not num_nodes:  # as for prompts: roots alone, one after the other
        each_R = torch.arange(num_rows, device=device)
        return History(each_R, rows.ids_R, rows.known_X[rows.ids_R], draft.tokens_RN)
    depth_RN, path_RNP = paths(draft)
    sizes_R = draft.num_nodes_R + 1
    first_R = sizes_R.cumsum(0) - sizes_R
    offset_N = torch.arange(num_nodes, device=device)
    # Padding nodes all write to one spare place after the last row of logits.
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


@dataclass
class RowDraft:
    """One row's draft on the host."""

    row: int
    known: int  # position of the token after the root
    first: int  # place of its root in M
    tokens: list[int]
    parents: list[int]
    q_NV: Tensor | None = None
    is_sampled_N: Tensor | None = None

    @cached_property
    def children(self) -> list[list[int]]:
        """Children of the root, then of each node, in the draft's order."""
        children: list[list[int]] = [[] for _ in range(len(self.tokens) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return children

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def q(self, node: int) -> Chances | None:
        """What the node was drawn from; None: it was chosen."""
        if self.q_NV is None or self.is_sampled_N is None or not self.is_sampled_N[node]:
            return None
        return self.q_NV[node].double().cpu().numpy()


class TargetChoices:
    """The target's choices at single nodes, and the noise of verdicts, on the host."""

    def __init__(
        self,
        logits_MV: Tensor,
        sampling: SamplingState,
        mask_MV: Tensor | None,
        x_MV: npt.NDArray[np.float32] | None = None,  # the same logits as an array, if there is one
    ) -> None:
        self.logits_MV, self.sampling, self.mask_MV = logits_MV, sampling, mask_MV
        if not sampling.is_dense:
            self._x_MV = logits_MV.float().numpy() if x_MV is None else x_MV
            self._is_allowed_MV = None if mask_MV is None else mask_MV.numpy()

    def choice(self, draft: RowDraft, node: int, path: list[int]) -> int:
        """The target's token after `node` (-1: the root); `path`: the drafted tokens up to it."""
        if self.sampling.is_dense:
            return int(self.sampling.choose(*self._place(draft, node, path))[0])
        return self.sampling.choose_row(*self._place_row(draft, node, path))

    def p(self, draft: RowDraft, node: int, path: list[int]) -> Chances:
        """The processed distribution after `node`; for greedy rows all of it is on one token."""
        z_V: Chances
        if self.sampling.is_dense:
            z_1V = self.sampling.process(*self._place(draft, node, path))
            z_V = z_1V[0].double().cpu().numpy()
        else:
            z_V = self.sampling.process_row(*self._place_row(draft, node, path)).astype(np.float64)
        top = z_V.argmax()
        if self.sampling.is_greedy(draft.row) or z_V[top] == -np.inf:
            one_V: Chances = np.eye(1, len(z_V), int(top))[0]
            return one_V
        p_V: Chances = np.exp(z_V - z_V[top])
        p_V /= p_V.sum()
        return p_V

    def _place_row(
        self, draft: RowDraft, node: int, path: list[int]
    ) -> tuple[npt.NDArray[np.float32], int, int, list[int], npt.NDArray[np.bool_] | None]:
        """Logits, row, position, history and mask of a node, for the host's rules."""
        m, mask_MV = draft.first + 1 + node, self._is_allowed_MV
        mask_V = None if mask_MV is None else mask_MV[m]
        return self._x_MV[m], draft.row, draft.known + len(path), path, mask_V

    def _place(
        self, draft: RowDraft, node: int, path: list[int]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The same as tensors."""
        m, device = draft.first + 1 + node, self.logits_MV.device
        return (
            self.logits_MV[m : m + 1],
            torch.tensor([draft.row], device=device),
            torch.tensor([draft.known + len(path)], device=device),
            torch.tensor([path], dtype=torch.int64, device=device).view(1, len(path)),
            None if self.mask_MV is None else self.mask_MV[m : m + 1],
        )

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
