"""min-p, top-k and top-p on a GPU: where a row's kept tokens end, without sorting.

The kept tokens are always the first ones by (score, then lower id), so that one edge per row is
enough. Bins find the neighbourhood of the edge, a binary search the edge itself. Counts and masses
are whole numbers, whose sums do not depend on order. `sampling.filters.filter_ref` is the
specification.

Shape letters: M rows of logits, X rows of the engine, V vocabulary (columns), C chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_launch import next_power_of_2, options, take_turns

MAX_COLUMNS = 1 << 20
ID_BITS = tl.constexpr(20)  # a rank is the score's 32 bits, then the bits of the inverted id
LAST_ID = tl.constexpr(MAX_COLUMNS - 1)
BINS = tl.constexpr(2048)  # of width 1/64 in log space; the last one takes the rest
ROOM = tl.constexpr(4096)  # tokens of one bin that are searched in registers
MASS = tl.constexpr(2.0**40)  # units of probability mass of the best token
CHUNK = 4096


@triton.jit
def scaled(x, temperature):
    """logits / T, rounded once; greedy rows are unchanged."""
    return tl.div_rn(x, tl.where(temperature > 0, temperature, 1.0) + tl.zeros_like(x))


@triton.jit
def rank_of(z, ids):
    """A whole number that orders tokens by score, then by lower id."""
    bits = tl.where(z == 0, 0.0, z).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)
    return (key.to(tl.int64) << ID_BITS) | (LAST_ID - ids)


@triton.jit
def score_of(rank):
    """The score that `rank_of` was given."""
    key = (rank >> ID_BITS).to(tl.int32)
    return tl.where(key < 0, key & 2147483647, ~key).to(tl.float32, bitcast=True)


@triton.jit
def id_of(rank):
    """The id that `rank_of` was given."""
    return LAST_ID - (rank & LAST_ID)


@triton.jit
def is_kept(z, ids, best, edge, log_min_p):
    """Whether tokens of a row stay, by its edge and its best score."""
    gap = z - best
    return (rank_of(z, ids) >= edge) & ((gap >= log_min_p) | (gap == 0))


@triton.jit
def _max_kernel(logits_ptr, row_ptr, temperature_ptr, part_ptr, num_columns,
                CHUNK: tl.constexpr):  # fmt: skip
    """The best scaled logit of one chunk of a row."""
    m, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    take_turns()
    temperature = tl.load(temperature_ptr + tl.load(row_ptr + m))
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + m * num_columns + ids, mask=ids < num_columns, other=float("-inf"))
    best = tl.max(scaled(x.to(tl.float32), temperature), axis=0)
    tl.store(part_ptr + m * tl.num_programs(1) + chunk, best)


@triton.jit
def _bins_kernel(
    logits_ptr, row_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, part_ptr, best_ptr,
    bin_ptr, sums_ptr, num_columns, num_chunks, CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Sort a chunk's tokens into bins by distance from the best; add up counts and masses."""
    m, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    take_turns()
    row = tl.load(row_ptr + m)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    offs = tl.arange(0, CHUNKS_PAD)
    parts = tl.load(part_ptr + m * num_chunks + offs, mask=offs < num_chunks, other=float("-inf"))
    best = tl.max(parts, axis=0)
    tl.store(best_ptr + m, best)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        is_in = ids < num_columns
        x = tl.load(logits_ptr + m * num_columns + ids, mask=is_in, other=float("-inf"))
        gap = scaled(x.to(tl.float32), temperature) - best
        is_kept = is_in & (gap >= tl.load(min_p_ptr + row))
        number = tl.minimum(gap * -64.0, BINS - 1.0).to(tl.int32)  # monotone: times 64 is exact
        number = tl.where(is_kept, number, -1)
        tl.store(bin_ptr + m * num_columns + ids, number.to(tl.int16), mask=is_in)
        sums_ptr += m * (2 * BINS)
        if top_k > 0:
            tl.atomic_add(sums_ptr + number, tl.full((CHUNK,), 1, tl.int64), mask=is_kept,
                          sem="relaxed")  # fmt: skip
        if top_p < 1:
            mass = (tl.exp(gap) * MASS).to(tl.int64)
            tl.atomic_add(sums_ptr + BINS + number, mass, mask=is_kept & (mass > 0), sem="relaxed")


