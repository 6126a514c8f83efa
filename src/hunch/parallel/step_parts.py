"""Captured steps of a target over ranks: rank 0's whole step, and the others' parts of it.

Rank 0's graphs pack, choose, walk and draft as without ranks. Inside them the packed inputs go to
the other ranks through the GPUs' memory; those have a graph for each size of step that takes the
inputs, computes its part of the pass and of the logits, and moves accepted nodes' KV. After a pass
over prompts the states of their last tokens go there instead. Before rank 0 launches a graph it
says by an order which the others must launch.

Shape letters: R rows of the step, K tokens of a row (its nodes and one), T packed tokens (R times
K), P tree depth, X rows of the engine, B blocks of a table, M rows of logits, W numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, row_spans
from hunch.kernels.gpu_step import compact
from hunch.kernels.kv_store import KVCache
from hunch.kernels.step import TOKENS, StepRows
from hunch.models.target import FusedTarget, Hidden, SaysExchanges
from hunch.parallel.group import Exchange, Group
from hunch.parallel.link import Link
from hunch.parallel.part import Part
from hunch.parallel.whole import NoMemory, Withdrawals, run_whole, withdrawals_of
from hunch.step.batch import Batch
from hunch.step.capture import Graph, new_pool
from hunch.step.parts import Piece
from hunch.step.passes import PassGraphs

log = logging.getLogger("hunch")

Made = TypeVar("Made")


class StepSize(NamedTuple):
    """What other ranks must know of a part of a captured step."""

    model: int
    kv: int
    num_slots: int
    piece: int
    num_rows: int
    num_nodes: int
    depth: int  # of trees; 0: chains
    table_rows: int
    table_blocks: int
    block_size: int


def share_inputs(group: Group, ids_T: Tensor, attn: AttnInputs, num_rows: int) -> None:
    """Share rank 0's packed inputs with all ranks, and the block tables of their rows."""
    num_k = len(ids_T) // num_rows
    columns = [ids_T, attn.pos_T, attn.slot_T, attn.seq_T, attn.base_T]
    trees = [] if attn.tree_TP is None else [attn.tree_TP]
    if group.rank == 0:
        table_RB = attn.table_SB.index_select(0, attn.seq_T[::num_k])
        group.broadcast(torch.cat([one.reshape(-1) for one in (*columns, table_RB, *trees)]))
        return
    num_blocks = attn.table_SB.shape[1]
    sizes = [len(ids_T)] * 5 + [num_rows * num_blocks] + [tree.numel() for tree in trees]
    got = torch.split(group.broadcast(ids_T.new_empty(sum(sizes))), sizes)
    for column, line in zip((*columns, *trees), (*got[:5], *got[6:]), strict=True):
        column.copy_(line.view_as(column))
    table_RB = got[5].view(num_rows, num_blocks)
    attn.table_SB.index_copy_(0, attn.seq_T[::num_k].contiguous(), table_RB)


def share_path(group: Group, rows: StepRows) -> None:
    """Share each row's accepted nodes and number of committed tokens with all ranks."""
    num_rows = len(rows.path_RK)
    if group.rank == 0:
        parts = [rows.path_RK.reshape(-1), rows.result_RC[:, TOKENS]]
        group.broadcast(torch.cat(parts))
        return
    got_W = group.broadcast(rows.path_RK.new_empty(rows.path_RK.numel() + num_rows))
    rows.path_RK.copy_(got_W[:-num_rows].view_as(rows.path_RK))
    rows.result_RC[:, TOKENS].copy_(got_W[-num_rows:])


def agreed(
    part: Part, link: Link, make: Callable[[], Made], withdrawals: Callable[[], Withdrawals]
) -> tuple[Made | None, str]:
    """What this rank makes while the others make theirs; None if a rank lacks the memory, and why.

    All ranks must call it.
    """
    made, reason = None, ""
    try:
        made = run_whole(part.group, make, withdrawals)
    except NoMemory as error:
        reason = str(error) or "no memory"
    told = [f"rank {rank}: {text}" for rank, text in enumerate(link.tell_rank_0(reason)) if text]
    return (None, "; ".join(told)) if told else (made, "")


def exchanges_of(part: Part, piece: int, size: tuple[int, int, int]) -> list[Exchange]:
    """The exchanges of a step's graphs after the first."""
    num_rows, num_nodes, depth = size
    num_k = num_nodes + 1
    if piece == Piece.STATES:
        return [Exchange(num_rows * part.spec.width, part.model.dtype, is_broadcast=True)]
    assert isinstance(part.model, SaysExchanges)
    found = [part.model.logit_exchange(num_rows * num_k)]
    if depth:
        found.append(Exchange(num_rows * (num_k + 1), torch.int64, is_broadcast=True))
    return found


def run_led(
    part: Part, passes: PassGraphs, batch: Batch, before: Callable[[], object] = int
) -> Hidden:
    """A pass of this rank; every rank pads it alike, and has captured the same sizes.

    A captured pass takes no memory, so rank 0 need not ask whether all ranks had enough.
    """
    fit = passes.fit(batch)
    if fit is not None and passes.has(fit.size, fit.depth):
        before()
        return passes.run(batch, fit)

    def run() -> Hidden:
        before()
        return passes.run(batch, fit)

    return run_whole(part.group, run, partial(part.withdrawals, len(batch.ids_T)))


