"""Gated convolutions over the last few tokens on a GPU.

`kernels.short_conv` has the plain Python form, `gpu_recurrence` what such layers share. There is no
state: every token is computed by itself.

Shape letters: T packed tokens, S sequences of the step, D width, W = 3D numbers that a layer's
first product gives for each of P padded tokens: two factors, then the gate.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_launch import cdiv, options, take_turns
from hunch.kernels.gpu_recurrence import MAX_TAPS, sequence_of, sequences, taps_of
from hunch.kernels.recurrence import RecurrentStates
from hunch.kernels.short_conv import ConvShape, ConvWeights

_BLOCK = 256  # channels of a program
_TOKENS = 16


@triton.jit
def _product_at(y_ptr, ring_ptr, offs, p, start, stride, width, is_in, NUM_PLACES: tl.constexpr):
    """The product of a token's two factors, of this step or of the ring; 0 before the text."""
    new = is_in & (p >= start)
    old = is_in & (p < start) & (p >= 0)
    y_ptr += (p - start) * stride
    ring_ptr += ((p + NUM_PLACES) % NUM_PLACES) * 2 * width
    b = tl.load(y_ptr + offs, mask=new, other=0.0).to(tl.float32)
    b += tl.load(ring_ptr + offs, mask=old, other=0.0).to(tl.float32)
    x = tl.load(y_ptr + width + offs, mask=new, other=0.0).to(tl.float32)
    x += tl.load(ring_ptr + width + offs, mask=old, other=0.0).to(tl.float32)
    return b * x


@triton.jit
def _mix_kernel(
    y_ptr, ring_ptr, conv_ptr, out_ptr, seqs_ptr, pos_ptr, slot_ptr, seq_ptr, stride, width,
    NUM_PLACES: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sequence s, some of its tokens, some channels."""
    s = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TOKENS
    offs = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < width
    w_a, w_b, w_c, w_d = taps_of(conv_ptr, offs, is_in, width)
    take_turns()
    first, num, _, row, start = sequence_of(seqs_ptr, pos_ptr, slot_ptr, seq_ptr, s)
    y_ptr += first * stride
    ring_ptr += row * NUM_PLACES * 2 * width
    begin, end = start + at, start + tl.minimum(num, at + TOKENS)
    a = _product_at(y_ptr, ring_ptr, offs, begin - 3, start, stride, width, is_in, NUM_PLACES)
    b = _product_at(y_ptr, ring_ptr, offs, begin - 2, start, stride, width, is_in, NUM_PLACES)
    c = _product_at(y_ptr, ring_ptr, offs, begin - 1, start, stride, width, is_in, NUM_PLACES)
    for p in range(begin, end):
        d = _product_at(y_ptr, ring_ptr, offs, p, start, stride, width, is_in, NUM_PLACES)
        gate = tl.load(y_ptr + (p - start) * stride + 2 * width + offs, mask=is_in, other=0.0)
        x = (a * w_a + b * w_b + c * w_c + d * w_d) * gate.to(tl.float32)
        to = out_ptr + (first + p - start) * width + offs
        tl.store(to, x.to(out_ptr.dtype.element_ty), mask=is_in)
        a, b, c = b, c, d


def mix(
    y_PW: Tensor,
    shape: ConvShape,
    weights: ConvWeights,
    states: RecurrentStates,
    layer: int,
    attn: AttnInputs,
    out_PD: Tensor,
) -> None:
    """What each live token reads, times its gate. The weights have `MAX_TAPS` taps."""
    assert len(weights.conv_JD) == MAX_TAPS
    seqs_S4 = sequences(attn)
    if not len(seqs_S4):
        return
    grid = (len(seqs_S4), cdiv(len(attn.pos_T), _TOKENS), cdiv(shape.width, _BLOCK))
    _mix_kernel[grid](
        y_PW, states.inputs_LXGI[layer], weights.conv_JD, out_PD, seqs_S4, attn.pos_T,
        attn.slot_T, attn.seq_T, y_PW.stride(0), shape.width,
        NUM_PLACES=states.inputs_LXGI.shape[2], TOKENS=_TOKENS, BLOCK=_BLOCK, **options(4),
    )  # fmt: skip
