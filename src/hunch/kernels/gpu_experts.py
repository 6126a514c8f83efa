"""Experts on a GPU: rows are sorted by expert, and one product serves all experts.

Nothing is read back to the host: grids are as large as the worst choice needs, and programs without
work end at once, so that a step can be captured. A row's products are those of gpu_gemm, whose
order of additions does not depend on other rows, and its experts are added in ascending order.
Weights in few bits (`quant.Quantised`) hold all experts' rows in one matrix; results are bit for
bit those of the 16-bit weights that they stand for.

Shape letters: T packed tokens, D width, E experts, K experts per token, F inner width, U = 2F rows
of gate and up, P = T * K pairs of a token and an expert, B blocks of pairs of one expert, S slices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_codes import form_of, pointers_of, scales_at
from hunch.kernels.gpu_endings import Tile, gated
from hunch.kernels.gpu_gemm import walk
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options, slice_at, take_turns
from hunch.kernels.gpu_quant import _span
from hunch.kernels.quant import Quantised, Weight

MAX_DIRECT = 4  # tokens up to which each pair is a block: few of them share an expert
CHUNK = 1024  # tokens whose experts' answers are kept apart until they are added
_COUNTED = 8192  # comparisons a program of the sort makes at once


@triton.jit(do_not_specialize=["P"])
def _sort_kernel(
    chosen_ptr, sorted_ptr, expert_ptr, count_ptr, total_ptr, P,
    NUM_EXPERTS: tl.constexpr, PAD_E: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """One program per expert: the numbers of its pairs, in blocks of its own."""
    mine = tl.program_id(0)
    experts = tl.arange(0, PAD_E)
    counts = tl.zeros((PAD_E,), tl.int32)
    take_turns()
    for first in range(0, P, STEP):
        pair = first + tl.arange(0, STEP)
        chosen = tl.load(chosen_ptr + pair, mask=pair < P, other=NUM_EXPERTS)
        is_same = chosen[:, None] == experts[None, :]
        counts += tl.sum(is_same.to(tl.int32), 0)
    counts = tl.where(experts < NUM_EXPERTS, counts, 0)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    start = tl.sum(tl.where(experts < mine, blocks, 0), 0)
    count = tl.sum(tl.where(experts == mine, counts, 0), 0)
    num_blocks = (count + BLOCK_M - 1) // BLOCK_M
    if mine == 0:
        tl.store(total_ptr, tl.sum(blocks, 0))
    for b in range(num_blocks):
        tl.store(expert_ptr + start + b, mine)
        tl.store(count_ptr + start + b, tl.minimum(count - b * BLOCK_M, BLOCK_M))
    done = start * BLOCK_M
    for first in range(0, P, STEP):
        pair = first + tl.arange(0, STEP)
        is_mine = tl.load(chosen_ptr + pair, mask=pair < P, other=NUM_EXPERTS) == mine
        place = done + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(sorted_ptr + place, pair, mask=is_mine)
        done += tl.sum(is_mine.to(tl.int32), 0)


@triton.jit
def _tile(
    chosen_ptr, sorted_ptr, expert_ptr, count_ptr, total_ptr, N, num_tiles,
    NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, IS_DIRECT: tl.constexpr,
    IS_UP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """A program's expert, its pairs, the rows they read, its columns, and whether it has work."""
    block, pid_n = tl.program_id(0) // num_tiles, tl.program_id(0) % num_tiles
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_a = tl.minimum(offs_n, N - 1)
    rows = tl.arange(0, BLOCK_M)
    take_turns(True)
    if IS_DIRECT:
        expert = tl.load(chosen_ptr + block)
        is_row = (rows == 0) & (expert < NUM_EXPERTS)
        pair = block + tl.zeros_like(rows)
        is_needed = expert < NUM_EXPERTS
    else:
        is_needed = block < tl.load(total_ptr)
        expert = tl.load(expert_ptr + block, mask=is_needed, other=0)
        is_row = rows < tl.load(count_ptr + block, mask=is_needed, other=0)
        pair = tl.load(sorted_ptr + block * BLOCK_M + rows, mask=is_row, other=0)
    source = pair.to(tl.int64) // (NUM_CHOSEN if IS_UP else 1)
    return is_needed, expert, is_row, pair, source, offs_n, offs_a


