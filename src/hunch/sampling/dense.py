"""Logits processors on a device: tables over (row, vocabulary), read without the host.

`processors.py` has the same rules on the host, `kernels.process` the functions that read the
tables; a test holds all forms equal bit for bit. Captured steps keep the tables' addresses, so
all tables are allocated at full size when a request first needs one, and stay there. Only tables of
bad words are replaced, by larger ones; then `generation` grows.

Shape letters: X rows of the engine, R rows of the step, M rows of logits, V vocabulary, P longest
path, K tokens of a step, W bad words of a row, H tokens of a bad word before its last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hunch.kernels.process import (
    ANY,
    BAD_WORDS,
    BANS,
    BIAS,
    IN_PROMPT,
    IS_BANNED,
    IS_STOP,
    MIN_TOKENS,
    NO_WORD,
    NOTHING,
    PENALTIES,
    ProcessTables,
    count_committed_ref,
    process_ref,
)
from hunch.sampling.processors import has_penalties, ids_of
from hunch.types import Request

NUM_WORDS, NUM_PREFIX = 32, 8  # bad words of several tokens, and tokens before a word's last

STAGED_BYTES = 32 * 2**20  # of pinned memory, to send requests' rules to the device


class DeviceProcessors:
    """The rules of all rows, as tensors."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows, self.vocab_size, self.device = max_rows, vocab_size, device
        self._tables: ProcessTables | None = None
        self._generation = 0
        self._stage: Stage | None = None  # made with the first request that has rules

    @property
    def tables(self) -> ProcessTables:
        """The tables that the kernels read; allocated on first use."""
        if self._tables is None:
            size = self.max_rows, self.vocab_size
            self._tables = ProcessTables.create(*size, self.device, NUM_WORDS, NUM_PREFIX)
            self._generation += 1
        return self._tables

    @property
    def generation(self) -> int:
        """A number that grows when `tables` get other addresses; 0: there are none yet."""
        return self._generation

    @contextmanager
    def without_memory(self) -> Iterator[None]:
        """In this context `tables` have shapes but no memory: enough to see which kernels run."""
        before, size = self._tables, (self.max_rows, self.vocab_size)
        nowhere = torch.device("meta")
        self._tables = ProcessTables.create(*size, nowhere, NUM_WORDS, NUM_PREFIX)
        try:
            yield
        finally:
            self._tables = before

    # --- rows come and go -------------------------------------------------------------------------

    def start(self, row: int, request: Request, output: list[int]) -> None:
        """Write the tables that the request needs, each in one copy; the others are not read."""
        params, tables = request.params, self.tables
        rules = self._write_flags(row, request)
        if params.logit_bias:
            rules |= BIAS
            bias_V = np.zeros(self.vocab_size, np.float32)
            for token, bias in params.logit_bias.items():
                if token < self.vocab_size:
                    bias_V[token] = bias
            self._write(tables.bias_XV[row], bias_V)
        if has_penalties(request):
            rules |= PENALTIES
            if output:
                ids = ids_of(output, self.vocab_size)
                counts_V = np.bincount(ids, minlength=self.vocab_size).astype(np.int32)
                self._write(tables.counts_XV[row], counts_V)
            else:
                tables.counts_XV[row].zero_()
            three = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
            self._write(tables.penalties_X3[row], np.array(three, np.float32))
        phrases = [w for w in request.bad_word_ids if len(w) > 1 and w[-1] < self.vocab_size]
        if phrases:
            rules |= BAD_WORDS
            self._write_words(row, phrases, output)
        put(self.tables.min_pos_X, row, len(request.prompt_ids) + params.min_tokens)
        put(self.tables.rules_X, row, rules)

    def _write_flags(self, row: int, request: Request) -> int:
        """Write what the request says of single tokens; returns the rules that it needs."""
        params, rules = request.params, 0
        flags_V = np.zeros(self.vocab_size, np.uint8)
        if params.allowed_token_ids is not None:
            rules |= BANS
            flags_V.fill(IS_BANNED)
            flags_V[ids_of(params.allowed_token_ids, self.vocab_size)] = 0
        banned = ids_of((w[0] for w in request.bad_word_ids if len(w) == 1), self.vocab_size)
        if len(banned):
            rules |= BANS
            flags_V[banned] = IS_BANNED
        if params.min_tokens and request.stop_ids:
            rules |= MIN_TOKENS
            flags_V[ids_of(request.stop_ids, self.vocab_size)] |= IS_STOP
        is_penalised = has_penalties(request)
        if is_penalised:
            flags_V[ids_of(request.prompt_ids, self.vocab_size)] |= IN_PROMPT
        if rules or is_penalised:
            self._write(self.tables.flags_XV[row], flags_V)
        return rules

    def _write_words(self, row: int, words: list[tuple[int, ...]], output: list[int]) -> None:
        longest, tables = max(len(word) - 1 for word in words), self.tables
        if len(words) > tables.num_words or longest > tables.num_prefix:
            room = (_room(len(words), tables.num_words), _room(longest, tables.num_prefix))
            tables = self._tables = tables.with_room(*room)
            self._generation += 1
        width = tables.num_prefix
        prefix_WH = np.full((tables.num_words, width), ANY, np.int32)
        last_W = np.full(tables.num_words, NO_WORD, np.int32)
        for number, word in enumerate(words):
            prefix_WH[number, width - len(word) + 1 :] = word[:-1]
            last_W[number] = word[-1]
        tail_H = np.full(width, NOTHING, np.int32)
        tail = output[max(0, len(output) - width) :]
        tail_H[width - len(tail) :] = tail
        self._write(tables.words_XN[row], np.concatenate([prefix_WH.ravel(), last_W, tail_H]))

    def leave(self, row: int) -> None:
        if self._tables is not None:
            put(self._tables.rules_X, row, 0)  # without rules, the tables are not read

    # --- steps ------------------------------------------------------------------------------------

    def commit(self, rows: list[int], tokens: list[list[int]]) -> None:
        longest = max(map(len, tokens), default=0)
        lines = [
            [row, len(new), *new, *[0] * (longest - len(new))]
            for row, new in zip(rows, tokens, strict=True)
        ]
        if longest:
            lines_RC = torch.empty(len(lines), 2 + longest, dtype=torch.int64, device=self.device)
            self._write(lines_RC, np.array(lines, np.int64))
            new = lines_RC[:, 0].contiguous(), lines_RC[:, 2:], lines_RC[:, 1]
            if self.device.type == "cuda":
                from hunch.kernels.gpu_process import count_committed

                count_committed(self.tables, *new)
            else:
                count_committed_ref(self.tables, *new)

    def apply(
        self,
        x_MC: Tensor,
        row_M: Tensor,
        pos_M: Tensor,
        path_MP: Tensor,
        ids_C: Tensor | None = None,  # the token of each column, if these are not all tokens
    ) -> None:
        """Apply the rules to float32 logits, in place."""
        tables = self.tables
        if self.device.type != "cuda":
            x_MC.copy_(process_ref(x_MC, row_M, pos_M, path_MP, tables, ids_C=ids_C))
            return
        from hunch.kernels.gpu_process import process

        where = [t.to(self.device, non_blocking=True) for t in (row_M, pos_M, path_MP)]
        process(x_MC, where[0], where[1], where[2].contiguous(), tables, out_MV=x_MC, ids_C=ids_C)

    def _write(self, line: Tensor, values: npt.NDArray[Any]) -> None:
        if self.device.type != "cuda":
            line.copy_(torch.from_numpy(values))
            return
        if self._stage is None:
            self._stage = Stage(4 * self.vocab_size)
        self._stage.send(values, line)