def prepare_led(part: Part, link: Link, passes: PassGraphs, size: int, depth: int) -> str:
    """Capture a pass on all ranks or, without memory for it, on none; why it is on none."""

    def make() -> bool:
        passes.prepare(size, depth)
        return True

    _, reason = agreed(part, link, make, partial(part.withdrawals, size))
    if reason:
        passes.drop(size, depth)
    return reason


def passes_of(
    part: Part,
    kv: KVCache,
    num_rows: int,
    num_blocks: int,
    block_size: int,
    layers: tuple[int, ...] = (),
    pool: Any = None,
) -> PassGraphs:
    """The captured passes of a part."""
    model = part.model
    assert isinstance(model, FusedTarget)
    pool = new_pool(model.device) if pool is None else pool
    return PassGraphs(model, kv, layers, (num_rows, num_blocks), block_size, pool)


class StepParts:
    """Another rank's graphs of one model, made when rank 0 first asks for them."""

    def __init__(self, part: Part, link: Link) -> None:
        self._part, self._link = part, link
        self._pool = new_pool(part.model.device)
        self._graphs: dict[StepSize, Graph] = {}
        self._tables: dict[int, Tensor] = {}  # of the rows of each KV cache
        self._buffers: dict[StepSize, tuple[Tensor, AttnInputs]] = {}

    def forget(self, kv: int) -> None:
        """Release a KV cache, and graphs that use it."""
        for held in (self._graphs, self._buffers):
            for size in [size for size in held if size.kv == kv]:
                del held[size]
        self._tables.pop(kv, None)

    def run(self, asked: StepSize, kv: KVCache, *, is_new: bool) -> None:
        """Run a graph; a new one runs as it is captured. `is_new`: rank 0 captures its own now."""
        if not is_new:
            self._graphs[asked].replay()
            return

        def make() -> Graph:
            if (graph := self._graphs.get(asked)) is not None:
                graph.replay()
                return graph
            body = (self._forward, self._finish, self._states)[asked.piece]
            return Graph(partial(body, asked, kv), self._part.model.device, self._pool)

        had = asked in self._graphs
        made, _ = agreed(self._part, self._link, make, partial(self._withdrawals, asked))
        if made is not None:
            self._graphs[asked] = made
        elif not had:
            self._buffers.pop(asked, None)

    def _withdrawals(self, asked: StepSize) -> Withdrawals:
        size = asked.num_rows, asked.num_nodes, asked.depth
        num_tokens = asked.num_rows * (asked.num_nodes + 1)
        group = self._part.group
        if asked.piece != Piece.FORWARD:
            return withdrawals_of(group, exchanges_of(self._part, asked.piece, size))
        count = num_tokens * (5 + asked.depth) + asked.num_rows * asked.table_blocks
        inputs = Exchange(count, torch.int64, is_broadcast=True)
        return [partial(group.withdraw, inputs), *self._part.withdrawals(num_tokens)]

    def _forward(self, asked: StepSize, kv: KVCache) -> Tensor:
        ids_T, attn = self._buffers_of(asked)
        share_inputs(self._part.group, ids_T, attn, asked.num_rows)
        return self._part.model.forward(ids_T, attn, kv).last_TD

    def _finish(self, asked: StepSize, kv: KVCache) -> None:
        """What follows the pass of the same size: logits, and moving the KV of accepted nodes."""
        forward = asked._replace(piece=Piece.FORWARD)
        self._part.model.logits(self._graphs[forward].outputs)
        if asked.depth:
            ids_T, attn = self._buffers_of(forward)
            rows = self._rows(asked, ids_T)
            share_path(self._part.group, rows)
            compact(kv, rows, attn.slot_T)

    def _states(self, asked: StepSize, kv: KVCache) -> None:
        """Put rank 0's states where the pass of the same size leaves its own."""
        self._part.group.broadcast(self._graphs[asked._replace(piece=Piece.FORWARD)].outputs)

    def _rows(self, asked: StepSize, like: Tensor) -> StepRows:
        size = asked.num_rows
        none_R = like.new_zeros(size)
        return StepRows(
            ids_R=none_R,
            max_checked_R=none_R,
            max_draft_R=none_R,
            num_checked_R=none_R,
            path_RK=like.new_zeros(size, asked.num_nodes + 1),
            result_RC=like.new_zeros(size, TOKENS + 1),
        )

    def _buffers_of(self, asked: StepSize) -> tuple[Tensor, AttnInputs]:
        if asked in self._buffers:
            return self._buffers[asked]
        model = self._part.model
        assert isinstance(model, FusedTarget)
        num_k = asked.num_nodes + 1
        num_tokens = asked.num_rows * num_k
        packed_5T = torch.zeros(5, num_tokens, dtype=torch.int64, device=model.device)
        packed_5T[2], packed_5T[4] = -1, 1
        if asked.kv not in self._tables:
            size_XB = asked.table_rows, asked.table_blocks
            self._tables[asked.kv] = packed_5T.new_zeros(size_XB)
        table_XB = self._tables[asked.kv]
        attn = AttnInputs.over(packed_5T, table_XB, asked.block_size, asked.depth)
        attn.memo["tiling"] = model.tiling(row_spans(asked.num_rows, num_k), num_tokens)
        self._buffers[asked] = packed_5T[0], attn
        return self._buffers[asked]
