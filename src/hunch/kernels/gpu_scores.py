"""Log-probabilities, ranks and best tokens on a GPU, without sorting and without the host.

`sampling.logprobs` is the specification. The normaliser is a sum of whole units of mass, so that a
value depends on its own row of logits alone. Best tokens are found by chunks: the best few of each,
then the best of those. If more are wanted than one round finds, the next round looks below the last
one found.

Shape letters: M rows of logits, V vocabulary, S asked pairs of a row of logits and a token, J
chunks of a row, B best tokens of a round, R rows of a step, K tokens one step can commit, E numbers
of an answer: a rank, then an id and the bits of a log-probability for the token and each best one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_filters import (
    CHUNK,
    MASS,
    MAX_COLUMNS,
    edges,
    id_of,
    is_kept,
    rank_of,
    scaled,
    score_of,
)
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options, take_turns, warp_block
from hunch.kernels.step import FIRST, TOKENS, StepRows

ROUND = 20  # best tokens that one round finds at most
NO_RANK = tl.constexpr(-1)  # below every token's
C_TOKENS, C_FIRST = tl.constexpr(TOKENS), tl.constexpr(FIRST)  # columns of a result


@triton.jit
def _difference(value, norm):
    """value - norm, rounded once; a removed token stays at -inf, whatever the norm is."""
    gap = (value.to(tl.float64) - norm).to(tl.float32)
    return tl.where(value == float("-inf"), float("-inf"), gap)


@triton.jit
def _store_score(line_ptr, place, token, logprob):
    """Write a token and the bits of its log-probability to its place of an answer."""
    tl.store(line_ptr + 1 + 2 * place, token)
    tl.store(line_ptr + 2 + 2 * place, logprob.to(tl.int32, bitcast=True).to(tl.int64))


@triton.jit(do_not_specialize=["num_best"])
def _chunk_kernel(
    logits_ptr, at_ptr, token_ptr, edge_ptr, rank_ptr, before_ptr, num_columns, num_best,
    IS_FIRST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The best of one chunk below the edge; in the first round, how many come before the token."""
    s, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    take_turns()
    at, token = tl.load(at_ptr + s), tl.load(token_ptr + s)
    if (at >= 0) & (token >= 0):
        logits_ptr += at * num_columns
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        is_in = ids < num_columns
        x = tl.load(logits_ptr + ids, mask=is_in, other=0.0).to(tl.float32)
        rank = tl.where(is_in, rank_of(x, ids), NO_RANK)
        if IS_FIRST:
            own = rank_of(tl.load(logits_ptr + token).to(tl.float32), token)
            tl.store(before_ptr + s * num_chunks + chunk, tl.sum((rank > own).to(tl.int32), axis=0))
        else:
            rank = tl.where(rank < tl.load(edge_ptr + s), rank, NO_RANK)
        rank_ptr += (s * num_chunks + chunk) * num_best
        for i in range(num_best):
            best = tl.max(rank, axis=0)
            tl.store(rank_ptr + i, best)
            rank = tl.where(rank == best, NO_RANK, rank)


