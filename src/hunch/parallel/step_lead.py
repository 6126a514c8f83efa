"""Captured steps and passes of a target over ranks, as rank 0 leads them.

Shape letters: T packed tokens, M rows whose logits are wanted, D width, X rows of the engine, B
blocks of a table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.kv_store import KVCache
from hunch.kernels.step import StepRows
from hunch.models.spec import ModelSpec
from hunch.models.target import BegunPass, FusedTarget, Hidden
from hunch.parallel.executor import Ranks
from hunch.parallel.part import Part
from hunch.parallel.step_parts import (
    StepSize,
    agreed,
    exchanges_of,
    prepare_led,
    run_led,
    share_inputs,
    share_path,
)
from hunch.parallel.whole import NoMemory, Withdrawals, withdrawals_of
from hunch.step.batch import Batch
from hunch.step.capture import Graph
from hunch.step.parts import GraphSize, Piece
from hunch.step.passes import PassGraphs

log = logging.getLogger("hunch")


class LedTarget(Protocol):
    """The methods of a target over ranks that captured steps and passes need."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    ranks: Ranks

    def begin(self, ids_T: Tensor, attn: AttnInputs, kv: KVCache) -> BegunPass:
        """Let the other ranks begin a pass."""

    def checked(self, begun: BegunPass) -> AbstractContextManager[None]:
        """A pass of all ranks; if this one is short of memory, it is undone."""

    def note(self, hidden: Hidden) -> None:
        """States of a pass, by which `check_memory` sees whether all ranks had memory for it."""

    def check_memory(self) -> None:
        """Raise where a rank ran out of memory in what was computed since the last call."""

    def check_alive(self) -> None:
        """Raise where a rank is gone."""

    def tell_prepare(self, kv: KVCache, size: int, depth: int) -> None:
        """Let the other ranks capture a pass of this size."""

    def tell_step(self, asked: Callable[..., StepSize], kv: KVCache, is_new: bool) -> None:
        """Let the other ranks launch their part of a captured step, or capture it."""


class StepLead:
    """The target of rank 0's captured steps."""

    def __init__(self, target: LedTarget, part: Part, kv: KVCache) -> None:
        self._target, self._part, self._kv = target, part, kv
        assert isinstance(part.model, FusedTarget)
        self.spec, self.device, self.dtype = target.spec, target.device, target.dtype
        self.tiler, self.tiling = part.model.tiler, part.model.tiling
        self.timing = part.model.timing

    def captured(
        self,
        piece: Piece,
        size: GraphSize,
        table_XB: Tensor,
        block_size: int,
        graph: Callable[[Callable[[bool], None]], Graph],
    ) -> Graph:
        """A graph of rank 0 and those of the others; without memory for one, there is none.

        So a step that was captured finds all its graphs, and they take no memory any more.
        """
        asked = partial(StepSize, piece=piece, **size._asdict())
        table_rows, table_blocks = table_XB.shape
        table = {
            "table_rows": table_rows,
            "table_blocks": table_blocks,
            "block_size": block_size,
        }
        tell = partial(self._target.tell_step, partial(asked, **table), self._kv)
        ranks = self._target.ranks
        with ranks.in_step():
            found, reason = agreed(
                self._part,
                ranks.link,
                partial(graph, tell),
                partial(self._withdrawals, piece, size, table_blocks),
            )
        if found is None:
            raise NoMemory(reason)
        return found

    def _withdrawals(self, piece: Piece, size: GraphSize, table_blocks: int) -> Withdrawals:
        num_rows, num_nodes, depth = size
        group, num_tokens = self._part.group, num_rows * (num_nodes + 1)
        if piece != Piece.FORWARD:
            return withdrawals_of(group, exchanges_of(self._part, piece, size))

        def share_nothing() -> None:
            """Send inputs without rows."""
            columns_5T = torch.zeros(5, num_tokens, dtype=torch.int64, device=self.device)
            columns_5T[2], columns_5T[4] = -1, 1
            rest = columns_5T.new_zeros(num_rows * table_blocks + num_tokens * depth)
            group.broadcast(torch.cat([columns_5T.view(-1), rest]))

        return [share_nothing, *self._part.withdrawals(num_tokens)]

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, feature_layers: tuple[int, ...] = ()
    ) -> Hidden:
        """A pass of all ranks, with inputs that are known on this GPU alone."""
        with self._target.ranks.in_step():
            share_inputs(self._part.group, ids_T, attn, attn.memo["num_rows"])
            return self._part.model.forward(ids_T, attn, kv, feature_layers)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        """The logits, joined from the ranks' parts of the vocabulary; every rank has the states."""
        with self._target.ranks.in_step():
            return self._part.model.logits(hidden_MD)

    def share_states(self, last_TD: Tensor) -> None:
        """Send the states from which the others compute logits."""
        with self._target.ranks.in_step():
            self._part.group.broadcast(last_TD)

    def share_path(self, rows: StepRows) -> None:
        """Send the accepted nodes, whose KV the others must move too."""
        with self._target.ranks.in_step():
            share_path(self._part.group, rows)

    def check_alive(self) -> None:
        self._target.check_alive()


class LedPasses:
    """Passes that rank 0's host packs, captured on every rank (see `PassGraphs`)."""

    def __init__(self, target: LedTarget, part: Part, own: PassGraphs) -> None:
        self._target, self._part, self._own = target, part, own
        self._refused: set[tuple[int, int]] = set()  # sizes for which a rank had no memory

    def forward(self, batch: Batch) -> Hidden:
        fit = self._own.fit(batch)
        if fit is not None and not self._own.has(fit.size, fit.depth):
            self.prepare(fit.size, fit.depth)
        begun = self._target.begin(batch.ids_T, batch.attn, self._own.kv)
        if fit is not None and self._own.has(fit.size, fit.depth):
            with self._target.ranks.in_step():
                return run_led(self._part, self._own, batch)
        with self._target.checked(begun):
            hidden = run_led(self._part, self._own, batch)
            self._target.note(hidden)
        self._target.check_memory()
        return hidden

    def prepare(self, size: int, depth: int = 0) -> None:
        if (size, depth) in self._refused or self._own.has(size, depth):
            return
        self._target.tell_prepare(self._own.kv, size, depth)
        ranks = self._target.ranks
        with ranks.in_step():
            reason = prepare_led(self._part, ranks.link, self._own, size, depth)
        if reason:
            log.warning("passes of %d tokens are not captured: %s", size, reason)
            self._refused.add((size, depth))

    def rehearse(self, size: int) -> None:
        raise NotImplementedError("the other ranks would have to be told")
