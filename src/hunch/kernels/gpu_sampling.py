"""Choosing tokens on a GPU: temperature, filters and keyed noise without a word from the host.

What is kept is always the first few tokens by (score, then lower id), so one edge per row says it
all. The edge is searched two bits at a time over whole-number counts and masses: nothing is sorted,
and no sum depends on an order. `sampling.filters.filter_ref` and `kernels.noise` are the
specification.

Shape letters: M rows of logits, X rows of the engine, V vocabulary (columns), C chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_launch import let_next_start, next_power_of_2, options, wait_for_inputs

ID_BITS = 20  # a rank is the score's 32 bits, then the id, turned around
MASS = 2.0**40  # units of probability mass of the best token
CHUNK = 4096


@triton.jit
def _scaled(x, temperature):
    """logits / T, rounded once; greedy rows as they are."""
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0) + tl.zeros_like(x))


@triton.jit
def _rank(z, ids, ID_BITS: tl.constexpr):
    """A whole number that grows with the score and, among equals, falls with the id."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    return (key.to(tl.int64) << ID_BITS) | ((1 << ID_BITS) - 1 - ids)


@triton.jit
def _edge(
    x_ptr, temperature, best, log_min_p, lowest, target, num_columns, IS_MASS: tl.constexpr,
    MASS: tl.constexpr, ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The largest rank at which tokens from the top on down to it weigh `target` or more."""
    offs = tl.arange(0, CHUNK)
    edge = tl.zeros((), tl.int64)
    above = tl.zeros((), tl.int64)  # weight of ranks known to lie above the edge's prefix
    shift = tl.full((), 32 + ID_BITS, tl.int32)
    num_left = tl.full((), 2, tl.int32)
    while (shift > 0) & (num_left > 1):
        shift -= 2
        w3 = tl.zeros((CHUNK,), tl.int64)
        w2 = tl.zeros((CHUNK,), tl.int64)
        w1 = tl.zeros((CHUNK,), tl.int64)
        n = tl.zeros((CHUNK,), tl.int32)  # tokens per digit, eight bits each
        for start in range(0, num_columns, CHUNK):
            ids = start + offs
            x = tl.load(x_ptr + ids, mask=ids < num_columns, other=float("-inf"))
            z = _scaled(x, temperature)
            rank = _rank(z, ids, ID_BITS)
            is_in = (ids < num_columns) & (z - best >= log_min_p) & (rank >= lowest)
            is_in &= (rank >> (shift + 2)) == (edge >> (shift + 2))
            digit = ((rank >> shift) & 3).to(tl.int32)
            if IS_MASS:
                weight = (tl.exp(z - best) * MASS).to(tl.int64)
            else:
                weight = tl.full((CHUNK,), 1, tl.int64)
            weight = tl.where(is_in, weight, 0)
            w3 += tl.where(digit == 3, weight, 0)
            w2 += tl.where(digit == 2, weight, 0)
            w1 += tl.where(digit == 1, weight, 0)
            n += tl.where(is_in, 1 << (digit * 8), 0)
        from3 = above + tl.sum(w3, 0)
        from2 = from3 + tl.sum(w2, 0)
        from1 = from2 + tl.sum(w1, 0)
        pick = tl.where(from3 >= target, 3, tl.where(from2 >= target, 2,
                        tl.where(from1 >= target, 1, 0)))  # fmt: skip
        above = tl.where(pick == 3, above, tl.where(pick == 2, from3,
                         tl.where(pick == 1, from2, from1)))  # fmt: skip
        num_left = tl.sum((n >> (pick * 8)) & 255, 0)
        edge += pick.to(tl.int64) << shift
    # The bits not looked at are zero: the one token left stands at or above the edge.
    return tl.maximum(edge, lowest)


@triton.jit
def _filter_kernel(
    logits_ptr, row_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, edge_ptr, best_ptr,
    num_columns, MASS: tl.constexpr, ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Per row of logits: the best scaled logit, and the rank below which tokens are removed."""
    m = tl.program_id(0).to(tl.int64)
    let_next_start()
    wait_for_inputs()
    row = tl.load(row_ptr + m)
    temperature = tl.load(temperature_ptr + row)
    x_ptr = logits_ptr + m * num_columns
    offs = tl.arange(0, CHUNK)
    best = tl.full((CHUNK,), float("-inf"), tl.float32)
    for start in range(0, num_columns, CHUNK):
        ids = start + offs
        x = tl.load(x_ptr + ids, mask=ids < num_columns, other=float("-inf"))
        best = tl.maximum(best, _scaled(x, temperature))
    best = tl.max(best, axis=0)
    edge = tl.zeros((), tl.int64)
    if temperature > 0:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        log_min_p = tl.load(min_p_ptr + row)
        if (top_k > 0) & (top_k < num_columns):
            edge = _edge(x_ptr, temperature, best, log_min_p, edge, top_k, num_columns,
                         False, MASS, ID_BITS, CHUNK)  # fmt: skip
        if top_p < 1:
            total = tl.zeros((CHUNK,), tl.int64)
            for start in range(0, num_columns, CHUNK):
                ids = start + offs
                x = tl.load(x_ptr + ids, mask=ids < num_columns, other=float("-inf"))
                z = _scaled(x, temperature)
                is_in = (z - best >= log_min_p) & (_rank(z, ids, ID_BITS) >= edge)
                mass = (tl.exp(z - best) * MASS).to(tl.int64)
                total += tl.where(is_in & (ids < num_columns), mass, 0)
            limit = tl.math.ceil(top_p * tl.sum(total, 0).to(tl.float64)).to(tl.int64)
            edge = _edge(x_ptr, temperature, best, log_min_p, edge, tl.maximum(limit, 1),
                         num_columns, True, MASS, ID_BITS, CHUNK)  # fmt: skip
    tl.store(edge_ptr + m, edge)
    tl.store(best_ptr + m, best)


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
    w = 1.0 - v  # log1p(-v) = log(w) * v / (1 - w): what rounding took from w is given back
    e = tl.where(w == 1.0, v, -tl.log(w) * tl.div_rn(v, 1.0 - w))
    return -tl.log(e)


@triton.jit
def _noise(ids, num_blocks: tl.constexpr, first_block, pos, sample, stream, seed):
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
def _best_kernel(
    logits_ptr, row_ptr, pos_ptr, ids_ptr, temperature_ptr, min_p_ptr, seed_ptr, sample_ptr,
    edge_ptr, best_ptr, value_ptr, index_ptr, num_columns, stream,
    IS_SAMPLED: tl.constexpr, HAS_EDGE: tl.constexpr, HAS_IDS: tl.constexpr,
    ID_BITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best score of one chunk of a row, the lowest column among equals."""
    m, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    let_next_start()
    wait_for_inputs()
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    is_in = columns < num_columns
    x = tl.load(logits_ptr + m * num_columns + columns, mask=is_in, other=float("-inf"))
    z = x.to(tl.float32)
    if IS_SAMPLED:
        row = tl.load(row_ptr + m)
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0:
            z = _scaled(z, temperature)
            if HAS_EDGE:
                gap = z - tl.load(best_ptr + m)
                is_kept = _rank(z, columns, ID_BITS) >= tl.load(edge_ptr + m)
                is_kept &= (gap >= tl.load(min_p_ptr + row)) | (gap == 0)
                z = tl.where(is_kept, z, float("-inf"))
            pos, sample = tl.load(pos_ptr + m), tl.load(sample_ptr + row)
            seed = tl.load(seed_ptr + row)
            if HAS_IDS:
                ids = tl.load(ids_ptr + columns, mask=is_in, other=0)
                z += _noise_at(ids, pos, sample, stream, seed)
            else:
                z += _noise(columns, CHUNK // 4, chunk * (CHUNK // 4), pos, sample, stream, seed)
    z = tl.where(is_in, z, float("-inf"))
    value = tl.max(z, axis=0)
    index = tl.min(tl.where((z == value) & is_in, columns, 2147483647), axis=0)
    tl.store(value_ptr + m * tl.num_programs(1) + chunk, value)
    tl.store(index_ptr + m * tl.num_programs(1) + chunk, index)


@triton.jit
def _reduce_kernel(
    value_ptr, index_ptr, ids_ptr, out_ptr, num_chunks,
    HAS_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    let_next_start()
    wait_for_inputs()
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
    """The token each row of logits chooses; is_sampled, is_filtered: whether any row asks for it.

    ids_V names the token of each column where the columns are a part of the vocabulary.
    """
    num_rows, num_columns = logits_MV.shape
    assert logits_MV.is_contiguous() and num_columns < 2**ID_BITS
    assert num_columns <= 255 * CHUNK  # counts of a digit have eight bits per lane
    device = logits_MV.device
    num_chunks = triton.cdiv(num_columns, CHUNK)
    value = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=device)
    index = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=device)
    out_M = torch.empty(num_rows, dtype=torch.int64, device=device) if out_M is None else out_M
    edge_M, best_M = index, value
    if is_sampled and is_filtered:
        edge_M = torch.empty(num_rows, dtype=torch.int64, device=device)
        best_M = torch.empty(num_rows, dtype=torch.float32, device=device)
        _filter_kernel[(num_rows,)](
            logits_MV, row_M, temperature_X, top_k_X, top_p_X, log_min_p_X, edge_M, best_M,
            num_columns, MASS=MASS, ID_BITS=ID_BITS, CHUNK=CHUNK, **options(16),
        )  # fmt: skip
    ids = row_M if ids_V is None else ids_V
    _best_kernel[(num_rows, num_chunks)](
        logits_MV, row_M, pos_M, ids, temperature_X, log_min_p_X, seed_X, sample_X, edge_M, best_M,
        value, index, num_columns, stream, IS_SAMPLED=is_sampled,
        HAS_EDGE=is_sampled and is_filtered, HAS_IDS=ids_V is not None, ID_BITS=ID_BITS,
        CHUNK=CHUNK, **options(8),
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
