"""What all products share: tiles, and endings (what is done with a tile's sums).

Shape letters: M rows, N outputs, T packed tokens, C cache slots, H head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from hunch.kernels.gpu_activation import gate


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch divides its work. Any tile gives the same bits."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    prefetch: int = 0  # lines of 64 weights per row, fetched before the inputs are ready
    group: int = 1  # tiles of rows that go through the weights together


@triton.jit
def place(num_m, GROUP: tl.constexpr):
    """This program's tile: rows, outputs."""
    pid = tl.program_id(0)
    if GROUP == 1:
        return pid % num_m, pid // num_m
    # Neighbours share inputs and weights, which then stay in the cache.
    width = GROUP * (tl.num_programs(0) // num_m)
    first_m = pid // width * GROUP
    size = tl.minimum(num_m - first_m, GROUP)
    return first_m + pid % width % size, pid % width // size


@triton.jit
def outputs(pid_n, N, ENDING: tl.constexpr, HEAD: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile's columns: where results go and which of them exist, the weights' rows a and b, and
    for "rope" the head and the places in it."""
    if ENDING == "rope":  # columns of a head's first half; their partners are half a head further
        TILES: tl.constexpr = (HEAD // 2 + BLOCK_N - 1) // BLOCK_N
        head = pid_n // TILES
        offs_h = (pid_n % TILES) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_col = offs_h < HEAD // 2
        offs_h = tl.minimum(offs_h, HEAD // 2 - 1)
        offs_n = head * HEAD + offs_h
        offs_a, offs_b = offs_n, offs_n + HEAD // 2
    else:
        head, offs_h = pid_n, tl.arange(0, BLOCK_N)
        offs_n = pid_n * BLOCK_N + offs_h
        is_col = offs_n < N
        offs_a = tl.minimum(offs_n, N - 1)
        offs_b = offs_a + N  # gated: N outputs of 2N weight rows
    return offs_n, is_col, offs_a, offs_b, head, offs_h


@triton.jit
def turns(pos_ptr, slot_ptr, rope_ptr, offs_m, is_row, offs_h, HEAD: tl.constexpr):
    """Slots of rows, cosines and sines of their positions."""
    slot = tl.load(slot_ptr + offs_m, mask=is_row, other=-1)
    turn_ptrs = rope_ptr + tl.load(pos_ptr + offs_m, mask=is_row, other=0)[:, None] * HEAD
    cos = tl.load(turn_ptrs + offs_h[None, :])
    return slot, cos, tl.load(turn_ptrs + HEAD // 2 + offs_h[None, :])


@triton.jit
def finish(
    a, b, y_ptr, residual_ptr, k_cache_ptr, v_cache_ptr, slot, cos, sin,
    offs_m, offs_n, head, offs_h, is_row, is_col, M, y_stride, pid_s,
    ENDING: tl.constexpr, HEAD: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr,
):  # fmt: skip
    """Finish a tile's sums and store them; see `gpu_gemm`."""
    is_out = is_row[:, None] & is_col[None, :]
    at = offs_m[:, None].to(tl.int64) * y_stride + offs_n[None, :]
    y_ptrs = y_ptr + at
    if ENDING == "store":
        if residual_ptr is not None:
            a += tl.load(residual_ptr + at, mask=is_out, other=0.0).to(tl.float32)
        part = pid_s.to(tl.int64) * M * y_stride
        tl.store(y_ptrs + part, a.to(y_ptr.dtype.element_ty), mask=is_out)
    elif ENDING != "rope":  # the name of an activation
        tl.store(y_ptrs, gated(a, b, y_ptr.dtype.element_ty, ENDING), mask=is_out)
    else:
        _store_rotated(a, b, y_ptrs, is_out, offs_h, head, cos, sin, slot, k_cache_ptr, v_cache_ptr,
                       HEAD, NUM_HEADS, NUM_KV)  # fmt: skip


@triton.jit
def gated(a, b, dtype: tl.constexpr, ACT: tl.constexpr):
    """act(a) * b, both rounded first, as products of their own would be."""
    a, b = a.to(dtype).to(tl.float32), b.to(dtype).to(tl.float32)
    return gate(a, b, ACT).to(dtype)


@triton.jit
def _store_rotated(
    lo, hi, q_ptrs, is_out, offs_h, head, cos, sin, slot, k_cache_ptr, v_cache_ptr,
    HEAD: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV: tl.constexpr,
):  # fmt: skip
    """Rotate q and k; q goes out, k and v go to each token's slot."""
    HALF: tl.constexpr = HEAD // 2
    lo = lo.to(q_ptrs.dtype.element_ty).to(tl.float32)  # as a product of its own would be
    hi = hi.to(q_ptrs.dtype.element_ty).to(tl.float32)
    if head < NUM_HEADS + NUM_KV:
        lo, hi = lo * cos - hi * sin, hi * cos + lo * sin
    if head < NUM_HEADS:
        tl.store(q_ptrs, lo.to(q_ptrs.dtype.element_ty), mask=is_out)
        tl.store(q_ptrs + HALF, hi.to(q_ptrs.dtype.element_ty), mask=is_out)
    else:
        is_live = is_out & (slot >= 0)[:, None]
        kv_head = (head - NUM_HEADS) % NUM_KV
        at = (slot[:, None].to(tl.int64) * NUM_KV + kv_head) * HEAD + offs_h[None, :]
        cache_ptr = k_cache_ptr if head < NUM_HEADS + NUM_KV else v_cache_ptr
        tl.store(cache_ptr + at, lo.to(cache_ptr.dtype.element_ty), mask=is_live)
        tl.store(cache_ptr + at + HALF, hi.to(cache_ptr.dtype.element_ty), mask=is_live)
