"""The same processors for a device: tables over (row, vocabulary), no word from the host.

`processors.py` says what they mean; a test holds the two equal bit for bit. Tables exist only once
a request needs them.

Shape letters: X rows of the engine, R rows of the step, M rows of logits, V vocabulary, P longest
path, K tokens of a step, W bad words of a row, H tokens of a bad word before its last.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hunch.sampling.penalties import penalise
from hunch.sampling.processors import has_penalties, ids_of
from hunch.types import Request

ANY = -1  # a place of a bad word's prefix that matches everything
NOTHING = -2  # a place of a history before its first token


class DeviceProcessors:
    """The rules of all rows, as tensors."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows, self.vocab_size, self.device = max_rows, vocab_size, device
        self.num_prompt_X = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.min_tokens_X = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.penalties_X3 = torch.tensor([1.0, 0.0, 0.0], device=device).repeat(max_rows, 1)
        self.counts_XV: Tensor | None = None  # of each token in the output
        self.prompt_XV: Tensor | None = None  # whether a token stands in the prompt
        self.banned_XV: Tensor | None = None
        self.stops_XV: Tensor | None = None  # stop ids of rows with min_tokens
        self.bias_XV: Tensor | None = None
        self.prefix_XWH = torch.full((max_rows, 0, 0), ANY, device=device)
        self.last_XW = torch.zeros((max_rows, 0), dtype=torch.int64, device=device)
        self.is_word_XW = torch.zeros((max_rows, 0), dtype=torch.bool, device=device)
        self.tail_XH = torch.full((max_rows, 0), NOTHING, device=device)

    def start(self, row: int, request: Request, output: list[int]) -> None:
        self.leave(row)
        params = request.params
        self.num_prompt_X[row] = len(request.prompt_ids)
        self.min_tokens_X[row] = params.min_tokens
        if params.allowed_token_ids is not None:
            self.banned_XV = self._table(self.banned_XV, torch.bool)
            self.banned_XV[row] = True
            self.banned_XV[row, self._ids(params.allowed_token_ids)] = False
        if request.bad_word_ids:
            self._start_bad_words(row, request.bad_word_ids, output)
        if params.min_tokens and request.stop_ids:
            self.stops_XV = self._table(self.stops_XV, torch.bool)
            self.stops_XV[row, self._ids(request.stop_ids)] = True
        if params.logit_bias:
            self.bias_XV = self._table(self.bias_XV, torch.float32)
            for token, bias in params.logit_bias.items():
                if token < self.vocab_size:
                    self.bias_XV[row, token] = bias
        if has_penalties(request):
            self._start_penalties(row, request, output)

    def _start_penalties(self, row: int, request: Request, output: list[int]) -> None:
        params = request.params
        self.counts_XV = self._table(self.counts_XV, torch.int32)
        self.prompt_XV = self._table(self.prompt_XV, torch.bool)
        self.prompt_XV[row, self._ids(request.prompt_ids)] = True
        self.counts_XV[row] = torch.bincount(self._ids(output), minlength=self.vocab_size)
        three = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.penalties_X3[row] = torch.tensor(three, device=self.device)

    def _start_bad_words(
        self, row: int, words: tuple[tuple[int, ...], ...], output: list[int]
    ) -> None:
        self.banned_XV = self._table(self.banned_XV, torch.bool)
        self.banned_XV[row, self._ids(w[0] for w in words if len(w) == 1)] = True
        phrases = [w for w in words if len(w) > 1 and w[-1] < self.vocab_size]
        longest = max((len(w) - 1 for w in phrases), default=0)
        self._widen(len(phrases), longest)
        width = self.tail_XH.shape[1]
        for number, word in enumerate(phrases):
            prefix = torch.tensor(word[:-1], device=self.device)
            self.prefix_XWH[row, number] = ANY
            self.prefix_XWH[row, number, width - len(prefix) :] = prefix
            self.last_XW[row, number] = word[-1]
            self.is_word_XW[row, number] = True
        self.tail_XH[row] = NOTHING
        tail = output[max(0, len(output) - width) :]
        self.tail_XH[row, width - len(tail) :] = torch.tensor(tail, dtype=torch.int64)

    def _widen(self, num_words: int, longest: int) -> None:
        grow_w = max(0, num_words - self.last_XW.shape[1])
        grow_h = max(0, longest - self.tail_XH.shape[1])
        pad = torch.nn.functional.pad
        # Prefixes end at the right, so room for longer ones opens at the left.
        self.prefix_XWH = pad(self.prefix_XWH, (grow_h, 0, 0, grow_w), value=ANY)
        self.last_XW = pad(self.last_XW, (0, grow_w))
        self.is_word_XW = pad(self.is_word_XW, (0, grow_w))
        self.tail_XH = pad(self.tail_XH, (grow_h, 0), value=NOTHING)

    def leave(self, row: int) -> None:
        self.min_tokens_X[row] = 0
        self.penalties_X3[row] = torch.tensor([1.0, 0.0, 0.0], device=self.device)
        self.is_word_XW[row] = False
        for table in (
            self.counts_XV, self.prompt_XV, self.banned_XV, self.stops_XV, self.bias_XV
        ):  # fmt: skip
            if table is not None:
                table[row] = 0

    def commit(self, row: int, tokens: list[int]) -> None:
        ids = torch.tensor([tokens], dtype=torch.int64, device=self.device)
        self.commit_rows(
            torch.tensor([row], device=self.device),
            ids,
            torch.tensor([len(tokens)], device=self.device),
        )

    def commit_rows(self, row_R: Tensor, tokens_RK: Tensor, num_tokens_R: Tensor) -> None:
        if self.counts_XV is not None:
            is_new_RK = torch.arange(tokens_RK.shape[1], device=self.device) < num_tokens_R[:, None]
            at_RK = row_R[:, None] * self.vocab_size + torch.where(is_new_RK, tokens_RK, 0)
            one_RK = is_new_RK.to(self.counts_XV.dtype)
            self.counts_XV.view(-1).scatter_add_(0, at_RK.view(-1), one_RK.view(-1))
        width = self.tail_XH.shape[1]
        if width:
            longer = torch.cat([self.tail_XH[row_R], tokens_RK], dim=1)
            at_RH = num_tokens_R[:, None] + torch.arange(width, device=self.device)
            self.tail_XH[row_R] = longer.gather(1, at_RH)

    def apply(self, x_MV: Tensor, row_M: Tensor, pos_M: Tensor, path_MP: Tensor) -> None:
        """In place on float32 logits."""
        if self.banned_XV is not None:
            x_MV.masked_fill_(self.banned_XV[row_M], -torch.inf)
        if self.last_XW.shape[1]:
            self._apply_bad_words(x_MV, row_M, path_MP)
        if self.stops_XV is not None:
            is_early_M = pos_M - self.num_prompt_X[row_M] < self.min_tokens_X[row_M]
            x_MV.masked_fill_(self.stops_XV[row_M] & is_early_M[:, None], -torch.inf)
        if self.bias_XV is not None:
            x_MV.add_(self.bias_XV[row_M])
        if self.counts_XV is not None and self.prompt_XV is not None:
            is_node_MP = path_MP >= 0
            counts_MV = self.counts_XV[row_M].scatter_add_(
                1, path_MP.clamp(min=0), is_node_MP.to(self.counts_XV.dtype)
            )
            is_known_MV = self.prompt_XV[row_M] | (counts_MV > 0)
            repetition, frequency, presence = self.penalties_X3[row_M, :, None].unbind(1)
            x_MV.copy_(
                penalise(
                    x_MV,
                    counts_MV.float(),
                    is_known_MV,
                    repetition,
                    frequency,
                    presence,
                    torch.where,
                )
            )

    def _apply_bad_words(self, x_MV: Tensor, row_M: Tensor, path_MP: Tensor) -> None:
        width = self.tail_XH.shape[1]
        depth_M1 = (path_MP >= 0).sum(1, keepdim=True)
        longer = torch.cat([self.tail_XH[row_M], path_MP], dim=1)
        history_MH = longer.gather(1, depth_M1 + torch.arange(width, device=self.device))
        prefix_MWH = self.prefix_XWH[row_M]
        is_match_MWH = (prefix_MWH == history_MH[:, None]) | (prefix_MWH == ANY)
        is_match_MW = is_match_MWH.all(-1) & self.is_word_XW[row_M]
        ceiling_MW = torch.where(is_match_MW, -torch.inf, torch.inf)
        x_MV.scatter_reduce_(1, self.last_XW[row_M], ceiling_MW, "amin")

    def _table(self, table: Tensor | None, dtype: torch.dtype) -> Tensor:
        if table is None:
            shape = (self.max_rows, self.vocab_size)
            table = torch.zeros(shape, dtype=dtype, device=self.device)
        return table

    def _ids(self, ids: object) -> Tensor:
        return torch.from_numpy(ids_of(ids, self.vocab_size)).to(self.device)
