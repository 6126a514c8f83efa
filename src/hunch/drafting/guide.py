"""Chains of suffix lookup for a drafter's rows: by the C++ kernels where the target runs on them.

Shape letters: X rows of the engine, L longest sequence, N nodes, R rows of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft, Rows
from hunch.drafting.base import DrafterContext
from hunch.kernels.guided import GuidedLookup
from hunch.kernels.native_lookup import NativeLookup
from hunch.kernels.phrases import PhraseTable


class Guide:
    """Keeps up with rows and guesses for them; asks nothing of the tensors twice."""

    def __init__(
        self,
        own_odds: Sequence[float],
        table: PhraseTable | None,
        num_nodes: int,
        context: DrafterContext,
    ) -> None:
        self.num_nodes, self.device = num_nodes, context.device
        self._is_host = context.device.type == "cpu"
        self._have: dict[int, int] = {}  # tokens of each row that were followed
        self._rows: Rows | None = None
        self._ids_R: Tensor | None = None
        self._drafts: dict[tuple[int, int], tuple[np.ndarray, Draft]] = {}  # by row and length
        self.native: NativeLookup | None = None
        self.plain: GuidedLookup | None = None
        self._own_odds, self._max_rows = own_odds, context.max_rows
        self._is_native = context.target.backend.has_host_kernels
        self.take(table)

    def take(self, table: PhraseTable | None) -> None:
        """Guess with this table from now on; rows are followed anew from their first token."""
        self._have.clear()
        if self._is_native:
            self.native = NativeLookup(self._own_odds, table, self._max_rows, self.num_nodes)
        else:
            self.plain = GuidedLookup(self._own_odds, table)

    def ids(self, rows: Rows) -> list[int]:
        """The rows of the step; mostly those of the step before."""
        if rows.ids_R is not self._ids_R:
            self._ids_R, self._ids = rows.ids_R, rows.ids_R.tolist()
        return self._ids

    def limit(self, rows: Rows, row: int) -> int:
        """Most nodes the row may draft."""
        if rows is not self._rows:
            self._read(rows)
        return int(rows.max_draft_X[row] if self._max_draft_X is None else self._max_draft_X[row])

    def _read(self, rows: Rows) -> None:
        self._rows = rows
        is_host = rows.known_X.device.type == "cpu"
        self._known_X = rows.known_X.numpy() if is_host else None
        self._max_draft_X = rows.max_draft_X.numpy() if is_host else None
        self._tokens_at, self._stride = rows.tokens_XL.data_ptr(), rows.tokens_XL.stride(0)

    def follow(self, rows: Rows, ids: list[int]) -> None:
        """Catch up with the tokens of these rows."""
        if rows is not self._rows:
            self._read(rows)
        known_X = rows.known_X.tolist() if self._known_X is None else self._known_X
        for row in ids:
            have, known = self._have.get(row, 0), int(known_X[row])
            if known <= have:
                continue
            self._have[row] = known
            if self.native is not None:
                address = self._tokens_at + 8 * (row * self._stride + have)
                self.native.follow(row, address, known - have)
            elif self.plain is not None:
                self.plain.follow(row, rows.tokens_XL[row, have:known].tolist())

    def guess(self, row: int, limit: int) -> tuple[list[int], list[float]]:
        """Tokens that may follow, and the chances of the paths to them, falling."""
        if self.native is not None:
            count = self.native.guess(row, limit)
            return self.native.tokens_N[:count].tolist(), self.native.chance_N[:count].tolist()
        assert self.plain is not None
        return self.plain.guess(row, min(limit, self.num_nodes))

    def draft(self, row: int, limit: int, count_of: Callable[[list[float]], int]) -> Draft:
        """The draft of a step's only row, as many nodes as `count_of` their chances says.

        It holds until the row is drafted for again.
        """
        tokens: list[int] | np.ndarray
        if self.native is not None:
            found = self.native.guess(row, limit)
            count = count_of(self.native.chance_N[:found].tolist())
            tokens = self.native.tokens_N[:count]
        else:
            tokens, chances = self.guess(row, limit)
            count = count_of(chances)
            tokens = tokens[:count]
        reused = self._drafts.get((row, count))
        if reused is None:
            reused = self._drafts[row, count] = self._new_draft(count)
        reused[0][:] = tokens
        return reused[1] if self._is_host else reused[1].to(self.device)

    def _new_draft(self, num_nodes: int) -> tuple[np.ndarray, Draft]:
        tokens_N, parents_N = np.zeros(num_nodes, np.int64), np.arange(-1, num_nodes - 1)
        tokens_1N, parents_1N = torch.from_numpy(tokens_N)[None], torch.from_numpy(parents_N)[None]
        draft = Draft(tokens_1N, parents_1N, torch.tensor([num_nodes]))
        if num_nodes:
            draft.arrays = ((tokens_N, parents_N),)
        return tokens_N, draft

    def forget(self, row: int) -> None:
        self._have.pop(row, None)
        if self.native is not None:
            self.native.forget(row)
        elif self.plain is not None:
            self.plain.forget(row)
