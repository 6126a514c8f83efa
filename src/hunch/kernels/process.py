"""Rules of requests, applied to their logits before temperature, by tables over (row, token).

The order is vLLM's: a grammar's mask, allowed ids and bad words, stop ids before min_tokens, logit
bias, penalties. A drafted node's history is prompt, output and the drafted tokens on the path to
it. The functions here are the specification; `gpu_process` holds the kernels.

Shape letters: X rows of the engine, R rows of the step, M rows of logits, V vocabulary, P longest
path, K tokens of a step, W bad words of a row, H tokens of a bad word before its last, N numbers of
a row's bad words, B words of 32 bits of a mask, C columns of a drafter's logits, G nodes a draft
can have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

PENALTIES, BANS, MIN_TOKENS, BIAS, BAD_WORDS = 1, 2, 4, 8, 16  # rules a row can have
IN_PROMPT, IS_BANNED, IS_STOP = 1, 2, 4  # flags of a token
ANY = -1  # a place of a bad word's prefix that matches everything
NOTHING = -2  # a place of a history before its first token
NO_WORD = -1  # in place of a word's last token


@dataclass(frozen=True, slots=True)
class ProcessTables:
    """The rules of all rows. A table is read for a row only if the row has its rule."""

    rules_X: Tensor  # int32
    min_pos_X: Tensor  # int64: stop ids are removed before this position
    penalties_X3: Tensor  # float32: repetition, frequency, presence
    counts_XV: Tensor  # int32: how often each token occurs in the output
    bias_XV: Tensor  # float32
    flags_XV: Tensor  # uint8
    words_XN: Tensor  # int32: prefixes [W, H] ending at the right, last tokens [W], tail [H]
    num_words: int
    num_prefix: int

    @staticmethod
    def create(
        max_rows: int, vocab_size: int, device: torch.device, num_words: int, num_prefix: int
    ) -> ProcessTables:
        def table(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return ProcessTables(
            rules_X=table((max_rows,), torch.int32),
            min_pos_X=table((max_rows,), torch.int64),
            penalties_X3=table((max_rows, 3), torch.float32),
            counts_XV=table((max_rows, vocab_size), torch.int32),
            bias_XV=table((max_rows, vocab_size), torch.float32),
            flags_XV=table((max_rows, vocab_size), torch.uint8),
            words_XN=_no_words(max_rows, num_words, num_prefix, device),
            num_words=num_words,
            num_prefix=num_prefix,
        )

    @property
    def prefix_XWH(self) -> Tensor:
        return self.words_XN[:, : self.num_words * self.num_prefix].unflatten(
            1, (self.num_words, self.num_prefix)
        )

    @property
    def last_XW(self) -> Tensor:
        first = self.num_words * self.num_prefix
        return self.words_XN[:, first : first + self.num_words]

    @property
    def tail_XH(self) -> Tensor:
        """The last tokens of each row's output."""
        return self.words_XN[:, -self.num_prefix :]

    def with_room(self, num_words: int, num_prefix: int) -> ProcessTables:
        """A copy with larger tables of bad words; all other tables are the same tensors."""
        max_rows, device = len(self.rules_X), self.rules_X.device
        words_XN = _no_words(max_rows, num_words, num_prefix, device)
        wider = replace(self, words_XN=words_XN, num_words=num_words, num_prefix=num_prefix)
        # Prefixes are aligned at their ends, so that longer ones need room at the left.
        wider.prefix_XWH[:, : self.num_words, -self.num_prefix :] = self.prefix_XWH
        wider.last_XW[:, : self.num_words] = self.last_XW
        wider.tail_XH[:, -self.num_prefix :] = self.tail_XH
        return wider


def _no_words(max_rows: int, num_words: int, num_prefix: int, device: torch.device) -> Tensor:
    width = num_words * num_prefix + num_words + num_prefix
    words_XN = torch.full((max_rows, width), ANY, dtype=torch.int32, device=device)
    words_XN[:, -num_prefix:] = NOTHING
    return words_XN


def penalise(
    x: Any, count: Any, is_known: Any, repetition: Any, frequency: Any, presence: Any, where: Any
) -> Any:
    """Logits after vLLM's penalties, in its order.

    `count` is how often a token occurs in the output; `is_known`, whether in prompt or output;
    `where` is torch.where or numpy.where. All in float32.
    """
    x = where(is_known, where(x > 0, x / repetition, x * repetition), x)
    return where(count > 0, x - frequency * count - presence, x)