@triton.jit
def _put(
    a, b, bias_ptr, y_ptr, weight_ptr, pair, is_row, first, offs_a, offs_n, N, answer_stride,
    NUM_CHOSEN: tl.constexpr, IS_UP: tl.constexpr, ACT: tl.constexpr, IS_OF_INPUT: tl.constexpr,
):  # fmt: skip
    """Store gated sums, a row per pair, or answers; one of the two is weighted."""
    weight = tl.load(weight_ptr + pair, mask=is_row, other=0.0)[:, None]
    if IS_UP and IS_OF_INPUT:
        a, b = a * weight, b * weight
    if bias_ptr is not None:
        a += tl.load(bias_ptr + first + offs_a).to(tl.float32)[None, :]
    is_out = is_row[:, None] & (offs_n < N)[None, :]
    long = pair.to(tl.int64)
    if IS_UP:
        if bias_ptr is not None:
            b += tl.load(bias_ptr + first + N + offs_a).to(tl.float32)[None, :]
        y = gated(a, b, y_ptr.dtype.element_ty, ACT)
        tl.store(y_ptr + long[:, None] * N + offs_n[None, :], y, mask=is_out)
    else:
        if not IS_OF_INPUT:
            a = a * weight
        to = long % NUM_CHOSEN * answer_stride + long // NUM_CHOSEN * N
        tl.store(y_ptr + to[:, None] + offs_n[None, :], a, mask=is_out)


