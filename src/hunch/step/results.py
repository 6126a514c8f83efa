"""Results of captured steps: lines of numbers on the host, turned into the engine's results.

Shape letters: Q buffers, W room of a buffer, R rows of the step, C columns of a result, K tokens of
a row, S scored tokens, E numbers of a scored token, G KV groups but the target's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hunch.kernels.gpu_scores import committed, scores
from hunch.kernels.step import (
    CHECKED,
    DRAFTED,
    FIRST,
    KNOWN,
    REASON,
    STOP,
    TOKENS,
    RowState,
    StepRows,
)
from hunch.sampling.logprobs import entries
from hunch.sampling.stop import REASONS, cut_at_end
from hunch.step.rows import RowBuffers
from hunch.types import DecodedRows, Logprob, Request, RowResult

NUM_BUFFERS = 8  # more than the pending steps: two, and two that chose first tokens
ALIGNED = 16  # numbers: lengths of buffers and lines are multiples, so that wide writes fit
NO_SCORES = -1


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a result's line after the fixed ones of `kernels.step`."""

    num_tokens: int  # tokens the step can commit, from FIRST on
    num_guesses: int  # guesses for the next draft, after them
    num_best: int  # tokens scored beside each committed one; NO_SCORES: none is scored
    host_end: int  # up to here the host reads all lines: past a lookup's guesses, or the draft
    draft: int  # tokens of the next draft, then the parents of its nodes, if the step returns it
    scores_at: int  # per committed token its rank, then (id, logprob) of it and of the best ones
    end: int

    @staticmethod
    def of(
        num_tokens: int, num_guesses: int, *, num_read: int, has_draft: bool, num_best: int
    ) -> Columns:
        """num_read: guesses that the host reads."""
        draft = FIRST + num_tokens + num_guesses
        scores = draft + 2 * num_guesses * has_draft
        end = scores if num_best == NO_SCORES else scores + num_tokens * _entry(num_best)
        end = -(-end // ALIGNED) * ALIGNED  # so that one compiled kernel serves all lines
        host_end = scores if has_draft else FIRST + num_tokens + num_read
        return Columns(num_tokens, num_guesses, num_best, host_end, draft, scores, end)

    @property
    def scores_end(self) -> int:
        return self.scores_at + self.num_tokens * _entry(self.num_best)

    def draft_of(self, line: list[int]) -> tuple[list[int], list[int]]:
        """Tokens and parents of the row's new draft."""
        first, count = self.draft, line[DRAFTED]
        second = first + self.num_guesses
        return line[first : first + count], line[second : second + count]

    def scores(self, result_RC: np.ndarray, num_best_R: np.ndarray) -> Scores:
        """Scores of the committed tokens; each row has its own number of best tokens."""
        num_R, size = result_RC[:, TOKENS] * (num_best_R != NO_SCORES), _entry(self.num_best)
        scored = result_RC[:, self.scores_at : self.scores_end]
        scored = scored.reshape(-1, self.num_tokens, size)
        line_SE = scored[np.arange(self.num_tokens) < num_R[:, None]]
        values = line_SE[:, 2::2].astype(np.int32).view(np.float32).tolist()
        ids, size_S = line_SE[:, 1::2].tolist(), 1 + np.repeat(num_best_R, num_R)
        if (size_S <= self.num_best).any():
            sizes = size_S.tolist()
            ids = [line[:size] for line, size in zip(ids, sizes, strict=True)]
            values = [line[:size] for line, size in zip(values, sizes, strict=True)]
        begins = (np.cumsum(num_R) - num_R).tolist()
        return Scores(begins, entries(ids, values, line_SE[:, 0].tolist()))


def write_drafts(state: RowState, rows: StepRows, columns: Columns) -> None:
    """Write tokens and parents of the new drafts into the result."""
    row_R, count = rows.ids_R.clamp(min=0), columns.num_guesses
    at = columns.draft
    rows.result_RC[:, at : at + count] = state.draft_XG[row_R, :count]
    rows.result_RC[:, at + count : at + 2 * count] = state.parents_XG[row_R, :count]


def write_scores(logits_MV: Tensor, rows: StepRows, num_best: int, columns: Columns) -> None:
    """Write log-probabilities of the committed tokens and of the best ones beside them."""
    num_rows, num_k = rows.path_RK.shape
    at_S, token_S = (rows.ids_R.new_empty(num_rows * num_k) for _ in range(2))
    committed(rows, at_S, token_S)
    line_RE = rows.result_RC[:, columns.scores_at : columns.scores_end]
    scores(logits_MV, at_S, token_S, num_best, line_RE.view(num_rows, num_k, -1))


class Scores(NamedTuple):
    """Log-probabilities of a step's tokens; each token's own entry comes first."""

    begins: list[int]  # index of each row's first entry
    entries: list[dict[int, Logprob]]

    def of_rows(
        self, tokens: list[list[int]], is_scored: list[bool]
    ) -> list[list[dict[int, Logprob]] | None]:
        """The entries of each row's tokens; None for rows that do not want them."""
        rows = zip(tokens, self.begins, is_scored, strict=True)
        return [self.entries[at : at + len(own)] if is_in else None for own, at, is_in in rows]


def _entry(num_best: int) -> int:
    return 1 + 2 * (1 + num_best)


class Download:
    """Buffers in the host's memory, filled by the device in turn (`kernels.gpu_transfer.deliver`).

    Device and host each count the steps to know whose turn it is. Only steps with rows count: the
    runs that compile and time a graph have none.
    """

    def __init__(self, room: int, device: torch.device) -> None:
        """`room`: how many numbers an ordinary result has."""
        self._room, self._is_cuda = room, device.type == "cuda"
        self._buffers: dict[int, tuple[Tensor, np.ndarray]] = {}  # by their room
        # Recorded when a step is over. Its seconds are in its buffer.
        self._done: list[Any] = [
            torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
            for _ in range(NUM_BUFFERS)
        ]
        self.num_steps = 0
        self.buffers(room)

    def buffers(self, num_numbers: int) -> Tensor:
        """The buffers for results of this size, [Q, W]; long ones are made when needed."""
        room = room_of(num_numbers, self._room)
        if room not in self._buffers:
            width = -(-(room + 1) // ALIGNED) * ALIGNED
            size, pin = (NUM_BUFFERS, width), self._is_cuda
            buffers_QW = torch.zeros(size, dtype=torch.int64, pin_memory=pin)
            self._buffers[room] = buffers_QW, buffers_QW.numpy()
        return self._buffers[room][0]

    def next_buffer(self) -> int:
        """A step was launched; returns the buffer it will fill."""
        self.num_steps += 1
        buffer = self.num_steps % NUM_BUFFERS
        if self._done[buffer] is not None:
            self._done[buffer].record()
        return buffer

    def is_there(self, buffer: int) -> bool:
        """Whether the step that fills this buffer is over."""
        return self._done[buffer] is None or bool(self._done[buffer].query())

    def receive(
        self, buffer: int, num_rows: int, num_columns: int, num_numbers: int
    ) -> tuple[np.ndarray, float]:
        """Wait for a step; its result, valid until the buffer is used again, and its seconds.

        The result has `num_numbers` numbers, of which the first `num_rows` lines count.
        """
        if self._done[buffer] is not None:
            self._done[buffer].synchronize()
        line_W = self._buffers[room_of(num_numbers, self._room)][1][buffer]
        result_RC = line_W[: num_rows * num_columns].reshape(num_rows, num_columns)
        return result_RC, int(line_W[-1]) / 1e9


def room_of(num_numbers: int, usual: int) -> int:
    """Numbers in the buffer of a result: the usual size, or a power of two for a longer one."""
    return usual if num_numbers <= usual else 1 << (num_numbers - 1).bit_length()


def apply_rows(
    rows: RowBuffers,
    ids: list[int],
    row_R: np.ndarray,
    result_RC: np.ndarray,
    lines: list[list[int]],
    requests: list[Request | None],
    methods: list[str] | None,
    *,
    num_k: int,
    writes_kv: bool,
    is_dropped_R: np.ndarray | None,
    wants_whole_result: list[bool] | None,
) -> tuple[DecodedRows, list[RowResult]]:
    """Commit the rows' tokens; returns what rows that go on got, and the results of the others.

    `row_R` has the `ids`, and `lines` are the lines of `result_RC` as lists, with up to `num_k`
    tokens each.
    `requests` were in the rows when the step began; the result of one that has left since then
    changes no row, as another request may be there now. With `writes_kv` the drafter wrote its own
    KV in the step, except for rows that its head was dropped for.
    `methods` names the method that drafted each row's checked nodes. Traced rows always get a whole
    result.
    """
    trios = zip(map(rows.requests.__getitem__, ids), requests, lines, strict=True)
    is_here = [held is request and line[TOKENS] > 0 for held, request, line in trios]
    _commit(rows, row_R, result_RC, is_here, num_k, writes_kv, is_dropped_R)
    decoded = DecodedRows(
        tokens=[line[FIRST : FIRST + line[TOKENS]] for line in lines],
        num_waiting=result_RC[:, DRAFTED].tolist(),
    )
    if num_k > 1:
        num_left_R = rows.end[row_R] - result_RC[:, KNOWN] + result_RC[:, TOKENS]
        decoded.num_checked = np.minimum(result_RC[:, CHECKED], num_left_R).tolist()
        decoded.methods = methods
    results: list[RowResult] = []
    flags = zip(lines, is_here, wants_whole_result or repeat(False), strict=False)
    goes_on = [here and not (line[REASON] or is_whole) for line, here, is_whole in flags]
    for place in [place for place, is_in in enumerate(goes_on) if not is_in]:
        decoded.leave_out(place)
        request, line = requests[place], lines[place]
        if not line[TOKENS] or request is None:
            results.append(RowResult(row=ids[place]))  # it had ended before this step
            continue
        result = _result(rows, ids[place], line, request, writes_kv)
        if methods is not None and result.num_checked:
            result.method = methods[place]
        results.append(result)
    if writes_kv:
        decoded.computed = rows.computed[:, row_R].T.tolist()
    return decoded, results


def _result(
    rows: RowBuffers, row: int, line: list[int], request: Request, writes_kv: bool
) -> RowResult:
    num_tokens, computed = line[TOKENS], (line[KNOWN] - 1,)
    num_left = int(rows.end[row]) - line[KNOWN] + num_tokens
    is_there = rows.requests[row] is request  # the row may be another request's by now
    num_others = len(rows.computed) - 1
    if num_others:  # KV groups beside the target's
        gone = (computed[0] if writes_kv else 0,) * num_others
        computed += tuple(rows.computed[1:, row].tolist()) if is_there else gone
    result = RowResult(
        row=row,
        tokens=line[FIRST : FIRST + num_tokens],
        num_processed=1,
        num_checked=min(line[CHECKED], max(num_left, 0)),
        num_accepted=num_tokens - 1,
        computed=computed,
        num_waiting=line[DRAFTED],
    )
    if line[REASON]:
        result.finish = REASONS[line[REASON]]
        if is_there:
            rows.leave(row)
    return result


def take_back(line: list[int], num_kept: int) -> None:
    """Take all but the first `num_kept` tokens out of a row's result, and its new draft."""
    line[KNOWN] -= line[TOKENS] - num_kept
    line[TOKENS] = num_kept
    line[REASON] = line[DRAFTED] = 0
    if not num_kept:
        line[CHECKED] = 0


def end_at_stop(line: list[int], request: Request) -> None:
    """End a row's result at its first stop id, for a row with more than the device knows."""
    num_tokens, num_known = line[TOKENS], line[KNOWN]
    num_output = num_known - num_tokens - len(request.prompt_ids)
    tokens = line[FIRST : FIRST + num_tokens]
    num_kept, reason = cut_at_end(tokens, request, num_output)
    if reason == REASONS[STOP]:
        line[TOKENS] -= num_tokens - num_kept
        line[KNOWN] -= num_tokens - num_kept
        line[REASON] = STOP


def _commit(
    rows: RowBuffers,
    row_R: np.ndarray,
    result_RC: np.ndarray,
    is_here: list[bool],
    num_k: int,
    writes_kv: bool,
    is_dropped_R: np.ndarray | None,
) -> None:
    """Append the tokens to the host's rows, and set how many tokens of each row have KV."""
    if not all(is_here):
        row_R, result_RC = row_R[is_here], result_RC[is_here]
        is_dropped_R = None if is_dropped_R is None else is_dropped_R[is_here]
        if not len(row_R):
            return
    known_R = result_RC[:, KNOWN]
    first_R1 = (known_R - result_RC[:, TOKENS])[:, None]
    # What a row did not commit is written too, after its known tokens, where nobody reads it.
    rows.tokens[row_R[:, None], first_R1 + np.arange(num_k)] = result_RC[:, FIRST : FIRST + num_k]
    rows.known[row_R] = known_R
    rows.computed[0, row_R] = known_R - 1
    if writes_kv and len(rows.computed) > 1:
        if is_dropped_R is not None:
            row_R, known_R = row_R[~is_dropped_R], known_R[~is_dropped_R]
        rows.computed[1:, row_R] = np.maximum(rows.computed[1:, row_R], known_R - 1)
