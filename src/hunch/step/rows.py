"""The host's rows: their state, the request in each, and the drafts that wait on the host.

On a CPU this is the state that steps work on. On a GPU steps have a copy of it (`upload`).

Shape letters: X rows of the engine, L longest sequence, B blocks of a table, G KV groups, N nodes.
The numpy views share the tensors' memory: scalar work on them costs a tenth of torch's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft, Rows
from hunch.kernels.kv_store import slots_at
from hunch.kernels.step import MAX_STOPS, RowState
from hunch.types import Capacity, Request, RowStart

MAX_STAGED = 64  # tokens of a step whose columns are kept for the next one


class Nodes(NamedTuple):
    """One row's draft. Parents come before children, so that its first nodes are a draft too."""

    tokens_N: np.ndarray
    parents_N: np.ndarray
    q_NV: Tensor | None = None
    is_sampled_N: Tensor | None = None
    method: str = ""  # the method that drafted it

    def take(self, places: slice | list[int]) -> Nodes:
        """Some of the nodes; their parents stay what they are."""
        q_NV, is_sampled_N = self.q_NV, self.is_sampled_N
        return Nodes(
            self.tokens_N[places],
            self.parents_N[places],
            None if q_NV is None else q_NV[places],
            None if is_sampled_N is None else is_sampled_N[places],
            self.method,
        )

    def chain(self) -> Nodes:
        """The first node, its first child, and so on: all that a recurrent target can check."""
        path: list[int] = []
        for node, parent in enumerate(self.parents_N.tolist()):
            if parent == (path[-1] if path else -1):
                path.append(node)
        if len(path) == len(self.parents_N):
            return self
        return self.take(path)._replace(parents_N=np.arange(-1, len(path) - 1))


