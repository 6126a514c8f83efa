"""A drafter's own KV: which positions of each row it covers, and how a network reads them.

Shape letters: X rows of the engine, R rows of this step, T packed tokens, B blocks, P tree depth.

A network is trained up to some context, and guesses worse past it. So each row has a window that
starts at a block's edge, `first`; the network counts positions from there. When the window is full,
it moves to start half a window back. Rows whose window does not start at 0 publish no KV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Rows
from hunch.drafting.base import DrafterContext
from hunch.drafting.tree_shape import Level, TreeShape
from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.kv_store import KVCache, slots_at

MAX_PASS = 512  # tokens of one pass in which a drafter catches up

Array = np.ndarray
Parts = list[tuple[int, int, int]]  # known tokens of rows: row, start, stop


def host(tensor: Tensor) -> Array:
    """The values on the host; on a CPU the same memory, so that writes change the tensor."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor.cpu().numpy()


def put(array: Array, device: torch.device) -> Tensor:
    """The values on a device, without waiting for what it does now; on a CPU the same memory."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class RowArrays:
    """The rows' tensors as arrays, kept as long as the view of the rows is the same."""

    def __init__(self) -> None:
        self.rows: Rows | None = None

    def read(self, rows: Rows) -> RowArrays:
        if rows is not self.rows:
            self.rows = rows
            self.ids_R = rows.ids_R.numpy()
            self.ids: list[int] = self.ids_R.tolist()
            self.tokens_XL, self.known_X = rows.tokens_XL.numpy(), rows.known_X.numpy()
            self.table_XB, self.max_draft_X = rows.table_XB.numpy(), rows.max_draft_X.numpy()
            assert self.tokens_XL.strides[1] == 8
            self._tokens_at: int = self.tokens_XL.ctypes.data
            self._tokens_step = self.tokens_XL.strides[0]
        return self

    def address(self, row: int, position: int) -> int:
        """The address of a row's token in memory."""
        return self._tokens_at + row * self._tokens_step + 8 * position


class NewTokens(RowArrays):
    """Which tokens of each row a method has not yet seen."""

    def __init__(self) -> None:
        super().__init__()
        self._have: dict[int, int] = {}

    def take(self, rows: Rows, ids: list[int]) -> Iterator[tuple[int, int, int]]:
        """The rows with new tokens, and the positions of these: row, first, end."""
        self.read(rows)
        for row in ids:
            have, known = self._have.get(row, 0), int(self.known_X[row])
            if known > have:
                self._have[row] = known
                yield row, have, known

    def forget(self, row: int) -> None:
        self._have.pop(row, None)

    def forget_all(self) -> None:
        self._have.clear()


