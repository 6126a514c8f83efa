"""A drafter's own KV: which positions of each row it covers, and how a network reads them.

Shape letters: X rows of the engine, R rows of this step, T packed tokens, B blocks, P tree depth.

A network is trained up to some context and draws nonsense past it. So each row has a window that
starts at a block's edge, `first`; the network counts positions from there. When the window is full
it starts anew half a window back. Rows whose window does not start at 0 publish no KV.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Rows
from hunch.kernels.attention import AttnInputs, KVCache, Span
from hunch.spec.base import DrafterContext

MAX_PASS = 512  # tokens one catching-up pass of a drafter takes

Array = np.ndarray


def host(tensor: Tensor) -> Array:
    """The values on the host; on a CPU the same memory, so writing to it is writing to the rows."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()


class KvWindow:
    """Per row: KV of positions [first, valid) belongs to the tokens now decided."""

    def __init__(self, context: DrafterContext, limit: int) -> None:
        self.context, self.limit = context, limit
        self.first_X = np.zeros(context.max_rows, dtype=np.int64)
        self.valid_X = np.full(context.max_rows, -1, dtype=np.int64)  # -1: a row not met yet

    @property
    def kv(self) -> KVCache:
        assert self.context.kv is not None, "the runner gives the KV before the first step"
        return self.context.kv

    def meet(self, rows: Rows, ids_R: Array) -> None:
        """Rows that are new, or back from preemption, bring what their blocks already hold."""
        new_R = ids_R[self.valid_X[ids_R] < 0]
        if len(new_R):
            self.first_X[new_R] = 0
            self.valid_X[new_R] = host(rows.computed_GX)[self.context.group, new_R]

    def drop(self, rows: list[int]) -> None:
        self.valid_X[rows] = -1

    def settle(self, rows: Rows, row: int, valid: int) -> None:
        """KV is now right below `valid`; say so to the engine if nothing is missing before it."""
        self.valid_X[row] = valid
        if self.first_X[row] == 0:
            rows.computed_GX[self.context.group, row] = valid

    def resume(self, rows: Rows, row: int, stop: int) -> int:
        """Where to go on so that [first, stop) is covered, from tokens alone."""
        if stop - self.first_X[row] > self.limit:
            self._restart(rows, row, stop - self.limit // 2)
        return int(self.valid_X[row])

    def resume_from(self, rows: Rows, row: int, start: int, stop: int, total: int) -> int:
        """Where to go on when features exist for [start, stop) only, of `total` tokens known.

        What is returned may lie up to a block before `start`: a window starts at a block's edge,
        and positions without a feature there borrow the first one. `stop` or more: nothing to do.
        """
        earliest = start
        if total - self.first_X[row] > self.limit:
            if stop <= total - self.limit // 2:
                return stop  # a long prompt: this part will lie before the window
            earliest = max(start, total - self.limit // 2)
        elif self.valid_X[row] >= start:
            return int(self.valid_X[row])
        self._restart(rows, row, earliest)
        return int(self.valid_X[row])

    def _restart(self, rows: Rows, row: int, first: int) -> None:
        self.first_X[row] = self.valid_X[row] = first - first % rows.block_size

    def slots(self, rows: Rows, row_T: Array, pos_T: Array) -> Array:
        blocks_T = host(rows.table_XB)[row_T, pos_T // rows.block_size]
        return np.asarray(blocks_T * rows.block_size + pos_T % rows.block_size)

    def spans(self, rows: Rows, parts: list[tuple[int, int, int]]) -> AttnInputs:
        """Inputs for known tokens: (row, start, stop) per part, packed in that order."""
        counts = [stop - start for _, start, stop in parts]
        if len(parts) == 1:
            row, start, stop = parts[0]
            pos_T = np.arange(start, stop)
            row_T = np.full(stop - start, row)
        else:
            pos_T = np.concatenate([np.arange(start, stop) for _, start, stop in parts])
            row_T = np.repeat([row for row, _, _ in parts], counts)
        spans, last = [], 0
        for (row, start, _), count in zip(parts, counts, strict=True):
            spans.append(Span(last, last + count, row, start - int(self.first_X[row]), count))
            last += count
        slot_T = self.slots(rows, row_T, pos_T)
        return self._inputs(rows, row_T, pos_T, slot_T, None, None, tuple(spans))

    def nodes(
        self, rows: Rows, row_T: Array, base_T: Array, path_TP: Array, is_tree: bool
    ) -> AttnInputs:
        """Inputs for drafted nodes: node with path (a, b, self) sits in slot base + self.

        `base` is the position of depth 0. Nodes of one row stand together.
        """
        depth = path_TP.shape[1] - 1
        pos_T = base_T + depth
        slot_TP = self.slots(rows, row_T[:, None], base_T[:, None] + path_TP)
        slot_T = np.ascontiguousarray(slot_TP[:, -1])
        first_X, spans, last = self.first_X, [], 0
        edges = [*(np.flatnonzero(np.diff(row_T)) + 1).tolist(), len(row_T)]
        for edge in edges:
            row = int(row_T[last])
            start = int(pos_T[last] - first_X[row])
            num_known = 0 if is_tree else edge - last
            spans.append(Span(last, edge, row, start, num_known, is_tree))
            last = edge
        tree = (base_T, np.ascontiguousarray(slot_TP)) if is_tree else (None, None)
        return self._inputs(rows, row_T, pos_T, slot_T, *tree, tuple(spans))

    def _inputs(
        self,
        rows: Rows,
        row_T: Array,
        pos_T: Array,
        slot_T: Array,
        base_T: Array | None,
        tree_TP: Array | None,
        spans: tuple[Span, ...],
    ) -> AttnInputs:
        first_T = self.first_X[row_T]
        table_SB = rows.table_XB
        if first_T.any():
            table_SB = self._shifted(rows, row_T)
            pos_T = pos_T - first_T
            base_T = base_T - first_T if base_T is not None else None
        put = self._put
        return AttnInputs(
            pos_T=put(pos_T),
            slot_T=put(slot_T),
            seq_T=put(row_T),
            table_SB=table_SB,
            base_T=put(pos_T + 1 if base_T is None else base_T),
            tree_TP=None if tree_TP is None else put(tree_TP),
            block_size=rows.block_size,
            spans=spans,
        )

    def _shifted(self, rows: Rows, row_T: Array) -> Tensor:
        """Block tables that begin where each row's window does."""
        table_XB = host(rows.table_XB)
        shifted_XB = table_XB.copy()
        for row in np.unique(row_T).tolist():
            skipped = int(self.first_X[row]) // rows.block_size
            if skipped:
                shifted_XB[row, :-skipped] = table_XB[row, skipped:]
        return self._put(shifted_XB)

    def _put(self, array: Array) -> Tensor:
        tensor = torch.from_numpy(array)
        device = self.context.device
        return tensor if device.type == "cpu" else tensor.to(device)

    def move(self, source_P: Array, target_P: Array) -> None:
        """Bring an accepted path's KV to the slots of its positions."""
        moved = source_P != target_P
        if moved.any():
            source, target = self._put(source_P[moved]), self._put(target_P[moved])
            self.kv.k_LCMH[:, target] = self.kv.k_LCMH[:, source]
            self.kv.v_LCMH[:, target] = self.kv.v_LCMH[:, source]
