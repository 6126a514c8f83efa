"""Attention of blocks of guesses, each begun after a known token of a text.

Shape letters: T tokens of a pack, A blocks, P places of a block, M = A * P places, D width, K keys,
N heads, H head width.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from hunch.layers.attention import Attend, Attention, Heads, split_heads
from hunch.layers.rope import Rope
from hunch.models.heads.block import context_heads
from hunch.train.attend import Where, can_flash, flash
from hunch.train.packs import Spans

_AT_ONCE = 48  # blocks of a text that attend at once where there is no kernel for them


class Blocks:
    """Places of a block see each other, and the context before the block's anchor."""

    def __init__(
        self, spans: Spans, context_TD: Tensor, anchor_A: Tensor, num_places: int, rope: Rope,
        num_keys: int,
    ) -> None:  # fmt: skip
        """num_keys: no fewer than all blocks together see of the context."""
        device, num_blocks = context_TD.device, len(anchor_A)
        self.spans, self.context_TD, self.num_places = spans, context_TD, num_places
        self.anchor_A, self.num_keys = anchor_A, num_keys + num_blocks * num_places
        self.before_A = spans.pos_T.index_select(0, anchor_A)  # positions of the context
        place_P = torch.arange(num_places, device=device)
        self.rotation = rope((self.before_A[:, None] + place_P).flatten())
        self.context_rotation = rope(spans.pos_T)
        self._where: tuple[Tensor, Where] | None = None
        self._runs: list[tuple[slice, slice, Tensor]] = []

    def of(self, attn: Attention) -> Attend:
        """How a layer's places attend, over its own keys and values of the context."""
        known = context_heads(attn, self.context_TD, self.context_rotation)

        def attend(
            qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
        ) -> Tensor:
            q, *own = split_heads(qkv_TAH, heads, self.rotation)
            run = self._flash if can_flash(q) else self._plainly
            return run(q, list(zip(known, own, strict=True)), heads)

        return attend

    def _flash(self, q: Tensor, kv: list[tuple[Tensor, Tensor]], heads: Heads) -> Tensor:
        """For the kernel each block is a text, with copies of the keys that it sees."""
        if self._where is None:
            self._where = self._copies()
        index_K, where = self._where
        k, v = (
            torch.cat((known, own, torch.zeros_like(own[:1]))).index_select(0, index_K)
            for known, own in kv
        )
        return flash(q, k, v, where, heads, is_causal=False)[0]

    def _copies(self) -> tuple[Tensor, Where]:
        """Which keys each block sees: those of the context, then its own; zeros pad the rest."""
        size, num_known = self.num_places, len(self.context_TD)
        num_blocks, device = len(self.anchor_A), self.anchor_A.device
        start_A1 = functional.pad((self.before_A + size).cumsum(0), (1, 0))
        key_K = torch.arange(self.num_keys, device=device)
        block_K = torch.searchsorted(start_A1[1:], key_K, right=True)
        is_used_K = block_K < num_blocks
        block_K = block_K.clamp(max=num_blocks - 1)
        nth_K = key_K - start_A1.index_select(0, block_K)
        before_K = self.before_A.index_select(0, block_K)
        known_K = self.anchor_A.index_select(0, block_K) - before_K + nth_K
        own_K = num_known + block_K * size + nth_K - before_K
        index_K = torch.where(nth_K < before_K, known_K, own_K)
        index_K = torch.where(is_used_K, index_K, num_known + num_blocks * size)
        places = torch.arange(num_blocks + 1, dtype=torch.int32, device=device) * size
        return index_K, (places, start_A1.int(), size, self.spans.longest + size)

    def _plainly(self, q: Tensor, kv: list[tuple[Tensor, Tensor]], heads: Heads) -> Tensor:
        """The same for some blocks of a text at a time, with a mask."""
        self._runs = self._runs or list(self._masked())
        found = []
        for context, places, is_seen in self._runs:
            parts = [q[places], *(torch.cat((known[context], own[places])) for known, own in kv)]
            q_NMH, k, v = (x.transpose(0, 1)[None] for x in parts)
            out = functional.scaled_dot_product_attention(
                q_NMH, k, v, is_seen, scale=heads.scale, enable_gqa=True
            )
            found.append(out[0].transpose(0, 1))
        return torch.cat(found) if found else q

    def _masked(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """The keys of some blocks, context and places, and a mask of those that each place sees."""
        size, device = self.num_places, self.anchor_A.device
        anchors, first = self.anchor_A.tolist(), 0
        for start, end in pairwise(self.spans.starts):
            while first < len(anchors) and anchors[first] < end:
                last = min(bisect_left(anchors, end), first + _AT_ONCE)
                pos_L = torch.arange(anchors[last - 1] - start, device=device)
                before_M = self.before_A[first:last].repeat_interleave(size)
                block_M = torch.arange(last - first, device=device).repeat_interleave(size)
                is_seen = (pos_L < before_M[:, None], block_M == block_M[:, None])
                context, places = slice(start, anchors[last - 1]), slice(first * size, last * size)
                yield context, places, torch.cat(is_seen, dim=1)
                first = last