def process_ref(
    logits_MV: Tensor,
    row_M: Tensor,  # -1: a row of logits without rules
    pos_M: Tensor,  # of the token being chosen
    path_MP: Tensor,  # drafted tokens from the root to the node, itself included, then -1
    tables: ProcessTables,
    mask_MB: Tensor | None = None,  # int32; bit v % 32 of word v // 32: token v is allowed
    is_masked_M: Tensor | None = None,  # rows of logits that the mask is for
    ids_C: Tensor | None = None,  # the token of each column, where these are a part of all
) -> Tensor:
    """Processed logits in float32, -inf for removed tokens."""
    if ids_C is not None:
        whole_MV = torch.zeros_like(tables.bias_XV[row_M]).index_copy_(1, ids_C, logits_MV.float())
        whole_MV = process_ref(whole_MV, row_M, pos_M, path_MP, tables, mask_MB, is_masked_M)
        return whole_MV[:, ids_C]
    x_MV = logits_MV.float()
    rules_M1 = torch.where(row_M >= 0, tables.rules_X[row_M], 0)[:, None]
    row_M = row_M.clamp(min=0)
    flags_MV = tables.flags_XV[row_M]
    is_early_M1 = (pos_M < tables.min_pos_X[row_M])[:, None]
    is_removed_MV = ((rules_M1 & BANS) > 0) & ((flags_MV & IS_BANNED) > 0)
    is_removed_MV |= ((rules_M1 & MIN_TOKENS) > 0) & ((flags_MV & IS_STOP) > 0) & is_early_M1
    is_removed_MV |= ((rules_M1 & BAD_WORDS) > 0) & _ends_words(tables, row_M, path_MP)
    if mask_MB is not None and is_masked_M is not None:
        ids_V = torch.arange(x_MV.shape[1], device=x_MV.device)
        is_allowed_MV = (mask_MB[:, ids_V // 32] >> (ids_V % 32)) & 1
        is_removed_MV |= (is_allowed_MV == 0) & (is_masked_M[:, None] != 0)
    x_MV = x_MV.masked_fill(is_removed_MV, -torch.inf)

    bias_MV = tables.bias_XV[row_M]
    x_MV = torch.where(((rules_M1 & BIAS) > 0) & (bias_MV != 0), x_MV + bias_MV, x_MV)

    counts_MV = tables.counts_XV[row_M].scatter_add_(
        1, path_MP.clamp(min=0), (path_MP >= 0).to(torch.int32)
    )
    is_known_MV = ((flags_MV & IN_PROMPT) > 0) | (counts_MV > 0)
    three = tables.penalties_X3[row_M, :, None].unbind(1)
    penalised_MV = penalise(x_MV, counts_MV.float(), is_known_MV, *three, torch.where)
    return torch.where((rules_M1 & PENALTIES) > 0, penalised_MV, x_MV)


def _ends_words(tables: ProcessTables, row_M: Tensor, path_MP: Tensor) -> Tensor:
    """Whether a token would end a bad word whose prefix was just written, bool [M, V]."""
    depth_M1 = (path_MP >= 0).sum(1, keepdim=True)
    longer = torch.cat([tables.tail_XH[row_M].long(), path_MP], dim=1)
    at_H = torch.arange(tables.num_prefix, device=path_MP.device)
    history_MH = longer.gather(1, depth_M1 + at_H)
    prefix_MWH, last_MW = tables.prefix_XWH[row_M], tables.last_XW[row_M].long()
    is_match_MWH = (prefix_MWH == history_MH[:, None]) | (prefix_MWH == ANY)
    is_match_MW = is_match_MWH.all(-1) & (last_MW != NO_WORD)
    num_MV = torch.zeros_like(tables.counts_XV[row_M])
    return num_MV.scatter_add_(1, last_MW.clamp(min=0), is_match_MW.to(num_MV.dtype)) > 0


def count_committed_ref(
    tables: ProcessTables,
    row_R: Tensor,  # -1: padding
    tokens_RK: Tensor,
    num_tokens_R: Tensor,  # how many of them were committed
) -> None:
    """Add committed tokens to the rows' counts and tails."""
    columns = zip(row_R.tolist(), num_tokens_R.tolist(), strict=True)
    for r, (row, num_tokens) in enumerate(columns):
        if row < 0 or num_tokens <= 0:
            continue
        rules, new_K = int(tables.rules_X[row]), tokens_RK[r, :num_tokens]
        if rules & PENALTIES:
            counts_V = tables.counts_XV[row]
            counts_V.scatter_add_(0, new_K, torch.ones_like(new_K, dtype=counts_V.dtype))
        if rules & BAD_WORDS:
            tail_H = tables.tail_XH[row]
            tail_H.copy_(torch.cat([tail_H, new_K])[num_tokens:])


def draft_paths_ref(
    ids_R: Tensor,
    count_R: Tensor,  # nodes of each row's draft; -1: the row does nothing
    draft_XG: Tensor,
    parents_XG: Tensor,
    first_node: int,
    path_MP: Tensor,
) -> None:
    """The drafted tokens to nodes first_node, first_node + 1, ... of each row; -1 is the root."""
    width = len(path_MP) // len(ids_R)
    path_MP.fill_(-1)
    for r, (row, count) in enumerate(zip(ids_R.tolist(), count_R.tolist(), strict=True)):
        for place in range(width):
            path, node = [], first_node + place
            while row >= 0 and 0 <= node < count:
                path.insert(0, int(draft_XG[row, node]))
                node = int(parents_XG[row, node])
            path_MP[r * width + place, : len(path)] = torch.tensor(path, dtype=path_MP.dtype)
