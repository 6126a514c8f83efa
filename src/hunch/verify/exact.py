"""Exact: the target's own token at every node; walk the draft while they agree.

One rule for greedy and sampling, chain and tree, and every processor. The tokens are those of plain
decoding by construction: each is what the target would choose after the ones before it.

Shape letters: R rows of the step, N nodes of a draft, M rows of logits, V vocabulary, K tokens one
step can commit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hunch.draft import Draft, Rows, Verdict
from hunch.sampling.state import SamplingState
from hunch.verify.base import Verifier, history_of, verdict_of


def _exact(
    draft: Draft,
    logits_MV: Tensor,
    rows: Rows,
    sampling: SamplingState,
    mask_MV: Tensor | None = None,
) -> Verdict:
    if not sampling.is_dense:
        return walk_rows(draft, logits_MV, rows, sampling, mask_MV)
    history = history_of(draft, rows, len(logits_MV))
    choice_M = sampling.choose(logits_MV, history.row_M, history.pos_M, history.path_MP, mask_MV)
    return walk(draft, choice_M, history.first_R)


def walk_rows(
    draft: Draft,
    logits_MV: Tensor,
    rows: Rows,
    sampling: SamplingState,
    mask_MV: Tensor | None = None,
) -> Verdict:
    """On a CPU: a choice is made only where the walk comes by, so drafts cost no sampling."""
    x_MV = logits_MV.float().numpy()
    mask = None if mask_MV is None else mask_MV.numpy()
    known = rows.known_X.tolist()
    tokens_RN, parents_RN = draft.tokens_RN.tolist(), draft.parents_RN.tolist()
    committed, accepted = [], []
    first = 0  # where the row's root stands in M
    counts = zip(rows.ids_R.tolist(), draft.num_nodes_R.tolist(), strict=True)
    for r, (row, num_nodes) in enumerate(counts):
        here = slice(first, first + 1 + num_nodes)
        nodes = tokens_RN[r][:num_nodes], parents_RN[r][:num_nodes]
        mask_NV = None if mask is None else mask[here]
        tokens, walked = walk_row(x_MV[here], row, known[row], *nodes, sampling, mask_NV)
        committed.append(tokens)
        accepted.append(walked)
        first += 1 + num_nodes
    return verdict_of(committed, accepted)


def walk_row(
    logits_NV: npt.NDArray[np.float32],  # of the root, then of each node
    row: int,
    pos: int,  # of the token after the root
    tokens: list[int],
    parents: list[int],
    sampling: SamplingState,
    mask_NV: npt.NDArray[np.bool_] | None = None,
) -> tuple[list[int], list[int]]:
    """One row's tokens to commit, and the node behind each (-1: the bonus)."""
    child = {guess: node for node, guess in enumerate(zip(parents, tokens, strict=True))}
    node = -1
    path: list[int] = []
    walked: list[int] = []
    while True:
        mask_V = None if mask_NV is None else mask_NV[1 + node]
        token = sampling.choose_row(logits_NV[1 + node], row, pos + len(path), path, mask_V)
        path.append(token)
        node = child.get((node, token), -1)
        walked.append(node)
        if node < 0:
            return path, walked


exact = Verifier(_exact, walk_row=walk_row)


def walk(draft: Draft, choice_M: Tensor, first_R: Tensor) -> Verdict:
    """The same walk over choices made at all nodes, without asking the host."""
    num_rows, num_nodes = draft.tokens_RN.shape
    device = draft.tokens_RN.device
    offset_N = torch.arange(num_nodes, device=device)
    is_node_RN = offset_N < draft.num_nodes_R[:, None]
    node_R = torch.full((num_rows,), -1, device=device)  # -1: the root
    is_walking_R = torch.ones(num_rows, dtype=torch.bool, device=device)
    num_tokens_R = torch.zeros(num_rows, dtype=torch.int64, device=device)
    tokens, path = [], []
    for _ in range(num_nodes + 1):
        token_R = choice_M[torch.where(is_walking_R, first_R + 1 + node_R, 0)]
        is_child_RN = (draft.parents_RN == node_R[:, None]) & is_node_RN
        is_child_RN &= draft.tokens_RN == token_R[:, None]
        # Siblings differ in their tokens, so at most one child fits.
        found_R = torch.where(is_child_RN, offset_N, -1).amax(1) if num_nodes else node_R
        found_R = torch.where(is_walking_R, found_R, -1)
        tokens.append(torch.where(is_walking_R, token_R, 0))
        path.append(found_R)
        num_tokens_R += is_walking_R
        is_walking_R = is_walking_R & (found_R >= 0)
        node_R = found_R
    return Verdict(torch.stack(tokens, 1), num_tokens_R, torch.stack(path, 1))
