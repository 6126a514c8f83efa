"""What a GPU's kernels of recurrent layers share: a step's sequences, inputs of tokens, the ring.

`kernels.recurrence` has the states, and the plain Python form of these kernels. One program has
some values of a head for one row, in a layout fixed by the model. So a token's sums are always
added in the same order, whether it is known, checked as a node, or folded in after it was accepted.

Shape letters: S sequences of the step, W numbers that a layer's first product gives for each of P
padded tokens: the inputs of the recurrence, then the gate; J taps of the convolution, C its
channels.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_launch import cdiv, options, take_turns
from hunch.kernels.recur import sequences_of
from hunch.kernels.recurrence import RecurrentStates

SEQUENCES = "sequences"  # of AttnInputs.memo
MAX_TAPS = 4
STEP_ROW = -1  # instead of a sequence's row: take the row that seq_T names


def step_sequences(num_rows: int, num_tokens: int, device: torch.device) -> Tensor:
    """The sequences of a captured step: `num_tokens` of each row, the first of which is known."""
    first_S = torch.arange(num_rows, device=device) * num_tokens
    others = torch.ones_like(first_S), torch.full_like(first_S, STEP_ROW)
    return torch.stack((first_S, first_S + num_tokens, *others), dim=1)


def sequences(attn: AttnInputs) -> Tensor:
    """[S, 4]: first and last packed token, number of known ones, row; made once per step."""
    if SEQUENCES not in attn.memo:
        found = torch.tensor(sequences_of(attn), dtype=torch.int64).view(-1, 4)
        attn.memo[SEQUENCES] = found.to(attn.pos_T.device)
    return attn.memo[SEQUENCES]


@triton.jit
def sequence_of(seqs_ptr, pos_ptr, slot_ptr, seq_ptr, s):
    """First packed token, numbers of live and known ones, row and first position of a sequence."""
    first = tl.load(seqs_ptr + 4 * s)
    last = tl.load(seqs_ptr + 4 * s + 1)
    num_known = tl.load(seqs_ptr + 4 * s + 2)
    row = tl.load(seqs_ptr + 4 * s + 3)
    num = tl.zeros((), tl.int64)
    offs = tl.arange(0, 64)
    for at in range(first, last, 64):  # live tokens come before padding
        slot = tl.load(slot_ptr + at + offs, mask=at + offs < last, other=-1)
        num += tl.sum((slot >= 0).to(tl.int64), axis=0)
    is_live = num > 0
    named = tl.load(seq_ptr + first, mask=is_live, other=0)
    start = tl.load(pos_ptr + first, mask=is_live, other=0)
    row = tl.where(row < 0, named, row)
    return first, num, num_known, row, start


@triton.jit
def input_at(y_ptr, ring_ptr, offs, p, start, stride, num_inputs, is_in, NUM_PLACES: tl.constexpr):
    """A token's inputs: from this step's product, or, for an earlier token, from the ring."""
    new = tl.load(y_ptr + (p - start) * stride + offs, mask=is_in & (p >= start), other=0.0)
    place = (p % NUM_PLACES) * num_inputs
    old = tl.load(ring_ptr + place + offs, mask=is_in & (p < start), other=0.0)
    return new.to(tl.float32) + old.to(tl.float32)


@triton.jit
def _input_before(ring_ptr, offs, p, num_inputs, is_in, NUM_PLACES: tl.constexpr):
    place = ((p + NUM_PLACES) % NUM_PLACES) * num_inputs
    return tl.load(ring_ptr + place + offs, mask=is_in & (p >= 0), other=0.0).to(tl.float32)


@triton.jit
def inputs_before(ring_ptr, offs, p, num_inputs, is_in, NUM_PLACES: tl.constexpr):
    """The inputs of the three tokens before one, the oldest first; 0 before the text."""
    a = _input_before(ring_ptr, offs, p - 3, num_inputs, is_in, NUM_PLACES)
    b = _input_before(ring_ptr, offs, p - 2, num_inputs, is_in, NUM_PLACES)
    c = _input_before(ring_ptr, offs, p - 1, num_inputs, is_in, NUM_PLACES)
    return a, b, c


@triton.jit
def taps_of(conv_ptr, offs, is_in, num_channels):
    """The convolution's weights, the oldest token's first."""
    w_a = tl.load(conv_ptr + offs, mask=is_in, other=0.0)
    w_b = tl.load(conv_ptr + num_channels + offs, mask=is_in, other=0.0)
    w_c = tl.load(conv_ptr + 2 * num_channels + offs, mask=is_in, other=0.0)
    w_d = tl.load(conv_ptr + 3 * num_channels + offs, mask=is_in, other=0.0)
    return w_a, w_b, w_c, w_d


@triton.jit
def mixed(a, b, c, d, w_a, w_b, w_c, w_d, bias):
    """The silu of the convolution."""
    x = a * w_a + b * w_b + c * w_c + d * w_d + bias
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _keep_kernel(
    y_ptr, ring_ptr, folded_ptr, seqs_ptr, pos_ptr, slot_ptr, seq_ptr, stride, num_inputs,
    NUM_PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sequence s, some of the inputs of its last tokens."""
    s, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = part * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < num_inputs
    take_turns()
    first, num, num_known, row, start = sequence_of(seqs_ptr, pos_ptr, slot_ptr, seq_ptr, s)
    ring_ptr += row * NUM_PLACES * num_inputs
    for i in range(tl.maximum(num - NUM_PLACES, 0), num):
        x = tl.load(y_ptr + (first + i) * stride + offs, mask=is_in)
        tl.store(ring_ptr + ((start + i) % NUM_PLACES) * num_inputs + offs, x, mask=is_in)
    if (part == 0) & (num > 0):
        tl.store(folded_ptr + row, start + num_known)


def keep(y_PW: Tensor, states: RecurrentStates, layer: int, attn: AttnInputs) -> None:
    """Store the last inputs in the ring; after `fold`, which still reads the old ones."""
    seqs_S4, (_, _, num_places, num_inputs) = sequences(attn), states.inputs_LXGI.shape
    if not len(seqs_S4):
        return
    _keep_kernel[(len(seqs_S4), cdiv(num_inputs, 1024))](
        y_PW, states.inputs_LXGI[layer], states.folded_LX[layer], seqs_S4, attn.pos_T, attn.slot_T,
        attn.seq_T, y_PW.stride(0), num_inputs, NUM_PLACES=num_places, BLOCK=1024, **options(4),
    )  # fmt: skip


def padded_taps(conv_JC: Tensor) -> Tensor:
    """With `MAX_TAPS` taps, as kernels take them."""
    nothing = conv_JC.new_zeros(MAX_TAPS - len(conv_JC), conv_JC.shape[1])
    return torch.cat((nothing, conv_JC))
