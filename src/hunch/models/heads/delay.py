"""Several MTP layers over one KV cache: each runs one position behind the layer before it.

Shape letters: T packed tokens, D width, W tokens of a span, K its keys.

Layer k of the paper takes, at position i, the state of layer k - 1 at i and token i + 1 + k. Here
its KV is kept at position i + k, so that whatever lies at position p has seen tokens up to p + 1
and no further, in every layer: blocks can be shared, and a drafted node is one token to each layer.
Rotations hang on differences of positions alone, so nothing else changes; only the first k
positions, which layer k does not have, must not be seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, Piece, Span, live_tokens, pieces_of, spans_of


def delayed(state_TD: Tensor, spans: Sequence[Span], before: Sequence[Tensor | None]) -> Tensor:
    """The state one position before each; `before` has the one before each span.

    Where that is not known any more (after a prefix-cache hit, in a new window), the span's first
    state stands in for it: one entry per layer is then a little off, and with it a guess.
    """
    shifted_TD = state_TD.roll(1, 0)
    for span, state_D in zip(spans, before, strict=True):
        shifted_TD[span.first] = state_TD[span.first] if state_D is None else state_D
    return shifted_TD


def without_first(
    attn: AttnInputs, count: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> AttnInputs:
    """The same step, in which nobody sees the first `count` positions."""
    if count == 0:
        return attn
    pieces = [
        _cut(piece, span, attn, count, window)
        for piece, span in zip(pieces_of(attn, window, dtype, device), spans_of(attn), strict=True)
    ]
    memo = {"live": live_tokens(attn), ("pieces", window, dtype): pieces}
    return replace(attn, memo=memo)


def _cut(piece: Piece, span: Span, attn: AttnInputs, count: int, window: int | None) -> Piece:
    """Keys stand in order of position, those of a tree's nodes last."""
    if span.is_tree:
        assert attn.tree_TP is not None
        num_cut = min(count, span.start + 1 - attn.tree_TP.shape[1])  # nodes stay as they are
    else:
        first = 0 if window is None else max(0, span.start - window + 1)
        num_cut = min(max(count - first, 0), piece.num_keys - 1)
    mask_WK = piece.mask_WK
    if mask_WK is not None:
        mask_WK = mask_WK[:, num_cut:].contiguous()
        if not span.is_tree:  # tokens at positions that are not seen must still see something
            mask_WK[: max(count - span.start, 0)] = 0.0
    return replace(
        piece,
        slot=piece.slot + num_cut,
        num_keys=piece.num_keys - num_cut,
        slots_K=None if piece.slots_K is None else piece.slots_K[num_cut:],
        mask_WK=mask_WK,
    )
