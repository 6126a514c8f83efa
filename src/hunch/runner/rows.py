"""Persistent per-request state on the device: tokens, lengths, block tables, the pending draft.

Shape letters: X rows of the engine, L longest sequence, B blocks of a table, G KV groups, N nodes.
On a CPU the numpy views share the tensors' memory: scalar work on them costs a tenth of torch's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hunch.draft import Draft, Rows
from hunch.types import Capacity, Request, RowStart


class RowBuffers:
    """One row per running request."""

    def __init__(self, capacity: Capacity) -> None:
        num_rows, room = capacity.max_rows, capacity.max_len + capacity.max_nodes + 1
        max_blocks = -(-room // capacity.block_size) + 1
        self.block_size = capacity.block_size
        self.tokens_XL = torch.zeros(num_rows, room, dtype=torch.int64)
        self.known_X = torch.zeros(num_rows, dtype=torch.int64)
        self.prompt_X = torch.zeros(num_rows, dtype=torch.int64)
        self.end_X = torch.zeros(num_rows, dtype=torch.int64)
        self.computed_GX = torch.zeros(len(capacity.groups), num_rows, dtype=torch.int64)
        self.table_XB = torch.zeros(num_rows, max_blocks, dtype=torch.int64)
        self.max_draft_X = torch.zeros(num_rows, dtype=torch.int64)
        self.tokens, self.known = self.tokens_XL.numpy(), self.known_X.numpy()
        self.end, self.table = self.end_X.numpy(), self.table_XB.numpy()
        self.computed, self.max_draft = self.computed_GX.numpy(), self.max_draft_X.numpy()
        self.num_blocks = [0] * num_rows
        self.requests: list[Request | None] = [None] * num_rows  # None: free, or finished
        self.drafts: list[tuple[Draft, int] | None] = [
            None
        ] * num_rows  # a draft, and the row's place

    def start(self, start: RowStart) -> None:
        row, request, num_known = start.row, start.request, len(start.tokens)
        self.tokens[row, :num_known] = start.tokens
        self.known[row] = num_known
        self.prompt_X[row] = len(request.prompt_ids)
        self.end[row] = len(request.prompt_ids) + request.max_tokens
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

    def commit(self, row: int, tokens: list[int]) -> None:
        """Append decided tokens. The last of them has no KV yet."""
        first = int(self.known[row])
        self.tokens[row, first : first + len(tokens)] = tokens
        self.known[row] = first + len(tokens)

    def slots(self, row: int, first: int, last: int) -> np.ndarray:
        """The KV slots of positions [first, last)."""
        positions = np.arange(first, last)
        blocks = self.table[row, positions // self.block_size]
        return np.asarray(blocks * self.block_size + positions % self.block_size)

    def view(self, rows: list[int]) -> Rows:
        return Rows(
            ids_R=torch.tensor(rows, dtype=torch.int64),
            tokens_XL=self.tokens_XL,
            known_X=self.known_X,
            prompt_X=self.prompt_X,
            end_X=self.end_X,
            computed_GX=self.computed_GX,
            table_XB=self.table_XB,
            max_draft_X=self.max_draft_X,
            block_size=self.block_size,
        )

    def take_draft(self, row: int, max_nodes: int) -> tuple[Tensor, Tensor]:
        """Tokens and parents of the pending draft, cut to its first `max_nodes` nodes.

        Parents stand before their children, so the first nodes of a tree are a tree.
        """
        pending = self.drafts[row]
        self.drafts[row] = None
        if pending is None or max_nodes == 0:
            nothing = torch.empty(0, dtype=torch.int64)
            return nothing, nothing
        draft, place = pending
        num_nodes = min(int(draft.num_nodes_R[place]), max_nodes)
        return draft.tokens_RN[place, :num_nodes], draft.parents_RN[place, :num_nodes]
