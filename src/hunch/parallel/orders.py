"""The orders of rank 0 to the others, as rows of whole numbers.

Shape letters: T packed tokens, S sequences of the step, B blocks of a table, P tree depth, M moves.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, Span
from hunch.parallel.link import Numbers


class Op(IntEnum):
    """The first number of an order."""

    LOAD = 1  # a model's part, as described by the JSON text that follows
    FORWARD = 2  # a pass of a model
    LOGITS = 3  # model, rows: the states of this many rows are broadcast
    ROWS = 4  # model, then the ids of rows of its output matrix
    FREE = 5  # a KV cache
    CLOSE = 6
    FINISH = 7  # model: its last stage finishes the oldest pass that was begun
    STEP = 8  # a part of a captured step: its `StepSize`, and whether it is captured now
    PASSES = 12  # model, KV cache, its slots, rows and blocks of a table, block size: capture them
    PREPARE = 13  # model, KV cache, tokens, tree depth: capture a pass of this size now
    PROBE = 10  # model, times: add up a row of its width over the ranks, to see how long it takes
    DROP = 11  # a model
    MOVES = 9  # a KV cache, then slots whose KV moves and where to
    STATES = 14  # a KV cache, the row whose recurrent state is copied, and where to
    CLEAR = 16  # a KV cache, then slots whose KV must not be used
    ASK = 15  # whether a rank ran out of memory since it was last asked


def order(op: Op, *numbers: int) -> Numbers:
    return np.array([op, *numbers], dtype=np.int64)


def load_order(fields: dict[str, Any]) -> Numbers:
    data = json.dumps(fields).encode()
    padded = data + b" " * (-len(data) % 8)
    return np.concatenate([order(Op.LOAD), np.frombuffer(padded, dtype=np.int64)])


def read_load(numbers: Numbers) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(numbers[1:].tobytes())
    return fields


@dataclass(slots=True)
class Pass:
    """A forward pass of one of the models."""

    model: int
    kv: int  # a KV cache's number
    num_slots: int  # of that cache, in case it is new
    rows: tuple[int, int]  # of its recurrent states, and places of their rings; 0: it has none
    ids_T: Tensor
    attn: AttnInputs
    feature_layers: tuple[int, ...] = ()
    moves_2M: Tensor = field(default_factory=lambda: torch.empty(2, 0, dtype=torch.int64))

    def pack(self) -> Numbers:
        attn, moves_2M = self.attn, self.moves_2M
        depth = -1 if attn.tree_TP is None else attn.tree_TP.shape[1]
        table_SB = self._used_table()
        sizes = (
            Op.FORWARD, self.model, self.kv, self.num_slots, *self.rows, len(self.ids_T),
            *table_SB.shape, depth, attn.block_size, len(self.feature_layers), len(attn.spans),
            moves_2M.shape[1], 0 if attn.row_S is None else len(attn.row_S),
        )  # fmt: skip
        columns = [self.ids_T, attn.pos_T, attn.slot_T, attn.seq_T, attn.base_T, table_SB]
        columns += [column for column in (attn.tree_TP, attn.row_S) if column is not None]
        spans = [int(number) for span in attn.spans for number in astuple(span)]
        return np.concatenate(
            [
                np.array(sizes, dtype=np.int64),
                *(column.cpu().numpy().reshape(-1) for column in (*columns, moves_2M)),
                np.array([*self.feature_layers, *spans], dtype=np.int64),
            ]
        )

    def _used_table(self) -> Tensor:
        """The columns of the block tables that this pass needs; they have room for the longest
        text."""
        attn = self.attn
        longest = int(attn.pos_T.max()) if len(attn.pos_T) else 0
        return attn.table_SB[:, : longest // attn.block_size + 1]

    @staticmethod
    def unpack(numbers: Numbers) -> Pass:
        """The pass's inputs, in the host's memory."""
        sizes = numbers[1:15].tolist()
        model, kv, num_slots, num_rows, num_places, count, num_seqs, num_blocks = sizes[:8]
        depth, block_size, num_features, num_spans, num_moves, num_named = sizes[8:]
        rest = numbers[15:]

        def take(*shape: int) -> Tensor:
            nonlocal rest
            size = int(np.prod(shape))
            taken, rest = rest[:size], rest[size:]
            return torch.from_numpy(taken.reshape(shape))

        ids_T, pos_T, slot_T, seq_T, base_T = (take(count) for _ in range(5))
        table_SB = take(num_seqs, num_blocks)
        tree_TP = None if depth < 0 else take(count, depth)
        row_S = take(num_named) if num_named else None
        moves_2M = take(2, num_moves)
        features = tuple(rest[:num_features].tolist())
        spans = rest[num_features:].reshape(num_spans, 6).tolist()
        attn = AttnInputs(
            pos_T=pos_T,
            slot_T=slot_T,
            seq_T=seq_T,
            table_SB=table_SB,
            base_T=base_T,
            tree_TP=tree_TP,
            block_size=block_size,
            spans=tuple(Span(a, b, c, d, e, bool(f)) for a, b, c, d, e, f in spans),
            row_S=row_S,
        )
        rows = num_rows, num_places
        return Pass(model, kv, num_slots, rows, ids_T, attn, features, moves_2M)
