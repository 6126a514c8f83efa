"""The exact verifier: walk the draft while its nodes are what the target itself would choose.

One rule for greedy and sampling, chain and tree, and every processor. The tokens are those of plain
decoding by construction: each is what the target would choose after the ones before it.

Shape letters: R rows of the step, N nodes of a draft, M rows of logits, V vocabulary, K tokens one
step can commit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.draft import Draft, Rows, Verdict
from hunch.sampling.state import SamplingState
from hunch.verify.base import RowDraft, TargetChoices, Verifier, history_of


def walk(draft: RowDraft, target: TargetChoices) -> tuple[list[int], list[int]]:
    """The tokens to commit, and the node of each (-1: the bonus).

    The target chooses a token only at nodes that the walk reaches.
    """
    guesses = zip(draft.parents, draft.tokens, strict=True)
    node_of = {guess: node for node, guess in enumerate(guesses)}  # by parent and token
    node = -1
    tokens: list[int] = []
    nodes: list[int] = []
    while True:
        token = target.choice(draft, node, tokens)
        tokens.append(token)
        node = node_of.get((node, token), -1)
        nodes.append(node)
        if node < 0:
            return tokens, nodes


def exact_in_tensors(
    draft: Draft,
    logits_MV: Tensor,
    rows: Rows,
    sampling: SamplingState,
    mask_MV: Tensor | None = None,
) -> Verdict:
    """`walk` on a device: tokens are chosen at all nodes, then the walk follows them."""
    history = history_of(draft, rows, len(logits_MV))
    choice_M = sampling.choose(logits_MV, history.row_M, history.pos_M, history.path_MP, mask_MV)
    return walk_choices(draft, choice_M, history.first_R)


exact = Verifier(walk, exact_in_tensors)


def walk_choices(draft: Draft, choice_M: Tensor, first_R: Tensor) -> Verdict:
    """Walk each row's draft along the nodes that have the target's tokens, without the host.

    choice_M holds the target's token after the root and each node; first_R is a row's root in it.
    """
    num_rows, num_nodes = draft.tokens_RN.shape
    device = draft.tokens_RN.device
    if not num_nodes:
        one_R = torch.ones(num_rows, dtype=torch.int64, device=device)
        return Verdict(choice_M[:, None], one_R, -one_R[:, None])
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
        found_R = torch.where(is_child_RN, offset_N, -1).amax(1)
        found_R = torch.where(is_walking_R, found_R, -1)
        tokens.append(torch.where(is_walking_R, token_R, 0))
        path.append(found_R)
        num_tokens_R += is_walking_R
        is_walking_R = is_walking_R & (found_R >= 0)
        node_R = found_R
    return Verdict(torch.stack(tokens, 1), num_tokens_R, torch.stack(path, 1))
