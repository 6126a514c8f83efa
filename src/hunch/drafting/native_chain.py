"""The chain of a single row, drafted by the kernels in one call.

Shape letters: X rows of the engine, B blocks, N nodes, T tokens.

On a CPU a step of one row takes milliseconds, so Python's work between two tokens counts. That is
why arrays and addresses are kept from step to step here.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hunch.draft import Draft, Rows
from hunch.drafting.base import DrafterContext
from hunch.drafting.tree_shape import TreeShape
from hunch.drafting.trees import ReusedDraft
from hunch.drafting.window import KvWindow, RowArrays
from hunch.kernels.kv_store import KVCache, write_slots
from hunch.kernels.native import NativeNetwork
from hunch.kernels.native_draft import NativeChain
from hunch.kernels.noise import TARGET
from hunch.types import Request


class ChainDrafts:
    """Drafts whole chains in steps of one row."""

    def __init__(
        self,
        network: NativeNetwork,
        context: DrafterContext,
        window: KvWindow,
        *,
        temperature: float | None,  # instead of the row's, unless that is 0
        ids_C: Tensor | None = None,
        num_columns: int | None = None,
    ) -> None:
        self.context, self.window, self.temperature = context, window, temperature
        self.chain = NativeChain(network, ids_C, num_columns)
        self._offset, self._slot = np.arange(0), np.arange(0)
        self._slots_address = 0
        self._placed: tuple[Tensor | None, KVCache | None] = (None, None)
        self._columns = [column.numpy() for column in context.sampling.columns_X]
        self._request: Request | None = None  # whose sampling parameters the kernels have
        self._drafts: dict[tuple[int, int], ReusedDraft] = {}  # by row, as a draft may be waiting

    @staticmethod
    def fit(shape: TreeShape, context: DrafterContext) -> bool:
        """Whether the kernels can make such drafts."""
        is_plain = shape.is_chain and not shape.is_fixed and shape.min_confidence <= 0
        is_here = context.device.type == "cpu" and not context.sampling.is_dense
        return is_plain and is_here and not context.wants_q

    def takes(self, rows: list[int]) -> bool:
        """Whether there is a single row, without rules: the kernels know sampling alone."""
        return len(rows) == 1 and not self.context.sampling.has_rules(rows[0])

    def draft(
        self,
        rows: Rows,
        arrays: RowArrays,
        first: int,
        position: int,
        limit: int,
        state_1D: Tensor | None = None,
    ) -> tuple[Draft, list[int]]:
        """A chain of at most `limit` nodes from `position` on.

        It starts from the state of the token at `first` or, without one, processes the tokens from
        there on.
        """
        if limit <= 0:
            return Draft.empty(1), []
        row = arrays.ids[0]
        self._place(rows, row)
        self._ask(rows, row)
        reused = self._drafts.get((row, limit))
        if reused is None:
            reused = self._drafts[row, limit] = ReusedDraft(limit)
        num_known = position - first if state_1D is None else 0
        self._find_slots(arrays, row, first, num_known + limit)
        self.chain.run(
            row,
            state_1D=state_1D,
            known=arrays.address(row, first),
            num_known=num_known,
            slots=self._slots_address,
            first_pos=first - int(self.window.first_X[row]),
            position=position,
            num_tokens=limit,
            out=reused.address,
        )
        return reused.draft, reused.tokens_N.tolist()

    def _find_slots(self, arrays: RowArrays, row: int, first: int, count: int) -> None:
        """Slots of `count` positions; the last may be past the end, as its KV is not written."""
        assert arrays.rows is not None
        if len(self._slot) < count:
            self._offset, self._slot = np.arange(2 * count), np.arange(2 * count)
            self._slots_address = self._slot.ctypes.data
        table_B, size = arrays.table_XB[row], arrays.rows.block_size
        write_slots(table_B, first, size, self._offset, self._slot[:count])

    def _place(self, rows: Rows, row: int) -> None:
        """Tell the kernels where the KV is, if that changed; it has, if the window moved."""
        is_moved = self.window.first_X[row] != 0
        table_XB, kv = self._placed
        if is_moved or table_XB is not rows.table_XB or kv is not self.window.kv:
            table = self.window.table(rows, np.array([row]))
            self.chain.place(self.window.kv, table, rows.block_size)
            self._placed = (None, None) if is_moved else (rows.table_XB, self.window.kv)

    def _ask(self, rows: Rows, row: int) -> None:
        """Give the kernels the sampling parameters, if the row has a new request."""
        request = rows.request(row)
        if request is not None and request is self._request:
            return
        self._request = request
        asked = [column[row].item() for column in self._columns]
        temperature, top_k, top_p, log_min_p, seed, index = asked
        if self.temperature is not None and temperature > 0:
            temperature = self.temperature
        self.chain.choose_by(temperature, top_k, top_p, log_min_p, seed, index, TARGET)
