"""Recurrent layers over the tokens of a step, and over whole texts.

Shape letters: T packed tokens, B texts of L tokens, G places of the ring, P positions, W tokens of
a row and what its convolution sees before them, J taps of the convolution, I inputs of a token,
N heads, H width of a key, D width of a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, Span, spans_of
from hunch.kernels.recurrence import Recurrence, RecurrentStates


def recur(
    inputs_TI: Tensor,
    shape: Recurrence,
    weights: Any,
    states: RecurrentStates,
    layer: int,
    attn: AttnInputs,
) -> Tensor:
    """The specification, and torch's form of it: what each token reads, TND, in float32.

    Rows' states go on to the last known token of the step; nodes after it are read and not kept.
    """
    num_heads, _, width = shape.state
    size = (len(inputs_TI), num_heads, width)
    out_TND = inputs_TI.new_zeros(size, dtype=torch.float32)
    for span, row in _live(attn):
        ring_GI, known = states.inputs_LXGI[layer, row], span.start + span.num_known
        folded = int(states.folded_LX[layer, row]) if span.start else 0
        assert folded <= span.start, "the row's state is ahead of it"
        first, num_before = folded - shape.num_taps + 1, span.start - folded + shape.num_taps - 1
        before_P = torch.arange(first, span.start, device=ring_GI.device)
        x_BI = ring_GI[before_P % len(ring_GI)].masked_fill_(before_P[:, None] < 0, 0)
        assert num_before <= len(ring_GI), "the ring is too short for the draft"
        x_WI = torch.cat((x_BI, inputs_TI[span.first : span.last])).float()
        state_NHD = states.state_LXNHD[layer, row].clone()
        if not span.start:
            state_NHD.zero_()
        states.folded_LX[layer, row] = known  # before the state: see `RecurrentStates.is_ahead`
        for place in range(span.last - span.first + span.start - folded):
            window_JI = x_WI[place : place + shape.num_taps].clone()  # begins where others do
            state_NHD, read_ND = shape.fold(weights, window_JI, state_NHD)
            pos = folded + place
            if pos >= span.start:
                out_TND[span.first + pos - span.start] = read_ND
            if pos == known - 1:
                states.state_LXNHD[layer, row] = state_NHD
        num_kept = min(span.last - span.first, len(ring_GI))
        last = span.start + span.last - span.first
        kept_P = torch.arange(last - num_kept, last, device=ring_GI.device) % len(ring_GI)
        ring_GI[kept_P] = inputs_TI[span.last - num_kept : span.last].to(ring_GI.dtype)
    return out_TND


def sequences_of(attn: AttnInputs) -> list[tuple[int, int, int, int]]:
    """Per sequence: its first packed token, its last, how many are known, the engine's row."""
    return [(span.first, span.last, span.num_known, row) for span, row in _live(attn)]


def _live(attn: AttnInputs) -> Iterator[tuple[Span, int]]:
    """The step's sequences and the engine's rows they are."""
    for span in spans_of(attn):
        assert not span.is_tree, "recurrent layers check chains"
        if span.last > span.first and int(attn.slot_T[span.first]) >= 0:
            yield span, span.seq if attn.row_S is None else int(attn.row_S[span.seq])


def recur_texts(inputs_BLI: Tensor, shape: Recurrence, weights: Any) -> Tensor:
    """Whole texts side by side, each from its beginning: what every token reads, [B, L, N, D]."""
    num_texts, length, _ = inputs_BLI.shape
    before = inputs_BLI.new_zeros(num_texts, shape.num_taps - 1, shape.num_inputs)
    x_BPI = torch.cat((before, inputs_BLI), dim=1).float()
    state = x_BPI.new_zeros(num_texts, *shape.state)
    fold_all = torch.vmap(partial(shape.fold, weights))
    found = []
    for pos in range(length):
        state, read_BND = fold_all(x_BPI[:, pos : pos + shape.num_taps], state)
        found.append(read_BND)
    return torch.stack(found, dim=1)
