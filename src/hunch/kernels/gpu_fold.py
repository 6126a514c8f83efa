"""Mamba 2 and the gated delta rule on a GPU: a state per row and head, folded token by token.

`kernels.ssm` and `kernels.delta` have the plain Python forms, `gpu_recurrence` says why they are
exact.

Shape letters: T packed tokens, S sequences of the step, C channels of the convolution, I inputs of
a token: the channels, then one or two numbers per head; N heads, H width of a key, D width of a
value, Z = N * D, W = I + Z numbers that a layer's first product gives, for each of P padded tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.delta import DeltaShape, DeltaWeights
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options, take_turns
from hunch.kernels.gpu_recurrence import (
    MAX_TAPS,
    input_at,
    inputs_before,
    mixed,
    sequence_of,
    sequences,
    taps_of,
)
from hunch.kernels.recurrence import RecurrentStates
from hunch.kernels.ssm import SsmShape, SsmWeights

_MAX_VALUES = 32  # of a head that a program folds: one row then fills a GPU


@triton.jit
def _fold_delta(state, q, k, v, rate, size, b, K_DIM: tl.constexpr):
    """The state after a token, and what the token reads."""
    q = q * (tl.math.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (K_DIM**-0.5))
    k = k * tl.math.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    state = state * tl.exp(rate * size)
    seen = tl.sum(state * k[:, None], axis=0)
    gain = (v - seen) / (1.0 + tl.exp(-b))
    state = state + k[:, None] * gain[None, :]
    return state, tl.sum(state * q[:, None], axis=0)


@triton.jit
def _fold_ssm(state, q, k, v, rate, size, skip):
    """The same by Mamba 2's rule."""
    state = state * tl.exp(rate * size) + k[:, None] * (v * size)[None, :]
    return state, tl.sum(state * q[:, None], axis=0) + skip * v