def put(column_X: Tensor, row: int, value: float) -> None:
    """Set a row's value. An assignment would copy it from the host, and wait for the device."""
    column_X[row].fill_(value)


class Stage:
    """Pinned memory of the host, in pieces used in turn. A copy from it does not wait for the
    running step, and pinning memory for every request would take milliseconds."""

    def __init__(self, num_bytes: int) -> None:
        count = max(16, min(64, STAGED_BYTES // num_bytes))
        self._pieces = [
            torch.empty(num_bytes, dtype=torch.uint8).pin_memory() for _ in range(count)
        ]
        self._copied = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def send(self, values: npt.NDArray[Any], line: Tensor) -> None:
        """Copy the values to the device, after what was launched there."""
        source = torch.from_numpy(np.ascontiguousarray(values))
        if values.nbytes > len(self._pieces[0]):
            line.copy_(source)
            return
        turn, self._turn = self._turn, (self._turn + 1) % len(self._pieces)
        self._copied[turn].synchronize()  # its last copy was long ago
        held = self._pieces[turn][: values.nbytes].view(source.dtype).view(source.shape)
        np.copyto(held.numpy(), values)  # torch would start threads even for small copies
        line.copy_(held, non_blocking=True)
        self._copied[turn].record()


def _room(needed: int, room: int) -> int:
    """Room, doubled until it is enough: each change makes captured steps useless."""
    while room < needed:
        room *= 2
    return room