@triton.jit(do_not_specialize=["num_best"])
def _mass_kernel(
    logits_ptr, at_ptr, token_ptr, rank_ptr, top_ptr, mass_ptr, num_columns, num_best,
    CHUNKS_PAD: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The mass of one chunk, in units of the best token's."""
    s, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_chunks = tl.num_programs(1)
    take_turns()
    at = tl.load(at_ptr + s)
    if (at >= 0) & (tl.load(token_ptr + s) >= 0):
        offs = tl.arange(0, CHUNKS_PAD)
        first = tl.load(rank_ptr + (s * num_chunks + offs) * num_best, mask=offs < num_chunks,
                        other=NO_RANK)  # fmt: skip
        top = score_of(tl.max(first, axis=0))
        tl.store(top_ptr + s, top)
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        is_in = ids < num_columns
        x = tl.load(logits_ptr + at * num_columns + ids, mask=is_in, other=float("-inf"))
        x = x.to(tl.float32)
        gap = tl.where(x == top, 0.0, x.to(tl.float64) - top.to(tl.float64))
        mass = tl.where(is_in, (tl.exp(gap) * MASS).to(tl.int64), 0)
        tl.store(mass_ptr + s * num_chunks + chunk, tl.sum(mass, axis=0))


@triton.jit
def _own_of(logits_ptr, before_ptr, s, at, token, norm, offs, is_chunk, num_columns, num_chunks):
    """The asked token's own log-probability and rank."""
    own = tl.load(logits_ptr + at * num_columns + token).to(tl.float32)
    before = tl.load(before_ptr + s * num_chunks + offs, mask=is_chunk, other=0)
    return _difference(own, norm), tl.sum(before, axis=0).to(tl.int64) + 1


@triton.jit(
    do_not_specialize=["num_best", "num_written", "first", "num_k", "row_stride", "k_stride"],
    do_not_specialize_on_alignment=["out_ptr"],
)
def _merge_kernel(
    logits_ptr, at_ptr, token_ptr, rank_ptr, before_ptr, top_ptr, mass_ptr, edge_ptr, out_ptr,
    num_columns, num_chunks, num_best, num_written, first, num_k, row_stride, k_stride,
    IS_FIRST: tl.constexpr, CHUNKS_PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One answer: its token in the first round, then the best of what the chunks found."""
    s = tl.program_id(0).to(tl.int64)
    take_turns()
    at, token = tl.load(at_ptr + s), tl.load(token_ptr + s)
    out_ptr += (s // num_k) * row_stride + (s % num_k) * k_stride
    nothing, none = tl.full((), -1, tl.int64), tl.full((), float("-inf"), tl.float32)
    if (at >= 0) & (token >= 0):
        offs = tl.arange(0, CHUNKS_PAD)
        is_chunk = offs < num_chunks
        mass = tl.sum(tl.load(mass_ptr + s * num_chunks + offs, mask=is_chunk, other=0), axis=0)
        # Powers of two: the product is exact.
        norm = tl.load(top_ptr + s).to(tl.float64) + tl.log(mass.to(tl.float64) * (1.0 / MASS))
        if IS_FIRST:
            logprob, own_rank = _own_of(logits_ptr, before_ptr, s, at, token, norm, offs, is_chunk,
                                        num_columns, num_chunks)  # fmt: skip
            tl.store(out_ptr, own_rank)
            _store_score(out_ptr, 0, token, logprob)
        place = tl.arange(0, BLOCK)
        num_found = num_chunks * num_best
        rank = tl.load(rank_ptr + s * num_found + place, mask=place < num_found, other=NO_RANK)
        best = tl.full((), NO_RANK, tl.int64)
        for i in range(num_written):
            best = tl.max(rank, axis=0)
            rank = tl.where(rank == best, NO_RANK, rank)
            is_token = best >= 0  # else the vocabulary has no more
            logprob = _difference(score_of(best), norm)
            logprob = tl.where(is_token, logprob, none)
            _store_score(out_ptr, first + i, tl.where(is_token, id_of(best), nothing), logprob)
        tl.store(edge_ptr + s, best)
    else:
        if IS_FIRST:
            tl.store(out_ptr, tl.zeros((), tl.int64))
            _store_score(out_ptr, 0, nothing, none)
        for i in range(num_written):
            _store_score(out_ptr, first + i, nothing, none)


def scores(
    logits_MV: Tensor, at_S: Tensor, token_S: Tensor, num_best: int, out_RKE: Tensor
) -> None:
    """The rank and log-probability of each asked token, and those of the best tokens.

    at_S names the row of logits; if it or the token is -1, the place is empty: rank 0, then -1 and
    -inf. The output may be a part of longer lines; `read_scores` reads it.
    """
    num_asked, num_columns = len(at_S), logits_MV.shape[1]
    assert logits_MV.is_contiguous()
    assert num_columns < MAX_COLUMNS
    assert out_RKE.stride(2) == 1
    assert out_RKE.shape[0] * out_RKE.shape[1] == num_asked
    num_chunks, device = cdiv(num_columns, CHUNK), logits_MV.device
    room = max(1, min(num_best, ROUND))  # of each chunk; the first is needed for the top
    rank_SJB = torch.empty(num_asked, num_chunks, room, dtype=torch.int64, device=device)
    mass_SJ = torch.empty(num_asked, num_chunks, dtype=torch.int64, device=device)
    before_SJ = torch.empty(num_asked, num_chunks, dtype=torch.int32, device=device)
    top_S = torch.empty(num_asked, dtype=torch.float32, device=device)
    edge_S = torch.empty(num_asked, dtype=torch.int64, device=device)
    asked, grid = (logits_MV, at_S, token_S), (num_asked, num_chunks)
    pad = next_power_of_2(num_chunks)
    for first in range(0, max(num_best, 1), room):
        is_first = first == 0
        _chunk_kernel[grid](
            *asked, edge_S, rank_SJB, before_SJ, num_columns, room, IS_FIRST=is_first, CHUNK=CHUNK,
            **options(8),
        )  # fmt: skip
        if is_first:
            _mass_kernel[grid](
                *asked, rank_SJB, top_S, mass_SJ, num_columns, room, CHUNKS_PAD=pad, CHUNK=CHUNK,
                **options(8),
            )  # fmt: skip
        _merge_kernel[(num_asked,)](
            *asked, rank_SJB, before_SJ, top_S, mass_SJ, edge_S, out_RKE, num_columns, num_chunks,
            room, min(room, num_best - first), 1 + first, out_RKE.shape[1], out_RKE.stride(0),
            out_RKE.stride(1), IS_FIRST=is_first, CHUNKS_PAD=pad,
            BLOCK=next_power_of_2(num_chunks * room), **options(4),
        )  # fmt: skip


def read_scores(line_SE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and log-probabilities of the token and of the best ones, and the token's rank."""
    bits_SC = line_SE[:, 2::2].to(torch.int32)
    return line_SE[:, 1::2], bits_SC.contiguous().view(torch.float32), line_SE[:, 0]


# --- what a step asks for -------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_k"])
def _committed_kernel(
    count_ptr, path_ptr, result_ptr, at_ptr, token_ptr, result_stride, num_k, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: token k was chosen after node path[k - 1], the first one after the root."""
    r = tl.program_id(0).to(tl.int64)
    take_turns()
    result_ptr += r * result_stride
    num = tl.where(tl.load(count_ptr + r) >= 0, tl.load(result_ptr + C_TOKENS), 0)
    place = tl.arange(0, BLOCK)
    is_in = place < num_k
    node = tl.load(path_ptr + r * num_k + place - 1, mask=is_in & (place > 0), other=-1)
    token = tl.load(result_ptr + C_FIRST + place, mask=is_in, other=-1)
    tl.store(at_ptr + r * num_k + place, tl.where(place < num, r * num_k + 1 + node, -1),
             mask=is_in)  # fmt: skip
    tl.store(token_ptr + r * num_k + place, token, mask=is_in)


def committed(step: StepRows, at_S: Tensor, token_S: Tensor) -> None:
    """`committed_ref`: the tokens a step committed, and the rows of logits they were chosen by."""
    num_rows, num_k = step.path_RK.shape
    _committed_kernel[(num_rows,)](
        step.num_checked_R, step.path_RK, step.result_RC, at_S, token_S, step.result_RC.stride(0),
        num_k, BLOCK=warp_block(num_k), **options(1),
    )  # fmt: skip


# --- what filters leave ---------------------------------------------------------------------------


@triton.jit
def _filtered_kernel(
    logits_ptr, row_ptr, temperature_ptr, min_p_ptr, edge_ptr, best_ptr, out_ptr, num_columns,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk: logits / T, -inf for removed tokens; a greedy row as it is."""
    m, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    take_turns()
    row = tl.load(row_ptr + m)
    temperature = tl.load(temperature_ptr + row)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    is_in = columns < num_columns
    x = tl.load(logits_ptr + m * num_columns + columns, mask=is_in, other=float("-inf"))
    z = scaled(x.to(tl.float32), temperature)
    if temperature > 0:
        best, edge = tl.load(best_ptr + m), tl.load(edge_ptr + m)
        is_left = is_kept(z, columns, best, edge, tl.load(min_p_ptr + row))
        z = tl.where(is_left, z, float("-inf"))
    tl.store(out_ptr + m * num_columns + columns, z, mask=is_in)


def filtered(
    logits_MV: Tensor, row_M: Tensor, temperature_X: Tensor, top_k_X: Tensor, top_p_X: Tensor,
    log_min_p_X: Tensor, out_MV: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Logits after the rows' temperatures and filters; `scores` of them are those of draws.

    `gpu_sampling.choose` draws from the same tokens.
    """
    num_rows, num_columns = logits_MV.shape
    assert logits_MV.is_contiguous()
    num_chunks = cdiv(num_columns, CHUNK)
    out_MV = torch.empty_like(logits_MV, dtype=torch.float32) if out_MV is None else out_MV
    part_MJ = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits_MV.device)
    edge_M, best_M = edges(logits_MV, row_M, temperature_X, top_k_X, top_p_X, log_min_p_X, part_MJ)
    _filtered_kernel[(num_rows, num_chunks)](
        logits_MV, row_M, temperature_X, log_min_p_X, edge_M, best_M, out_MV, num_columns,
        CHUNK=CHUNK, **options(8),
    )  # fmt: skip
    return out_MV