NOTHING = Nodes(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


class Stage:
    """Columns of a packed step: as arrays to fill, and as the tensors that share their memory."""

    COLUMNS = 5  # ids, positions, slots, sequences, bases

    def __init__(self, num_tokens: int) -> None:
        self.packed_5T = np.empty((self.COLUMNS, num_tokens), dtype=np.int64)
        self.arrays = tuple(self.packed_5T)
        self.tensors = tuple(map(torch.from_numpy, self.arrays))


class RowBuffers:
    """One row per running request."""

    def __init__(self, capacity: Capacity) -> None:
        num_rows, room = capacity.max_rows, capacity.max_len + capacity.max_nodes + 1
        max_blocks = -(-room // capacity.block_size) + 1
        self.block_size = capacity.block_size
        self.has_recurrent_states = capacity.has_recurrent_states
        self._only_method = next(iter(capacity.methods), "")
        max_nodes = max(capacity.max_nodes, 1)
        self.state = state = RowState.create(
            num_rows, room, max_blocks, max_nodes, MAX_STOPS, capacity.block_size, "cpu"
        )
        self.prompt_X = torch.zeros(num_rows, dtype=torch.int64)
        self.computed_GX = torch.zeros(len(capacity.groups), num_rows, dtype=torch.int64)
        self.max_draft_X = torch.zeros(num_rows, dtype=torch.int64)
        self.tokens, self.known = state.tokens_XL.numpy(), state.known_X.numpy()
        self.end, self.table = state.end_X.numpy(), state.table_XB.numpy()
        self.stops, self.is_done = state.stop_XS.numpy(), state.is_done_X.numpy()
        self.computed, self.max_draft = self.computed_GX.numpy(), self.max_draft_X.numpy()
        self._prompt = self.prompt_X.numpy()
        self.num_blocks = [0] * num_rows
        self.requests: list[Request | None] = [None] * num_rows  # None: free, or finished
        self.drafts: list[Nodes | None] = [None] * num_rows
        self.tables_1B = list(state.table_XB[:, None])  # one per row
        self.rows_1 = list(torch.arange(num_rows)[:, None]) if self.has_recurrent_states else []
        self.positions = np.arange(room)
        self._views: dict[int, tuple[list[int], Rows]] = {}  # the last of each number of rows
        self._stages: dict[int, Stage] = {}

    def start(self, start: RowStart) -> None:
        row, request, num_known = start.row, start.request, len(start.tokens)
        self.tokens[row, :num_known] = start.tokens
        self.known[row] = num_known
        self._prompt[row] = len(request.prompt_ids)
        self.end[row] = len(request.prompt_ids) + request.max_tokens
        stops = list(request.stop_ids)[:MAX_STOPS]  # the host looks for further ones
        self.stops[row, : len(stops)], self.stops[row, len(stops) :] = stops, -1
        self.is_done[row] = 0
        self.computed[:, row] = start.num_computed
        self.max_draft[row] = 0
        self.num_blocks[row] = 0
        self.requests[row] = request
        self.drafts[row] = None
        self.add_blocks(row, start.blocks)

    def add_blocks(self, row: int, blocks: list[int] | tuple[int, ...]) -> None:
        first = self.num_blocks[row]
        self.table[row, first : first + len(blocks)] = blocks
        self.num_blocks[row] = first + len(blocks)

    def leave(self, row: int) -> None:
        self.requests[row] = None
        self.drafts[row] = None
        self.is_done[row] = 1

    def commit(self, row: int, tokens: list[int]) -> None:
        """Append decided tokens. The last of them has no KV yet."""
        first = int(self.known[row])
        self.tokens[row, first : first + len(tokens)] = tokens
        self.known[row] = first + len(tokens)

    def slots(self, row: int, first: int, last: int) -> np.ndarray:
        """The KV slots of positions [first, last)."""
        positions = self.positions[first:last]
        return np.asarray(slots_at(self.table, row, positions, self.block_size))

    def stage(self, num_tokens: int) -> Stage:
        """Columns for `num_tokens`; the next small step of the same size overwrites them."""
        if num_tokens > MAX_STAGED:
            return Stage(num_tokens)
        if num_tokens not in self._stages:
            self._stages[num_tokens] = Stage(num_tokens)
        return self._stages[num_tokens]

    def view(self, rows: list[int]) -> Rows:
        """What drafters and verifiers see of these rows; kept for a next step of the same rows."""
        kept = self._views.get(len(rows))
        if kept is not None and kept[0] == rows:
            return kept[1]
        view = Rows(
            ids_R=torch.from_numpy(np.array(rows, dtype=np.int64)),
            tokens_XL=self.state.tokens_XL,
            known_X=self.state.known_X,
            prompt_X=self.prompt_X,
            end_X=self.state.end_X,
            computed_GX=self.computed_GX,
            table_XB=self.state.table_XB,
            max_draft_X=self.max_draft_X,
            block_size=self.block_size,
            requests=self.requests,
        )
        self._views[len(rows)] = rows, view
        return view

    def put_drafts(self, rows: list[int], draft: Draft) -> list[int]:
        """Keep the rows' drafts for their next step; returns how many nodes each has."""
        if draft.arrays is not None and len(rows) == 1:  # without reading tensors
            return [self._put(rows[0], Nodes(*draft.arrays[0]), draft, 0)]
        if not draft.tokens_RN.shape[1]:
            for row in rows:
                self.drafts[row] = None
            return [0] * len(rows)
        draft = draft.to(torch.device("cpu"))
        counts: list[int] = draft.num_nodes_R.tolist()
        tokens_RN, parents_RN = draft.tokens_RN.numpy(), draft.parents_RN.numpy()
        q_RNV, is_sampled_RN = draft.q_RNV, draft.is_sampled_RN
        for place, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if not count:
                self.drafts[row] = None
                continue
            nodes = Nodes(
                tokens_RN[place, :count],
                parents_RN[place, :count],
                None if q_RNV is None else q_RNV[place, :count],
                None if is_sampled_RN is None else is_sampled_RN[place, :count],
            )
            counts[place] = self._put(row, nodes, draft, place)
        return counts

    def _put(self, row: int, nodes: Nodes, draft: Draft, place: int) -> int:
        """Keep a row's nodes, as many as the target can check; returns how many these are."""
        assert len(nodes.tokens_N) <= self.max_draft[row], "a draft over its limit"
        method = draft.methods[place] if draft.methods is not None else self._only_method
        nodes = nodes._replace(method=method)
        self.drafts[row] = nodes = nodes.chain() if self.has_recurrent_states else nodes
        return len(nodes.tokens_N)

    def take_draft(self, row: int, max_nodes: int) -> Nodes:
        """The waiting draft, cut to its first `max_nodes` nodes."""
        waiting = self.drafts[row]
        self.drafts[row] = None
        if waiting is None or max_nodes == 0:
            return NOTHING
        return waiting if len(waiting.tokens_N) <= max_nodes else waiting.take(slice(max_nodes))
