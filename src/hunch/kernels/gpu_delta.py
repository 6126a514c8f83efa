"""The gated delta rule on a GPU: a state per row and head, folded token by token.

`kernels.delta` has its plain Python form, `gpu_recurrence` says why it is exact.

Shape letters: T packed tokens, S sequences of the step, X rows of the engine, G places of the ring,
C channels of the convolution, I = C + 2N inputs of a token, N value heads, H width of a key,
D width of a value, Z = N * D, W = I + Z numbers that a layer's first product gives.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.delta import DeltaShape, DeltaWeights
from hunch.kernels.gpu_launch import cdiv, let_next_start, next_power_of_2, options, wait_for_inputs
from hunch.kernels.gpu_recurrence import (
    BLOCK_V,
    MAX_TAPS,
    input_at,
    input_before,
    mixed,
    sequence_of,
    sequences,
    taps_of,
)
from hunch.kernels.recurrence import RowStates


@triton.jit
def _fold_kernel(
    y_ptr, state_ptr, ring_ptr, folded_ptr, conv_ptr, rate_ptr, bias_ptr, out_ptr,
    seqs_ptr, pos_ptr, slot_ptr, seq_ptr, stride, num_inputs, num_channels,
    NUM_K: tl.constexpr, NUM_V: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    NUM_PLACES: tl.constexpr, IS_TILED: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Sequence s, value head n, some of its values."""
    s, n, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    k_offs = tl.arange(0, BLOCK_K)
    v_offs = part * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = k_offs < K_DIM, v_offs < V_DIM
    k_head = n % NUM_K if IS_TILED else n // (NUM_V // NUM_K)
    q_at = k_head * K_DIM + k_offs
    k_at = NUM_K * K_DIM + q_at
    v_at = 2 * NUM_K * K_DIM + n * V_DIM + v_offs
    q_w0, q_w1, q_w2, q_w3 = taps_of(conv_ptr, q_at, is_k, num_channels)
    k_w0, k_w1, k_w2, k_w3 = taps_of(conv_ptr, k_at, is_k, num_channels)
    v_w0, v_w1, v_w2, v_w3 = taps_of(conv_ptr, v_at, is_v, num_channels)
    rate, bias = tl.load(rate_ptr + n), tl.load(bias_ptr + n)
    b_at, a_at, is_one = num_channels + n, num_channels + NUM_V + n, n >= 0
    wait_for_inputs()
    let_next_start()
    first, num, num_known, row, start = sequence_of(seqs_ptr, pos_ptr, slot_ptr, seq_ptr, s)
    y_ptr += first * stride
    out_ptr += first * NUM_V * V_DIM + n * V_DIM
    ring_ptr += row * NUM_PLACES * num_inputs
    begin = tl.where(start > 0, tl.load(folded_ptr + row), 0)
    end = tl.where(num > 0, start + num, begin)
    known = start + num_known
    is_in = is_k[:, None] & is_v[None, :]
    at = (row * NUM_V + n) * K_DIM * V_DIM + k_offs[:, None] * V_DIM + v_offs[None, :]
    state = tl.load(state_ptr + at, mask=is_in & (start > 0), other=0.0)
    q_a = input_before(ring_ptr, q_at, begin - 3, num_inputs, is_k, NUM_PLACES)
    q_b = input_before(ring_ptr, q_at, begin - 2, num_inputs, is_k, NUM_PLACES)
    q_c = input_before(ring_ptr, q_at, begin - 1, num_inputs, is_k, NUM_PLACES)
    k_a = input_before(ring_ptr, k_at, begin - 3, num_inputs, is_k, NUM_PLACES)
    k_b = input_before(ring_ptr, k_at, begin - 2, num_inputs, is_k, NUM_PLACES)
    k_c = input_before(ring_ptr, k_at, begin - 1, num_inputs, is_k, NUM_PLACES)
    v_a = input_before(ring_ptr, v_at, begin - 3, num_inputs, is_v, NUM_PLACES)
    v_b = input_before(ring_ptr, v_at, begin - 2, num_inputs, is_v, NUM_PLACES)
    v_c = input_before(ring_ptr, v_at, begin - 1, num_inputs, is_v, NUM_PLACES)
    for p in range(begin, end):
        q_d = input_at(y_ptr, ring_ptr, q_at, p, start, stride, num_inputs, is_k, NUM_PLACES)
        k_d = input_at(y_ptr, ring_ptr, k_at, p, start, stride, num_inputs, is_k, NUM_PLACES)
        v_d = input_at(y_ptr, ring_ptr, v_at, p, start, stride, num_inputs, is_v, NUM_PLACES)
        b = input_at(y_ptr, ring_ptr, b_at, p, start, stride, num_inputs, is_one, NUM_PLACES)
        a = input_at(y_ptr, ring_ptr, a_at, p, start, stride, num_inputs, is_one, NUM_PLACES) + bias
        q = mixed(q_a, q_b, q_c, q_d, q_w0, q_w1, q_w2, q_w3, 0.0)
        k = mixed(k_a, k_b, k_c, k_d, k_w0, k_w1, k_w2, k_w3, 0.0)
        v = mixed(v_a, v_b, v_c, v_d, v_w0, v_w1, v_w2, v_w3, 0.0)
        q = q * (tl.math.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (K_DIM**-0.5))
        k = k * tl.math.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        soft = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        state = state * tl.exp(rate * soft)
        seen = tl.sum(state * k[:, None], axis=0)
        gain = (v - seen) / (1.0 + tl.exp(-b))
        state = state + k[:, None] * gain[None, :]
        read = tl.sum(state * q[:, None], axis=0)
        tl.store(out_ptr + (p - start) * NUM_V * V_DIM + v_offs, read, mask=is_v & (p >= start))
        if p == known - 1:  # the rest are nodes
            tl.store(state_ptr + at, state, mask=is_in)
        q_a, q_b, q_c = q_b, q_c, q_d
        k_a, k_b, k_c = k_b, k_c, k_d
        v_a, v_b, v_c = v_b, v_c, v_d


