"""The chain of a single row, drafted by the kernels in one call.

Shape letters: X rows of the engine, B blocks, N nodes, T tokens.

On a CPU one row's step takes milliseconds, and what Python does between two tokens would be felt:
this keeps the arrays behind the rows, and asks for nothing twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft, Rows
from hunch.kernels.attention import KVCache
from hunch.kernels.native import NativeNetwork
from hunch.kernels.native_draft import NativeChain
from hunch.kernels.noise import TARGET
from hunch.spec.base import DrafterContext
from hunch.spec.judge import Array, Shape
from hunch.spec.window import KvWindow, host


class HostRows:
    """The arrays behind a view of the rows; the same view comes back step after step."""

    def __init__(self) -> None:
        self.rows: Rows | None = None

    def read(self, rows: Rows) -> HostRows:
        if rows is not self.rows or rows.ids_R.device.type != "cpu":
            self.rows = rows
            self.ids_R = host(rows.ids_R)
            self.ids: list[int] = self.ids_R.tolist()
            self.tokens_XL, self.known_X = host(rows.tokens_XL), host(rows.known_X)
            self.table_XB, self.max_draft_X = host(rows.table_XB), host(rows.max_draft_X)
        return self


class ChainDrafts:
    """Whole chains for steps of one row."""

    def __init__(
        self,
        network: NativeNetwork,
        context: DrafterContext,
        window: KvWindow,
        *,
        temperature: float | None,  # in place of the row's, where it is above 0
        ids_C: Tensor | None = None,
        num_columns: int | None = None,
    ) -> None:
        self.context, self.window, self.temperature = context, window, temperature
        self.chain = NativeChain(network, ids_C, num_columns)
        self._offset = np.arange(64)
        self._placed: tuple[Tensor | None, KVCache | None] = (None, None)
        self._asked: tuple[Any, ...] = ()
        sampling = context.sampling
        self._columns = [
            column.numpy()
            for column in (
                sampling.temperature_X,
                sampling.top_k_X,
                sampling.top_p_X,
                sampling.log_min_p_X,
                sampling.seed_X,
                sampling.sample_X,
            )
        ]
        self._parents: dict[int, Tensor] = {}

    @staticmethod
    def fit(shape: Shape, context: DrafterContext) -> bool:
        """Whether the kernels draft what the options ask for."""
        is_plain = shape.is_chain and not shape.is_fixed and shape.min_confidence <= 0
        is_here = context.device.type == "cpu" and not context.sampling.is_dense
        return is_plain and is_here and not context.wants_q

    def draft(
        self,
        rows: Rows,
        arrays: HostRows,
        start: Tensor | Array,
        first: int,
        position: int,
        limit: int,
    ) -> tuple[Draft, list[int]]:
        """At most `limit` nodes; `start` is a state, or tokens from position `first` on."""
        if limit <= 0:
            return Draft.empty(1), []
        row = arrays.ids[0]
        self._place(rows, row)
        self._ask(row)
        num_known = 0 if isinstance(start, Tensor) else len(start)
        tokens = self.chain.run(
            row,
            start,
            self._slots(arrays, row, first, num_known + limit),
            first_pos=first - int(self.window.first_X[row]),
            position=position,
            num_tokens=limit,
        )
        return Draft(torch.tensor([tokens]), *self._shape(limit)), tokens

    def _slots(self, arrays: HostRows, row: int, first: int, count: int) -> Array:
        """Slots of `count` positions; the last node may stand past the end, it is not written."""
        assert arrays.rows is not None
        block_size = arrays.rows.block_size
        if len(self._offset) < count:
            self._offset = np.arange(2 * count)
        table_B = arrays.table_XB[row]
        block, offset = divmod(first, block_size)
        if offset + count <= block_size:
            return np.asarray(int(table_B[block]) * block_size + offset + self._offset[:count])
        position = np.minimum(first + self._offset[:count], len(table_B) * block_size - 1)
        return np.asarray(table_B[position // block_size] * block_size + position % block_size)

    def _place(self, rows: Rows, row: int) -> None:
        """Tell the kernels where the KV is, if that is news; a window that moved always is."""
        is_moved = self.window.first_X[row] != 0
        table_XB, kv = self._placed
        if is_moved or table_XB is not rows.table_XB or kv is not self.window.kv:
            table = self.window.table(rows, np.array([row]))
            self.chain.place(self.window.kv, table, rows.block_size)
            self._placed = (None, None) if is_moved else (rows.table_XB, self.window.kv)

    def _ask(self, row: int) -> None:
        asked = tuple(column[row].item() for column in self._columns)
        if asked != self._asked:
            temperature, top_k, top_p, log_min_p, seed, index = self._asked = asked
            if self.temperature is not None and temperature > 0:
                temperature = self.temperature
            self.chain.choose_by(temperature, top_k, top_p, log_min_p, seed, index, TARGET)

    def _shape(self, limit: int) -> tuple[Tensor, Tensor]:
        if limit not in self._parents:
            self._parents[limit] = torch.arange(-1, limit - 1)[None]
        return self._parents[limit], torch.tensor([limit])
