"""Verdicts about whole drafts, by verifiers that walk over one row at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hunch.draft import Draft, Rows, Verdict
from hunch.sampling.state import SamplingState
from hunch.verify.base import RowDraft, TargetChoices, Verifier


def verdict(
    verify: Verifier,
    draft: Draft,
    logits_MV: Tensor,
    rows: Rows,
    sampling: SamplingState,
    mask_MV: Tensor | None = None,
) -> Verdict:
    """What a step run by the host would decide."""
    if verify.in_tensors is not None and sampling.is_dense:
        return verify.in_tensors(draft, logits_MV, rows, sampling, mask_MV)
    target = TargetChoices(logits_MV, sampling, mask_MV)
    walks = [verify.walk(row, target) for row in row_drafts(draft, rows)]
    return verdict_of(walks)


def row_drafts(draft: Draft, rows: Rows) -> Iterator[RowDraft]:
    """The drafts of a step, row by row."""
    first = 0
    tokens_RN, parents_RN = draft.tokens_RN.tolist(), draft.parents_RN.tolist()
    is_sampled_RN = None if draft.is_sampled_RN is None else draft.is_sampled_RN.cpu()
    ids, known = rows.ids_R.tolist(), rows.known_X.tolist()
    for place, (row, num_nodes) in enumerate(zip(ids, draft.num_nodes_R.tolist(), strict=True)):
        yield RowDraft(
            row,
            known[row],
            first,
            tokens_RN[place][:num_nodes],
            parents_RN[place][:num_nodes],
            None if draft.q_RNV is None else draft.q_RNV[place],
            None if is_sampled_RN is None else is_sampled_RN[place],
        )
        first += 1 + num_nodes


def verdict_of(walks: Sequence[tuple[list[int], list[int]]]) -> Verdict:
    """A verdict from each row's tokens to commit and their nodes (-1: the bonus)."""
    num_k = max((len(tokens) for tokens, _ in walks), default=0)
    tokens_RK = [tokens + [0] * (num_k - len(tokens)) for tokens, _ in walks]
    path_RK = [nodes + [-1] * (num_k - len(nodes)) for _, nodes in walks]
    num_tokens_R = [len(tokens) for tokens, _ in walks]
    shape = len(walks), num_k
    return Verdict(
        tokens_RK=torch.tensor(tokens_RK, dtype=torch.int64).view(shape),
        num_tokens_R=torch.tensor(num_tokens_R, dtype=torch.int64),
        path_RK=torch.tensor(path_RK, dtype=torch.int64).view(shape),
    )
