"""What a verifier is, and where each row of logits stands in its draft.

Logits are packed row after row: the root's (after the row's last known token), then one for each
node in the draft's order. Verdicts are in that order too.

Shape letters: R rows of the step, N nodes of a draft, M rows of logits, V vocabulary, P longest
path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hunch.draft import Draft, Rows, Verdict
from hunch.sampling.state import SamplingState


class Verifier(Protocol):
    """A pure function: the draft, the target's logits, the rows' history -> what to commit."""

    def __call__(
        self,
        draft: Draft,
        logits_MV: Tensor,
        rows: Rows,
        sampling: SamplingState,
        mask_MV: Tensor | None = None,  # False where a grammar forbids a token
    ) -> Verdict: ...


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