class KvWindow:
    """Per row: positions [first, valid) have the KV of the row's known tokens."""

    def __init__(self, context: DrafterContext, limit: int) -> None:
        self.context, self.limit = context, limit
        self.first_X = np.zeros(context.max_rows, dtype=np.int64)
        self.valid_X = np.full(context.max_rows, -1, dtype=np.int64)  # -1: a new row

    def most(self, block_size: int) -> int:
        """The most positions that `resume` leaves in a window."""
        if self.context.max_len <= self.limit:
            return self.context.max_len
        return max(self.limit, self._num_kept + block_size - 1)

    @property
    def _num_kept(self) -> int:
        """Positions that a new window has at least."""
        return max(self.limit // 2, 1)

    @property
    def kv(self) -> KVCache:
        assert self.context.kv is not None, "the runner gives the KV before the first step"
        return self.context.kv

    def add_new(self, rows: Rows, ids_R: Array) -> None:
        """Rows that are new, or were preempted, start with the KV that their blocks hold."""
        if len(ids_R) == 1 and self.valid_X[ids_R[0]] >= 0:  # most steps of one row
            return
        new_R = ids_R[self.valid_X[ids_R] < 0]
        if len(new_R):
            self.first_X[new_R] = 0
            self.valid_X[new_R] = rows.computed_GX.numpy()[self.context.group, new_R]

    def drop(self, rows: list[int]) -> None:
        self.valid_X[rows] = -1

    def mark_valid(self, rows: Rows, row: int, valid: int) -> None:
        """KV is valid below `valid`; tell the engine, if nothing is missing before it."""
        self.valid_X[row] = valid
        if self.first_X[row] == 0:
            rows.computed_GX.numpy()[self.context.group, row] = valid

    def resume(self, rows: Rows, row: int, stop: int) -> int:
        """The position to continue at to cover [first, stop), for a network that needs tokens."""
        if stop - self.first_X[row] > self.limit:
            self._restart(rows, row, stop - self._num_kept)
        return int(self.valid_X[row])

    def resume_from(self, rows: Rows, row: int, start: int, stop: int, total: int) -> int:
        """The position to continue at, if features exist for [start, stop) of `total` known tokens.

        It may be up to a block before `start`: a window starts at a block's edge, and positions
        without a feature take the first one. `stop` or more: nothing to do.
        """
        earliest = start
        if total - self.first_X[row] > self.limit:
            if stop <= total - self.limit // 2:
                return stop  # a long prompt: this part will be before the window
            earliest = max(start, total - self.limit // 2)
        elif self.valid_X[row] >= start:
            return int(self.valid_X[row])
        self._restart(rows, row, earliest)
        return int(self.valid_X[row])

    def _restart(self, rows: Rows, row: int, first: int) -> None:
        self.first_X[row] = self.valid_X[row] = first - first % rows.block_size

    def slots(self, rows: Rows, row_T: Array, pos_T: Array) -> Array:
        return np.asarray(slots_at(rows.table_XB.numpy(), row_T, pos_T, rows.block_size))

    def spans(self, rows: Rows, parts: Parts) -> AttnInputs:
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

    def levels(
        self, rows: Rows, row_R: Array, base_R: Array, shape: TreeShape
    ) -> Callable[[Level], AttnInputs]:
        """Attention inputs for each level of drafts whose depth 0 is at `base_R`."""
        if shape.is_dynamic:
            return lambda level: self.nodes(
                rows, row_R[level.place_M], base_R[level.place_M], level.path_MP
            )
        chain = ChainInputs(self, rows, row_R, base_R, shape.depth)
        return lambda level: chain.level(level.path_MP.shape[1] - 1, level.place_M)

    def nodes(self, rows: Rows, row_T: Array, base_T: Array, path_TP: Array) -> AttnInputs:
        """Inputs for nodes of a tree: node n has the slot of position base + n.

        A path ends with the node itself. `base` is the position of depth 0. Nodes of a row are
        packed together.
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
            spans.append(Span(last, edge, row, start, 0, True))
            last = edge
        tree_TP = np.ascontiguousarray(slot_TP)
        return self._inputs(rows, row_T, pos_T, slot_T, base_T, tree_TP, tuple(spans))

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
        pos_T = pos_T - first_T
        base_T = pos_T + 1 if base_T is None else base_T - first_T
        put = self.put
        return AttnInputs(
            pos_T=put(pos_T),
            slot_T=put(slot_T),
            seq_T=put(row_T),
            table_SB=self.table(rows, row_T),
            base_T=put(base_T),
            tree_TP=None if tree_TP is None else put(tree_TP),
            block_size=rows.block_size,
            spans=spans,
        )

    def _shifted(self, rows: Rows, row_T: Array) -> Tensor:
        """Block tables that begin at each row's window."""
        table_XB = rows.table_XB.numpy()
        shifted_XB = table_XB.copy()
        for row in np.unique(row_T).tolist():
            skipped = int(self.first_X[row]) // rows.block_size
            if skipped:
                shifted_XB[row, :-skipped] = table_XB[row, skipped:]
        return self.put(shifted_XB)

    def put(self, array: Array) -> Tensor:
        return put(array, self.context.device)

    def table(self, rows: Rows, row_T: Array) -> Tensor:
        """Block tables for positions as the network counts them, indexed by row."""
        if self.first_X[row_T].any():
            return self._shifted(rows, row_T)
        if self.context.device.type == "cpu":
            return rows.table_XB
        return self.put(rows.table_XB.numpy()[: int(row_T.max()) + 1])  # later rows are not read


class ChainInputs:
    """Inputs for all levels of a step's chains, made at once: a level is one token per row."""

    def __init__(
        self, window: KvWindow, rows: Rows, row_R: Array, base_R: Array, depth: int
    ) -> None:
        pos_DR = base_R + np.arange(depth)[:, None]
        # Rows may end at different depths: they are not asked for later levels.
        last = rows.table_XB.shape[1] * rows.block_size - 1
        slot_DR = window.slots(rows, row_R, np.minimum(pos_DR, last))
        pos_DR = pos_DR - window.first_X[row_R]
        self.rows_R, self.pos = row_R.tolist(), pos_DR.tolist()
        # One unbind takes less time than an index per level.
        self.pos_DR, self.base_DR = window.put(pos_DR).unbind(), window.put(pos_DR + 1).unbind()
        self.slot_DR, self.seq_R = window.put(slot_DR).unbind(), window.put(row_R)
        self.table_SB, self.block_size = window.table(rows, row_R), rows.block_size
        self.put = window.put

    def level(self, depth: int, place_M: Array) -> AttnInputs:
        """The token at `depth` of each of these rows."""
        pos_M, slot_M, base_M = self.pos_DR[depth], self.slot_DR[depth], self.base_DR[depth]
        seq_M, pos = self.seq_R, self.pos[depth]
        if len(place_M) < len(self.rows_R):
            at_M = self.put(np.ascontiguousarray(place_M))
            pos_M, slot_M, seq_M, base_M = (x[at_M] for x in (pos_M, slot_M, seq_M, base_M))
        places = enumerate(place_M.tolist())
        spans = tuple([Span(m, m + 1, self.rows_R[p], pos[p], 1) for m, p in places])
        tables = self.table_SB, base_M, None, self.block_size
        return AttnInputs(pos_M, slot_M, seq_M, *tables, spans)


def in_passes(parts: Parts) -> list[Parts]:
    """The parts cut into passes of a bounded size, in order."""
    passes: list[Parts] = [[]]
    room = MAX_PASS
    for row, start, stop in parts:
        while start < stop:
            if room == 0:
                passes.append([])
                room = MAX_PASS
            end = min(stop, start + room)
            passes[-1].append((row, start, end))
            room -= end - start
            start = end
    return passes