def fold(
    y_PW: Tensor,
    shape: DeltaShape,
    weights: DeltaWeights,
    states: RowStates,
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
    block_v = min(next_power_of_2(shape.v_dim), BLOCK_V)
    grid = (len(seqs_S4), shape.num_v_heads, cdiv(shape.v_dim, block_v))
    _fold_kernel[grid](
        y_PW, states.state_LXNHD[layer], states.inputs_LXGI[layer], states.folded_LX[layer],
        weights.conv_JC, weights.rate_N, weights.bias_N, read_TZ, seqs_S4, attn.pos_T, attn.slot_T,
        attn.seq_T, y_PW.stride(0), shape.num_inputs, shape.num_channels,
        NUM_K=shape.num_k_heads, NUM_V=shape.num_v_heads, K_DIM=shape.k_dim, V_DIM=shape.v_dim,
        NUM_PLACES=states.inputs_LXGI.shape[2], IS_TILED=shape.is_tiled,
        BLOCK_K=next_power_of_2(shape.k_dim), BLOCK_V=block_v, **options(4),
    )  # fmt: skip


@triton.jit
def _gated_norm_kernel(
    read_ptr, gate_ptr, norm_ptr, slot_ptr, out_ptr, stride, eps,
    NUM_V: tl.constexpr, V_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Token t, value head n."""
    t, n = tl.program_id(0).to(tl.int64), tl.program_id(1)
    offs = tl.arange(0, BLOCK)
    is_in = offs < V_DIM
    weight = tl.load(norm_ptr + offs, mask=is_in, other=0.0)
    wait_for_inputs()
    let_next_start()
    is_live = is_in & (tl.load(slot_ptr + t) >= 0)
    at = t * NUM_V * V_DIM + n * V_DIM + offs
    x = tl.load(read_ptr + at, mask=is_live, other=0.0)
    gate = tl.load(gate_ptr + t * stride + n * V_DIM + offs, mask=is_live, other=0.0).to(tl.float32)
    y = x * tl.math.rsqrt(tl.sum(x * x, axis=0) / V_DIM + eps) * weight
    y = y * (gate / (1.0 + tl.exp(-gate)))
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=is_in)


def gated_norm(
    read_TZ: Tensor, gate_PZ: Tensor, norm_D: Tensor, eps: float, slot_T: Tensor, out_PZ: Tensor
) -> None:
    """Each head of what tokens read, normed, times the silu of its gate."""
    width, num_heads = len(norm_D), read_TZ.shape[1] // len(norm_D)
    _gated_norm_kernel[(len(read_TZ), num_heads)](
        read_TZ, gate_PZ, norm_D, slot_T, out_PZ, gate_PZ.stride(0), eps,
        NUM_V=num_heads, V_DIM=width, BLOCK=next_power_of_2(width), **options(1),
    )  # fmt: skip
