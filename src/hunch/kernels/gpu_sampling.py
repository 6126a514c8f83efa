"""Choosing tokens on a GPU: temperature, filters and keyed noise, without the host.

`kernels.noise` and `sampling.state` are the specification.

Shape letters: M rows of logits, X rows of the engine, V vocabulary (columns), C chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_filters import CHUNK, MAX_COLUMNS, edges, is_kept, scaled
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options, take_turns


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10, as kernels.noise defines it. All arguments are uint32."""
    for _ in tl.static_range(10):
        hi0, lo0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        hi1, lo1 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def gumbel_of(word):
    """A uint32 word to standard Gumbel noise."""
    v = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    w = 1.0 - v  # log1p(-v) = log(w) * v / (1 - w), which corrects the rounding of w
    e = tl.where(w == 1.0, v, -tl.log(w) * tl.div_rn(v, 1.0 - w))
    return -tl.log(e)


@triton.jit
def _noise(num_blocks: tl.constexpr, first_block, pos, sample, stream, seed):
    """Noise of 4 * num_blocks tokens, the first of them 4 * first_block."""
    block = (first_block + tl.arange(0, num_blocks)).to(tl.uint32)
    zero = tl.zeros((num_blocks,), tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32) + zero
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero
    w0, w1, w2, w3 = philox(block, pos.to(tl.uint32) + zero, sample.to(tl.uint32) + zero,
                            zero + stream, k0, k1)  # fmt: skip
    return gumbel_of(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))


@triton.jit
def _noise_at(ids, pos, sample, stream, seed):
    """Noise of any tokens."""
    zero = (ids * 0).to(tl.uint32)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32) + zero
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32) + zero
    w0, w1, w2, w3 = philox((ids >> 2).to(tl.uint32), pos.to(tl.uint32) + zero,
                            sample.to(tl.uint32) + zero, zero + stream, k0, k1)  # fmt: skip
    at = ids & 3
    return gumbel_of(tl.where(at == 0, w0, tl.where(at == 1, w1, tl.where(at == 2, w2, w3))))


@triton.jit
def scores_of(
    logits_ptr, m, chunk, row, pos, ids_ptr, temperature_ptr, min_p_ptr, seed_ptr, sample_ptr,
    edge_ptr, best_ptr, num_columns, stream, IS_SAMPLED: tl.constexpr, HAS_EDGE: tl.constexpr,
    HAS_IDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The scores of one chunk of a row of logits, by which tokens are chosen."""
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    is_in = columns < num_columns
    x = tl.load(logits_ptr + m * num_columns + columns, mask=is_in, other=float("-inf"))
    z = x.to(tl.float32)
    if IS_SAMPLED:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            z = scaled(z, temperature)
            if HAS_EDGE:
                best, edge = tl.load(best_ptr + m), tl.load(edge_ptr + m)
                is_left = is_kept(z, columns, best, edge, tl.load(min_p_ptr + row))
                z = tl.where(is_left, z, float("-inf"))
            sample, seed = tl.load(sample_ptr + row), tl.load(seed_ptr + row)
            if HAS_IDS:
                ids = tl.load(ids_ptr + columns, mask=is_in, other=0)
                z += _noise_at(ids, pos, sample, stream, seed)
            else:
                z += _noise(CHUNK // 4, chunk * (CHUNK // 4), pos, sample, stream, seed)
    return tl.where(is_in, z, float("-inf"))


@triton.jit
def _best_kernel(
    logits_ptr, row_ptr, pos_ptr, ids_ptr, temperature_ptr, min_p_ptr, seed_ptr, sample_ptr,
    edge_ptr, best_ptr, value_ptr, index_ptr, num_columns, stream, IS_SAMPLED: tl.constexpr,
    HAS_EDGE: tl.constexpr, HAS_IDS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best score of one chunk of a row, the lowest column among equals."""
    m, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    take_turns()
    row, pos = m, m
    if IS_SAMPLED:
        row, pos = tl.load(row_ptr + m), tl.load(pos_ptr + m)
    z = scores_of(
        logits_ptr, m, chunk, row, pos, ids_ptr, temperature_ptr, min_p_ptr, seed_ptr, sample_ptr,
        edge_ptr, best_ptr, num_columns, stream, IS_SAMPLED, HAS_EDGE, HAS_IDS, CHUNK,
    )  # fmt: skip
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.max(z, axis=0)
    index = tl.min(tl.where((z == value) & (columns < num_columns), columns, 2147483647), axis=0)
    tl.store(value_ptr + m * tl.num_programs(1) + chunk, value)
    tl.store(index_ptr + m * tl.num_programs(1) + chunk, index)


@triton.jit
def _reduce_kernel(
    value_ptr, index_ptr, ids_ptr, out_ptr, num_chunks,
    HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    take_turns()
    offs = tl.arange(0, BLOCK)
    is_in = offs < num_chunks
    value = tl.load(value_ptr + m * num_chunks + offs, mask=is_in, other=float("-inf"))
    index = tl.load(index_ptr + m * num_chunks + offs, mask=is_in, other=2147483647)
    best = tl.max(value, axis=0)
    found = tl.min(tl.where(value == best, index, 2147483647), axis=0)
    found = tl.where(found == 2147483647, 0, found)  # a row of NaN has no best
    if HAS_IDS:
        tl.store(out_ptr + m, tl.load(ids_ptr + found))
    else:
        tl.store(out_ptr + m, found.to(tl.int64))


def choose(
    logits_MV: Tensor, row_M: Tensor, pos_M: Tensor, temperature_X: Tensor, top_k_X: Tensor,
    top_p_X: Tensor, log_min_p_X: Tensor, seed_X: Tensor, sample_X: Tensor, *, stream: int = 0,
    is_sampled: bool = True, is_filtered: bool = True, ids_V: Tensor | None = None,
    out_M: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The token that each row of logits chooses; is_sampled, is_filtered: whether any row is.

    ids_V: the token of each column, if the columns are a part of the vocabulary.
    """
    num_rows, num_columns = logits_MV.shape
    assert logits_MV.is_contiguous()
    assert num_columns < MAX_COLUMNS
    device = logits_MV.device
    num_chunks = cdiv(num_columns, CHUNK)
    value = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    index = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    out_M = torch.empty(num_rows, dtype=torch.int64, device=device) if out_M is None else out_M
    edge_M, best_M = index, value
    if is_sampled and is_filtered:
        edge_M, best_M = edges(
            logits_MV, row_M, temperature_X, top_k_X, top_p_X, log_min_p_X, value
        )
    ids = row_M if ids_V is None else ids_V
    _best_kernel[(num_rows, num_chunks)](
        logits_MV, row_M, pos_M, ids, temperature_X, log_min_p_X, seed_X, sample_X, edge_M, best_M,
        value, index, num_columns, stream, IS_SAMPLED=is_sampled,
        HAS_EDGE=is_sampled and is_filtered, HAS_IDS=ids_V is not None, CHUNK=CHUNK, **options(8),
    )  # fmt: skip
    _reduce_kernel[(num_rows,)](
        value, index, ids, out_M, num_chunks, HAS_IDS=ids_V is not None,
        BLOCK=next_power_of_2(num_chunks), **options(1),
    )  # fmt: skip
    return out_M


def argmax(logits_MV: Tensor, out_M: Tensor | None = None) -> Tensor:
    """The best token of each row, the lowest id among equals."""
    x = logits_MV
    return choose(x, x, x, x, x, x, x, x, x, is_sampled=False, is_filtered=False, out_M=out_M)
