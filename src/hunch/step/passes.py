"""Captured passes over a packed batch: the target's, and a draft model's over missed tokens.

Shape letters: T packed tokens, P tree depth, X rows of the engine, B blocks of a table, I tiles.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_recurrence import SEQUENCES, sequences
from hunch.kernels.gpu_tiling import num_tiles_of, write_tiles
from hunch.kernels.kv_store import KVCache
from hunch.models.target import FusedTarget, Hidden
from hunch.step.batch import Batch, pack_known
from hunch.step.capture import Graph
from hunch.step.parts import PASSES
from hunch.step.pass_inputs import PassInputs, aligned
from hunch.step.rows import RowBuffers

log = logging.getLogger("hunch")

MAX_PASS = PASSES[-1]  # tokens of the largest captured pass
# Bytes of weights up to which launching the kernels of a larger pass takes longer than running them
LAUNCH_BOUND = 2 << 30
SPARE_TILES = 16  # partly filled tiles that a pass has room for; a large pass: size / 16
SMALL, LARGE = 512, 2048  # most tokens of a catch-up pass; LARGE if at least as many are left
# Of ids, positions, slots, sequences and bases: tokens that are written nowhere.
PADDING = np.array([[0], [0], [-1], [0], [1]])


class Fit(NamedTuple):
    """The captured pass that has room for a batch."""

    size: int  # tokens with padding
    depth: int  # of trees


class Layout(NamedTuple):
    """How much a captured pass of one size reads of what is sent."""

    num_columns: int  # words of its columns, of its tiles and of its sequences
    num_tiles: int
    num_seqs: int
    max_tiles: int
    block: int  # most tokens of a tile

    @property
    def num_words(self) -> int:
        return self.num_columns + self.num_tiles + self.num_seqs


class PassGraphs:
    """The target's forward over a packed batch, padded to a few sizes."""

    def __init__(
        self,
        target: FusedTarget,
        kv: KVCache,
        layers: tuple[int, ...],
        size_XB: tuple[int, int],
        block_size: int,
        pool: Any,
    ) -> None:
        self.target, self.kv, self.layers, self.pool = target, kv, layers, pool
        self.block_size = block_size
        self.device = target.device
        self._max_seqs = size_XB[0] if kv.states is not None else 0
        self._layouts = {size: self._layout(size) for size in PASSES}
        self._inputs = PassInputs(size_XB, self._layouts[MAX_PASS].num_words, self.device)
        self._passes: dict[tuple[int, int], tuple[Graph, Tensor, AttnInputs]] = {}

    def forward(self, batch: Batch, later: Sequence[tuple[int, Tensor]] = ()) -> Hidden:
        """Hidden states of the batch's tokens; those after them are padding.

        `later`: tokens that only the device knows, each with its place in the batch.
        """
        fit = self.fit(batch)
        if fit is not None:
            self.prepare(fit.size, fit.depth)
        return self.run(batch, fit, later)

    def fit(self, batch: Batch) -> Fit | None:
        """The captured pass that has room for a batch; None: it is too large."""
        num_tokens, attn = len(batch.ids_T), batch.attn
        if num_tokens > MAX_PASS:
            return None
        size = size_of(num_tokens)
        layout = self._layouts[size]
        if num_tiles_of(attn.spans, layout.block) > layout.max_tiles:
            return None
        tree_TP = attn.tree_TP
        depth = 0 if tree_TP is None else 1 << (tree_TP.shape[1] - 1).bit_length()
        return Fit(size, depth)

    def graph(self, num_tokens: int) -> Graph | None:
        """The captured pass over this many tokens, if there is one."""
        found = None if num_tokens > MAX_PASS else self._passes.get((size_of(num_tokens), 0))
        return None if found is None else found[0]

    def has(self, size: int, depth: int) -> bool:
        """Whether a pass of this size is captured."""
        return (size, depth) in self._passes

    def run(
        self, batch: Batch, fit: Fit | None, later: Sequence[tuple[int, Tensor]] = ()
    ) -> Hidden:
        """`forward`, by a captured pass if there is one of this size."""
        if fit is None or not self.has(fit.size, fit.depth):
            batch = batch.to(self.device)
            for at, token_1 in later:
                batch.ids_T[at : at + 1].copy_(token_1)
            return self.target.forward(batch.ids_T, batch.attn, self.kv, self.layers)
        graph, packed_5T, held = self._passes[fit.size, fit.depth]
        attn = batch.attn
        stop = max([span.start + span.last - span.first for span in attn.spans])
        table_SB = attn.table_SB.numpy()[:, : -(-stop // self.block_size)]
        num_words = self._layouts[fit.size].num_words
        self._inputs.send(num_words, table_SB, partial(self._write, batch, fit))
        for at, token_1 in later:
            packed_5T[0, at : at + 1].copy_(token_1)
        if (tree_TP := attn.tree_TP) is not None and held.tree_TP is not None:
            held.tree_TP[: len(tree_TP), : tree_TP.shape[1]].copy_(tree_TP)
        hidden: Hidden = graph.replay()
        return hidden

    def _write(self, batch: Batch, fit: Fit, words_W: np.ndarray) -> None:
        """Write a pass's columns, tiles and sequences, with padding."""
        attn, packed_5T = batch.attn, batch.columns
        num_columns, num_tiles, num_seqs, _, block = self._layouts[fit.size]
        columns, num_tokens = words_W[:num_columns].reshape(5, fit.size), packed_5T.shape[1]
        columns[:, :num_tokens] = packed_5T
        columns[:, num_tokens:] = PADDING
        rest_W = words_W[num_columns:]
        rest_W[...] = 0
        write_tiles(attn.spans, block, rest_W[:num_tiles].view(np.int32).reshape(-1, 2))
        if num_seqs:
            seqs = sequences(attn).numpy().ravel()
            rest_W[num_tiles : num_tiles + len(seqs)] = seqs

    def _layout(self, size: int) -> Layout:
        block, num_seqs = self.target.tiler.block(size), aligned(4 * min(size, self._max_seqs))
        max_tiles = min(size, -(-size // block) + max(SPARE_TILES, size // 16))
        return Layout(5 * size, aligned(max_tiles), num_seqs, max_tiles, block)

    def prepare(self, size: int, depth: int = 0) -> None:
        """Capture a pass of this size, unless that was done."""
        if (size, depth) not in self._passes:
            self._passes[size, depth] = self._capture(size, depth)

    def drop(self, size: int, depth: int) -> None:
        """Forget a captured pass, if there is one of this size."""
        self._passes.pop((size, depth), None)

    def rehearse(self, size: int) -> None:
        """Run what capturing a pass of this size would run, and keep nothing."""
        self._capture(size, 0)

    def _capture(self, size: int, depth: int) -> tuple[Graph, Tensor, AttnInputs]:
        target, layout = self.target, self._layouts[size]
        words_W = self._inputs.before_table(layout.num_words)
        words_W.zero_()  # there may be what the last pass has read
        packed_W, tiles_W, seqs_W = words_W.split_with_sizes(layout[:3])
        packed_5T = packed_W.view(5, size)
        packed_5T[2] = -1
        attn = AttnInputs.over(packed_5T, self._inputs.table_XB, self.block_size, depth)
        tiling = attn.memo["tiling"] = target.tiler.padded(layout.max_tiles, size)
        tiling.tiles_I2 = tiles_W.view(torch.int32).view(-1, 2)[: layout.max_tiles]
        if self._max_seqs:
            attn.memo[SEQUENCES] = seqs_W.view(-1, 4)[: min(size, self._max_seqs)]

        def body() -> Hidden:
            return target.forward(packed_5T[0], attn, self.kv, self.layers)

        return Graph(body, self.device, self.pool), packed_5T, attn


def size_of(num_tokens: int) -> int:
    """Tokens of a captured pass with padding."""
    return PASSES[bisect_left(PASSES, num_tokens)]


def max_prompt(weight_bytes: int) -> int | None:
    """The most tokens of prompts that a step reads with such weights; None: any number."""
    return MAX_PASS if weight_bytes <= LAUNCH_BOUND else None


class CatchUp:
    """Launches a draft model's passes over tokens that it missed; its KV group is the last one."""

    def __init__(
        self, model: FusedTarget, kv: KVCache, rows: RowBuffers, tokens_XL: Tensor, pool: Any
    ) -> None:
        """`tokens_XL`: the rows' tokens on the device, where one more may be known."""
        self.rows, self.tokens_XL = rows, tokens_XL
        self.passes = PassGraphs(model, kv, (), rows.table.shape, rows.block_size, pool)

    def run(self, ids: list[int], num_more: int = 0) -> None:
        """Run it over all known tokens of these rows that it has no KV of, if memory suffices.

        num_more: 1, if it also reads a token of each row that a step already launched will choose.
        """
        try:
            self._run(ids, num_more)
        except torch.OutOfMemoryError:
            log.warning("no GPU memory for the draft model to catch up in: it drafts nothing yet")

    def _run(self, ids: list[int], num_more: int) -> None:
        rows = self.rows
        parts: list[tuple[int, int, int]] = []
        left = int((rows.known[ids] + num_more - rows.computed[-1, ids]).sum())
        room = LARGE if left >= LARGE else SMALL
        for row in ids:
            start, known = int(rows.computed[-1, row]), int(rows.known[row]) + num_more
            while start < known:
                stop = min(known, start + room)
                parts.append((row, start, stop))
                room -= stop - start
                left -= stop - start
                start = stop
                if not room:
                    self._forward(parts)
                    parts, room = [], LARGE if left >= LARGE else SMALL
        if parts:
            self._forward(parts)

    def _forward(self, parts: list[tuple[int, int, int]]) -> None:
        """Run it over these tokens, given as (row, start, stop)."""
        later: list[tuple[int, Tensor]] = []
        last = -1
        for row, start, stop in parts:
            last += stop - start
            if stop > self.rows.known[row]:
                later.append((last, self.tokens_XL[row, stop - 1 : stop]))
        self.passes.forward(pack_known(self.rows, parts), later)
        for row, _, stop in parts:
            self.rows.computed[-1, row] = stop