@triton.jit
def _candidates(bin_ptr, ids_ptr, wanted, num_columns, CHUNK: tl.constexpr):
    """List the tokens of one bin, as many as fit; returns how many there are."""
    count = tl.zeros((), tl.int32)
    for start in range(0, num_columns, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        number = tl.load(bin_ptr + ids, mask=ids < num_columns, other=-1)
        is_here = (number == wanted).to(tl.int32)
        place = count + tl.cumsum(is_here, axis=0) - 1
        tl.store(ids_ptr + place, ids, mask=(is_here > 0) & (place < ROOM))
        count += tl.sum(is_here, axis=0)
    tl.debug_barrier()  # the list is read back by other threads
    return count


@triton.jit
def _edge_of(rank, weight, is_in, target):
    """The largest rank such that the listed tokens from it upwards weigh `target` or more."""
    is_in &= weight >= 0
    high = tl.max(tl.where(is_in, rank, 0), axis=0)
    low = tl.min(tl.where(is_in, rank, 0x7FFFFFFFFFFFFFFF), axis=0)
    shift = tl.full((), 60, tl.int32)
    while (shift > 0) & (((high ^ low) >> shift) == 0):
        shift -= 2
    shift += 2
    edge = (high >> shift) << shift  # the leading bits that all share
    above = tl.zeros((), tl.int64)
    while shift > 0:
        shift -= 2
        is_at = is_in & ((rank >> (shift + 2)) == (edge >> (shift + 2)))
        digit = (rank >> shift) & 3
        weight_at = tl.where(is_at, weight, 0)
        from3 = above + tl.sum(tl.where(digit == 3, weight_at, 0), axis=0)
        from2 = from3 + tl.sum(tl.where(digit == 2, weight_at, 0), axis=0)
        from1 = from2 + tl.sum(tl.where(digit == 1, weight_at, 0), axis=0)
        pick = tl.where(from3 >= target, 3, tl.where(from2 >= target, 2,
                        tl.where(from1 >= target, 1, 0)))  # fmt: skip
        above = tl.where(pick == 3, above, tl.where(pick == 2, from3,
                         tl.where(pick == 1, from2, from1)))  # fmt: skip
        edge += pick.to(tl.int64) << shift
        is_left = is_at & (digit == pick)
        if tl.sum(is_left.to(tl.int32), axis=0) <= 1:
            shift = shift * 0
    return edge  # further bits are zero: the one token that is left is at the edge or above


@triton.jit
def _slow_edge(
    x_ptr, bin_ptr, temperature, best, lowest, target, num_columns, IS_MASS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """`_edge_of` over a whole row, one bit at a time: for bins that do not fit the list."""
    edge = tl.zeros((), tl.int64)
    for i in range(32 + ID_BITS):
        trial = edge | (tl.full((), 1, tl.int64) << (31 + ID_BITS - i))
        total = tl.zeros((CHUNK,), tl.int64)
        for start in range(0, num_columns, CHUNK):
            ids = start + tl.arange(0, CHUNK)
            is_in = ids < num_columns
            x = tl.load(x_ptr + ids, mask=is_in, other=float("-inf"))
            z = scaled(x.to(tl.float32), temperature)
            rank = rank_of(z, ids)
            is_in &= (tl.load(bin_ptr + ids, mask=is_in, other=-1) >= 0) & (rank >= lowest)
            weight = (tl.exp(z - best) * MASS).to(tl.int64) if IS_MASS else (rank * 0 + 1)
            total += tl.where(is_in & (rank >= trial), weight, 0)
        edge = tl.where(tl.sum(total, axis=0) >= target, trial, edge)
    return edge


@triton.jit
def _listed(x_ptr, ids_ptr, count, temperature, best):  # fmt: skip
    """Rank and mass of the tokens that `_candidates` listed."""
    listed = tl.arange(0, ROOM)
    ids = tl.load(ids_ptr + listed, mask=listed < count, other=0)
    z = scaled(tl.load(x_ptr + ids).to(tl.float32), temperature)
    return rank_of(z, ids), (tl.exp(z - best) * MASS).to(tl.int64), listed < count


@triton.jit
def _mass_from(x_ptr, edge, temperature, best, num_columns, CHUNK: tl.constexpr):  # fmt: skip
    """Mass of all tokens of a row from the edge on."""
    mass = tl.zeros((CHUNK,), tl.int64)
    for start in range(0, num_columns, CHUNK):
        ids = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + ids, mask=ids < num_columns, other=float("-inf"))
        z = scaled(x.to(tl.float32), temperature)
        is_in = (ids < num_columns) & (rank_of(z, ids) >= edge)
        mass += tl.where(is_in, (tl.exp(z - best) * MASS).to(tl.int64), 0)
    return tl.sum(mass, axis=0)


@triton.jit
def _edge_kernel(
    logits_ptr, row_ptr, temperature_ptr, top_k_ptr, top_p_ptr, best_ptr, bin_ptr, sums_ptr,
    ids_ptr, edge_ptr, num_columns, CHUNK: tl.constexpr,
):  # fmt: skip
    """One row: top-k's edge, then top-p's over what top-k left."""
    m = tl.program_id(0).to(tl.int64)
    take_turns()
    row = tl.load(row_ptr + m)
    temperature = tl.load(temperature_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    best = tl.load(best_ptr + m)
    x_ptr = logits_ptr + m * num_columns
    bin_ptr += m * num_columns
    sums_ptr += m * (2 * BINS)
    ids_ptr += m * ROOM
    number = tl.arange(0, BINS)
    edge = tl.zeros((), tl.int64)
    masses = tl.load(sums_ptr + BINS + number)
    total = tl.sum(masses, axis=0)
    if (temperature > 0) & (top_k > 0):
        counts = tl.load(sums_ptr + number)
        if top_k < tl.sum(counts, axis=0):
            wanted = tl.sum((tl.cumsum(counts, axis=0) < top_k).to(tl.int32), axis=0)
            above = tl.sum(tl.where(number < wanted, counts, 0), axis=0)
            count = _candidates(bin_ptr, ids_ptr, wanted, num_columns, CHUNK)
            if count <= ROOM:
                rank, mass, is_in = _listed(x_ptr, ids_ptr, count, temperature, best)  # fmt: skip
                edge = _edge_of(rank, rank * 0 + 1, is_in, top_k - above)
                total = tl.sum(tl.where(number < wanted, masses, 0), axis=0)
                total += tl.sum(tl.where(is_in & (rank >= edge), mass, 0), axis=0)
            else:
                edge = _slow_edge(x_ptr, bin_ptr, temperature, best, edge, top_k, num_columns,
                                  False, CHUNK)  # fmt: skip
                total = _mass_from(x_ptr, edge, temperature, best, num_columns, CHUNK)
    if (temperature > 0) & (top_p < 1):
        limit = tl.math.ceil(top_p * total.to(tl.float64)).to(tl.int64)
        wanted = tl.sum((tl.cumsum(masses, axis=0) < limit).to(tl.int32), axis=0)
        above = tl.sum(tl.where(number < wanted, masses, 0), axis=0)
        count = _candidates(bin_ptr, ids_ptr, wanted, num_columns, CHUNK)
        lowest = edge
        if count <= ROOM:
            rank, mass, is_in = _listed(x_ptr, ids_ptr, count, temperature, best)  # fmt: skip
            edge = _edge_of(rank, mass, is_in & (rank >= lowest), limit - above)
        else:
            edge = _slow_edge(
                x_ptr, bin_ptr, temperature, best, lowest, limit, num_columns, True, CHUNK
            )
        edge = tl.maximum(edge, lowest)
    tl.store(edge_ptr + m, edge)


def edges(
    logits_MV: Tensor, row_M: Tensor, temperature_X: Tensor, top_k_X: Tensor, top_p_X: Tensor,
    log_min_p_X: Tensor, part_MC: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Per row of logits: the rank below which tokens are removed, and the best scaled logit."""
    num_rows, num_columns = logits_MV.shape
    num_chunks, device = part_MC.shape[1], logits_MV.device
    edge_M = torch.empty(num_rows, dtype=torch.int64, device=device)
    best_M = torch.empty(num_rows, dtype=torch.float32, device=device)
    bin_MV = torch.empty(num_rows, num_columns, dtype=torch.int16, device=device)
    sums = torch.zeros(num_rows, 2, BINS.value, dtype=torch.int64, device=device)
    ids = torch.empty(num_rows, ROOM.value, dtype=torch.int32, device=device)
    grid = (num_rows, num_chunks)
    _max_kernel[grid](
        logits_MV, row_M, temperature_X, part_MC, num_columns, CHUNK=CHUNK, **options(8)
    )
    _bins_kernel[grid](
        logits_MV, row_M, temperature_X, top_k_X, top_p_X, log_min_p_X, part_MC, best_M, bin_MV,
        sums, num_columns, num_chunks, CHUNKS_PAD=next_power_of_2(num_chunks), CHUNK=CHUNK,
        **options(8),
    )  # fmt: skip
    _edge_kernel[(num_rows,)](
        logits_MV, row_M, temperature_X, top_k_X, top_p_X, best_M, bin_MV, sums, ids, edge_M,
        num_columns, CHUNK=2 * CHUNK, **options(16),
    )  # fmt: skip
    return edge_M, best_M