@triton.jit
def _experts_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, weight_ptr, chosen_ptr, sorted_ptr, expert_ptr, count_ptr,
    total_ptr, N, K, num_tiles, answer_stride, NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr,
    IS_DIRECT: tl.constexpr, IS_UP: tl.constexpr, ACT: tl.constexpr, IS_OF_INPUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr,
):  # fmt: skip
    """IS_UP: gated products of tokens, a row per pair. Else: weighted answers of those rows."""
    is_needed, expert, is_row, pair, source, offs_n, offs_a = _tile(
        chosen_ptr, sorted_ptr, expert_ptr, count_ptr, total_ptr, N, num_tiles, NUM_EXPERTS,
        NUM_CHOSEN, IS_DIRECT, IS_UP, BLOCK_M, BLOCK_N)  # fmt: skip
    if is_needed:
        x_ptrs = x_ptr + source[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
        first = expert.to(tl.int64) * (2 * N if IS_UP else N)
        wa_ptrs = w_ptr + (first + offs_a[None, :]) * K + tl.arange(0, BLOCK_K)[:, None]
        wb_ptrs = w_ptr + (first + N + offs_a[None, :]) * K + tl.arange(0, BLOCK_K)[:, None]
        a, b = walk(x_ptrs, wa_ptrs, wb_ptrs, None, None, is_row, None, 0, 0, 0, 0, K, BLOCK_M,
                    BLOCK_N, BLOCK_K, BLOCK_K, IS_UP, False, IS_EVEN, False)  # fmt: skip
        _put(a, b, bias_ptr, y_ptr, weight_ptr, pair, is_row, first, offs_a, offs_n, N,
             answer_stride, NUM_CHOSEN, IS_UP, ACT, IS_OF_INPUT)  # fmt: skip


@triton.jit
def _quant_experts_kernel(
    x_ptr, data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, bias_ptr, y_ptr,
    weight_ptr, chosen_ptr, sorted_ptr, expert_ptr, count_ptr, total_ptr, N, K, num_rows, num_tiles,
    answer_stride, NUM_EXPERTS: tl.constexpr, NUM_CHOSEN: tl.constexpr, IS_DIRECT: tl.constexpr,
    IS_UP: tl.constexpr, ACT: tl.constexpr, IS_OF_INPUT: tl.constexpr, FORMAT: tl.constexpr,
    SPAN: tl.constexpr, WORDS: tl.constexpr, OFFSET: tl.constexpr, GROUP_K: tl.constexpr,
    UNIT_K: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_MINIMUM: tl.constexpr, HAS_UNIT: tl.constexpr,
    PAIRED: tl.constexpr, ROUTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_EVEN: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """`_experts_kernel` with weights in few bits, in the order of `gpu_quant`."""
    is_needed, expert, is_row, pair, source, offs_n, offs_a = _tile(
        chosen_ptr, sorted_ptr, expert_ptr, count_ptr, total_ptr, N, num_tiles, NUM_EXPERTS,
        NUM_CHOSEN, IS_DIRECT, IS_UP, BLOCK_M, BLOCK_N)  # fmt: skip
    if is_needed:
        x_ptrs = x_ptr + source[None, :] * K + tl.arange(0, WORDS)[:, None]
        first = expert * (2 * N if IS_UP else N)
        rows_a = first + offs_a
        rows_b = rows_a + (N if IS_UP else 0)
        of_a = scales_at(scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, 0, rows_a,
                         num_rows, OFFSET, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT,
                         PAIRED)  # fmt: skip
        of_b = scales_at(scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, 0, rows_b,
                         num_rows, OFFSET, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT,
                         PAIRED)  # fmt: skip
        a = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        b = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for k in range(0, K, SPAN):
            a = _span(a, data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, x_ptrs,
                      is_row, k, K, rows_a, num_rows, of_a[0], of_a[1], of_a[2], FORMAT, SPAN,
                      WORDS, OFFSET, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED,
                      ROUTE, IS_EVEN, IS_WHOLE)  # fmt: skip
            if IS_UP:
                b = _span(b, data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr,
                          x_ptrs, is_row, k, K, rows_b, num_rows, of_b[0], of_b[1], of_b[2], FORMAT,
                          SPAN, WORDS, OFFSET, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT,
                          PAIRED, ROUTE, IS_EVEN, IS_WHOLE)  # fmt: skip
        _put(tl.trans(a), tl.trans(b), bias_ptr, y_ptr, weight_ptr, pair, is_row, first, offs_a,
             offs_n, N, answer_stride, NUM_CHOSEN, IS_UP, ACT, IS_OF_INPUT)  # fmt: skip


@triton.jit
def _combine_kernel(
    shared_ptr, answer_ptr, out_ptr, shared_stride, answer_stride, D,
    NUM_SHARED: tl.constexpr, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum that `add_norm` would make of the same slices, in its order."""
    token = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < D
    take_turns()
    at = token * D + offs
    if NUM_SHARED > 0:
        total = tl.load(shared_ptr + at, mask=is_in, other=0.0)
        for s in tl.static_range(1, NUM_SHARED):
            total += tl.load(shared_ptr + slice_at(s, shared_stride) + at, mask=is_in, other=0.0)
        total += tl.load(answer_ptr + at, mask=is_in, other=0.0)
    else:
        total = tl.load(answer_ptr + at, mask=is_in, other=0.0)
    for k in tl.static_range(1, NUM_CHOSEN):
        total += tl.load(answer_ptr + k * answer_stride + at, mask=is_in, other=0.0)
    tl.store(out_ptr + at, total, mask=is_in)


@triton.jit
def _share_kernel(y_ptr, logit_ptr, part_stride, F, NUM_SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows times the sigmoid of their logit, whose slices are added in order."""
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = offs < F
    take_turns()
    logit = tl.load(logit_ptr + row)
    for s in tl.static_range(1, NUM_SPLITS):
        logit += tl.load(logit_ptr + s * part_stride + row)
    y = tl.load(y_ptr + row * F + offs, mask=is_in, other=0.0)
    y = (y.to(tl.float32) / (1.0 + tl.exp(-logit))).to(y.dtype)
    tl.store(y_ptr + row * F + offs, y, mask=is_in)


@dataclass(slots=True)
class Choice:
    """The experts that a step's tokens chose, and the pairs in blocks of one expert each."""

    chosen_TK: Tensor  # int32; num_experts where a row is padding
    weight_TK: Tensor
    num_tokens: int
    block_m: int
    num_blocks: int  # most blocks
    sorted_P: Tensor | None = None  # None: every pair is a block
    expert_B: Tensor | None = None
    count_B: Tensor | None = None
    total: Tensor | None = None
    is_of_input: bool = False  # weights are applied to the experts' inputs


def arrange(
    chosen_TK: Tensor, weight_TK: Tensor, num_experts: int, is_of_input: bool = False
) -> Choice:
    """Sort the pairs into blocks; with few tokens every pair is a block."""
    num_tokens, num_chosen = chosen_TK.shape
    num_pairs, device = num_tokens * num_chosen, chosen_TK.device
    if num_tokens <= MAX_DIRECT:
        return Choice(chosen_TK, weight_TK, num_tokens, 16, num_pairs, is_of_input=is_of_input)
    per_expert = num_pairs / num_experts
    block_m = 16 if per_expert <= 12 else 64 if per_expert <= 96 else 128
    touched = min(num_pairs, num_experts)
    num_blocks = touched + (num_pairs - touched) // block_m
    ints = [num_blocks * block_m, num_blocks, num_blocks, 1]
    room = torch.empty(sum(ints), dtype=torch.int32, device=device)
    choice = Choice(
        chosen_TK, weight_TK, num_tokens, block_m, num_blocks, *room.split(ints), is_of_input
    )
    pad = next_power_of_2(num_experts)
    step = max(16, min(1024, _COUNTED // pad, next_power_of_2(num_pairs)))
    _sort_kernel[(num_experts,)](
        chosen_TK, choice.sorted_P, choice.expert_B, choice.count_B, choice.total, num_pairs,
        NUM_EXPERTS=num_experts, PAD_E=pad, BLOCK_M=block_m, STEP=step, **options(4),
    )  # fmt: skip
    return choice


def tile_for(choice: Choice, *, is_up: bool) -> Tile:
    """A tile, as measured on an H200 with 128 experts of 768; any gives the same bits."""
    if choice.block_m == 16:
        return Tile(16, 32 if is_up else 64, 128, 4, 4)
    if choice.block_m == 64:
        return Tile(64, 64, 64, 4, 4)
    return Tile(128, 64 if is_up else 128, 64, 8, 3)


def _launch(
    choice: Choice, x: Tensor, w_ENK: Weight, bias_EN: Tensor | None, y: Tensor, num_outputs: int,
    num_experts: int, answer_stride: int, *, is_up: bool, activation: str = "silu",
) -> None:  # fmt: skip
    tile = tile_for(choice, is_up=is_up)
    assert tile.block_m == choice.block_m
    is_direct, chosen, k = choice.sorted_P is None, choice.chosen_TK, w_ENK.shape[-1]
    num_tiles = cdiv(num_outputs, tile.block_n)
    grid = (choice.num_blocks * num_tiles,)
    pairs = (y, choice.weight_TK, chosen)
    pairs += (choice.sorted_P, choice.expert_B, choice.count_B, choice.total)
    known = {
        "NUM_EXPERTS": num_experts, "NUM_CHOSEN": chosen.shape[1], "IS_DIRECT": is_direct,
        "IS_UP": is_up, "ACT": activation, "IS_OF_INPUT": choice.is_of_input,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        **options(tile.num_warps, tile.num_stages),
    }  # fmt: skip
    if not isinstance(w_ENK, Quantised):
        _experts_kernel[grid](
            x, w_ENK, bias_EN, *pairs, num_outputs, k, num_tiles, answer_stride,
            BLOCK_K=tile.block_k, IS_EVEN=k % tile.block_k == 0, **known,
        )  # fmt: skip
        return
    w = w_ENK
    assert w.order_K is None, "experts have their inputs in their own order"
    assert x.dtype == w.dtype, "a weight stands for numbers of one precision"
    _quant_experts_kernel[grid](
        x, *pointers_of(w), bias_EN, *pairs, num_outputs, k, w.shape[0], num_tiles, answer_stride,
        **form_of(w), IS_EVEN=k % w.span == 0, IS_WHOLE=len(w.scale_GN) == 1, **known,
    )  # fmt: skip


def experts_up(
    choice: Choice, x_TD: Tensor, w_EUD: Weight, y_PF: Tensor, bias_EU: Tensor | None = None,
    activation: str = "silu",
) -> None:  # fmt: skip
    """act(gate) * up of every pair; `activation` is one of `activation.KERNEL_NAMES`' values."""
    num_outputs = y_PF.shape[1]
    _launch(choice, x_TD, w_EUD, bias_EU, y_PF, num_outputs, _count(w_EUD, 2 * num_outputs), 0,
            is_up=True, activation=activation)  # fmt: skip


def experts_down(
    choice: Choice, y_PF: Tensor, w_EDF: Weight, answer_KTD: Tensor,
    bias_ED: Tensor | None = None,
) -> None:  # fmt: skip
    """Each expert's answer times its weight, in float32, for `add_norm` to add in order."""
    num_outputs = answer_KTD.shape[2]
    _launch(choice, y_PF, w_EDF, bias_ED, answer_KTD, num_outputs, _count(w_EDF, num_outputs),
            answer_KTD.stride(0), is_up=False)  # fmt: skip


def _count(w_ENK: Weight, num_rows: int) -> int:
    """The number of experts in a weight."""
    return w_ENK.shape[0] // num_rows if isinstance(w_ENK, Quantised) else w_ENK.shape[0]


def combine(shared_STD: Tensor | None, answer_KTD: Tensor, out_TD: Tensor) -> None:
    """Shared slices and answers, added in order: for more tokens than slices are kept for."""
    num_tokens, width = out_TD.shape
    _combine_kernel[(num_tokens, cdiv(width, 1024))](
        answer_KTD if shared_STD is None else shared_STD, answer_KTD, out_TD,
        0 if shared_STD is None else shared_STD.stride(0), answer_KTD.stride(0), width,
        NUM_SHARED=0 if shared_STD is None else len(shared_STD), NUM_CHOSEN=len(answer_KTD),
        BLOCK=1024, **options(4),
    )  # fmt: skip


def share(y_TF: Tensor, parts_ST: Tensor) -> None:
    """y times the sigmoid of each row's logit, in place."""
    num_tokens, width = y_TF.shape
    _share_kernel[(num_tokens, cdiv(width, 1024))](
        y_TF, parts_ST, parts_ST.stride(0), width, NUM_SPLITS=len(parts_ST), BLOCK=1024,
        **options(4),
    )  # fmt: skip