@triton.jit
def _fold_kernel(
    y_ptr, state_ptr, ring_ptr, folded_ptr, conv_ptr, conv_bias_ptr, rate_ptr, bias_ptr, skip_ptr,
    out_ptr, seqs_ptr, pos_ptr, slot_ptr, seq_ptr, stride, num_inputs, num_channels,
    IS_DELTA: tl.constexpr, IS_TILED: tl.constexpr, NUM_K: tl.constexpr, NUM_V: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, NUM_PLACES: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Sequence s, value head n, some of its values."""
    s, n, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    k_offs = tl.arange(0, BLOCK_K)
    v_offs = part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v, is_one = k_offs < K_DIM, v_offs < V_DIM, n >= 0
    k_head = n % NUM_K if IS_TILED else n // (NUM_V // NUM_K)
    if IS_DELTA:  # queries, keys, values, then b and a of every head
        q_at = k_head * K_DIM + k_offs
        k_at = NUM_K * K_DIM + q_at
        v_at = 2 * NUM_K * K_DIM + n * V_DIM + v_offs
        b_at, a_at = num_channels + n, num_channels + NUM_V + n
        q_bias, k_bias, v_bias = 0.0, 0.0, 0.0
    else:  # values, keys, queries, then a of every head
        v_at = n * V_DIM + v_offs
        k_at = NUM_V * V_DIM + k_head * K_DIM + k_offs
        q_at = NUM_K * K_DIM + k_at
        a_at = num_channels + n
        q_bias = tl.load(conv_bias_ptr + q_at, mask=is_k, other=0.0)
        k_bias = tl.load(conv_bias_ptr + k_at, mask=is_k, other=0.0)
        v_bias = tl.load(conv_bias_ptr + v_at, mask=is_v, other=0.0)
        skip = tl.load(skip_ptr + n)
    q_w0, q_w1, q_w2, q_w3 = taps_of(conv_ptr, q_at, is_k, num_channels)
    k_w0, k_w1, k_w2, k_w3 = taps_of(conv_ptr, k_at, is_k, num_channels)
    v_w0, v_w1, v_w2, v_w3 = taps_of(conv_ptr, v_at, is_v, num_channels)
    rate, bias = tl.load(rate_ptr + n), tl.load(bias_ptr + n)
    take_turns()
    first, num, num_known, row, start = sequence_of(seqs_ptr, pos_ptr, slot_ptr, seq_ptr, s)
    y_ptr += first * stride
    out_ptr += first * NUM_V * V_DIM + n * V_DIM
    ring_ptr += row * NUM_PLACES * num_inputs
    begin = tl.where(start > 0, tl.load(folded_ptr + row), 0)
    end = tl.where(num > 0, start + num, begin)
    is_in = is_k[:, None] & is_v[None, :]
    at = (row * NUM_V + n) * K_DIM * V_DIM + k_offs[:, None] * V_DIM + v_offs[None, :]
    state = tl.load(state_ptr + at, mask=is_in & (start > 0), other=0.0)
    q_a, q_b, q_c = inputs_before(ring_ptr, q_at, begin, num_inputs, is_k, NUM_PLACES)
    k_a, k_b, k_c = inputs_before(ring_ptr, k_at, begin, num_inputs, is_k, NUM_PLACES)
    v_a, v_b, v_c = inputs_before(ring_ptr, v_at, begin, num_inputs, is_v, NUM_PLACES)
    for p in range(begin, end):
        q_d = input_at(y_ptr, ring_ptr, q_at, p, start, stride, num_inputs, is_k, NUM_PLACES)
        k_d = input_at(y_ptr, ring_ptr, k_at, p, start, stride, num_inputs, is_k, NUM_PLACES)
        v_d = input_at(y_ptr, ring_ptr, v_at, p, start, stride, num_inputs, is_v, NUM_PLACES)
        a = input_at(y_ptr, ring_ptr, a_at, p, start, stride, num_inputs, is_one, NUM_PLACES) + bias
        q = mixed(q_a, q_b, q_c, q_d, q_w0, q_w1, q_w2, q_w3, q_bias)
        k = mixed(k_a, k_b, k_c, k_d, k_w0, k_w1, k_w2, k_w3, k_bias)
        v = mixed(v_a, v_b, v_c, v_d, v_w0, v_w1, v_w2, v_w3, v_bias)
        size = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        if IS_DELTA:
            b = input_at(y_ptr, ring_ptr, b_at, p, start, stride, num_inputs, is_one, NUM_PLACES)
            state, read = _fold_delta(state, q, k, v, rate, size, b, K_DIM)
        else:
            state, read = _fold_ssm(state, q, k, v, rate, size, skip)
        tl.store(out_ptr + (p - start) * NUM_V * V_DIM + v_offs, read, mask=is_v & (p >= start))
        if p == start + num_known - 1:  # the rest are nodes
            tl.store(state_ptr + at, state, mask=is_in)
        q_a, q_b, q_c = q_b, q_c, q_d
        k_a, k_b, k_c = k_b, k_c, k_d
        v_a, v_b, v_c = v_b, v_c, v_d


def fold(
    y_PW: Tensor,
    shape: DeltaShape | SsmShape,
    weights: DeltaWeights | SsmWeights,
    states: RecurrentStates,
    layer: int,
    attn: AttnInputs,
    read_TZ: Tensor,
) -> None:
    """Compute what each token reads, in float32; rows' states advance to the last known token.

    The weights have `MAX_TAPS` taps. The tokens' inputs are the first numbers of y.
    """
    assert len(weights.conv_JC) == MAX_TAPS
    seqs_S4 = sequences(attn)
    if not len(seqs_S4):
        return
    is_delta = isinstance(shape, DeltaShape)
    num_heads, k_dim, v_dim = shape.state
    block_k = next_power_of_2(k_dim)
    block_v = min(next_power_of_2(v_dim), _MAX_VALUES)
    _fold_kernel[(len(seqs_S4), num_heads, cdiv(v_dim, block_v))](
        y_PW, states.state_LXNHD[layer], states.inputs_LXGI[layer], states.folded_LX[layer],
        weights.conv_JC, None if is_delta else weights.conv_bias_C, weights.rate_N, weights.bias_N,
        None if is_delta else weights.skip_N, read_TZ, seqs_S4, attn.pos_T, attn.slot_T,
        attn.seq_T, y_PW.stride(0), shape.num_inputs, shape.num_channels,
        IS_DELTA=is_delta, IS_TILED=is_delta and shape.is_tiled, NUM_K=shape.key_width // k_dim,
        NUM_V=num_heads, K_DIM=k_dim, V_DIM=v_dim, NUM_PLACES=states.inputs_LXGI.shape[2],
        BLOCK_K=block_k, BLOCK_V=block_v, **options(4 if block_k <= 128 else 8),
    )  # fmt: skip


@triton.jit
def _gate_kernel(
    read_ptr, gate_ptr, norm_ptr, slot_ptr, out_ptr, stride, eps,
    NUM_GROUPS: tl.constexpr, WIDTH: tl.constexpr, HAS_NORM: tl.constexpr,
    IS_NORM_SHARED: tl.constexpr, IS_NORM_FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Token t, group g of heads."""
    t, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inner = tl.arange(0, BLOCK)
    offs = g * WIDTH + inner
    is_in = inner < WIDTH
    take_turns()
    is_live = is_in & (tl.load(slot_ptr + t) >= 0)
    at = t * NUM_GROUPS * WIDTH + offs
    x = tl.load(read_ptr + at, mask=is_live, other=0.0)
    gate = tl.load(gate_ptr + t * stride + offs, mask=is_live, other=0.0).to(tl.float32)
    gate = gate / (1.0 + tl.exp(-gate))
    if not IS_NORM_FIRST:
        x = x * gate
    if HAS_NORM:
        weight = tl.load(norm_ptr + (inner if IS_NORM_SHARED else offs), mask=is_in, other=0.0)
        x = x * tl.math.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps) * weight
    if IS_NORM_FIRST:
        x = x * gate
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=is_in)


def gate(
    read_TZ: Tensor,
    gate_PZ: Tensor,
    shape: DeltaShape | SsmShape,
    norm: Tensor | None,
    eps: float,
    slot_T: Tensor,
    out_PZ: Tensor,
) -> None:
    """What tokens read times the silu of its gate, normed after it or before, where there is a
    norm: in a delta net each head by the weights of all (D), in Mamba 2 each group of heads by its
    own (Z)."""
    is_delta = isinstance(shape, DeltaShape)
    num_groups = shape.num_v_heads if is_delta else shape.num_groups
    width = shape.value_width // num_groups
    num_warps = 1 if is_delta else 4 if width <= 2048 else 8
    _gate_kernel[(len(read_TZ), num_groups)](
        read_TZ, gate_PZ, norm, slot_T, out_PZ, gate_PZ.stride(0), eps,
        NUM_GROUPS=num_groups, WIDTH=width, HAS_NORM=norm is not None, IS_NORM_SHARED=is_delta,
        IS_NORM_FIRST=is_delta or shape.is_norm_first, BLOCK=next_power_of_2(width),
        **options(num_warps),
    )  # fmt: skip
