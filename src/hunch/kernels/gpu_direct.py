"""Products of few rows with weights in few bits: codes go from memory to a tensor core's registers.

The bits are those of `gpu_quant`. What differs is the way of the codes: each thread copies 16 bytes
at once, which are the ones it multiplies (see `quant`), several spans ahead. A warp is a program of
its own: nobody waits for another. Written in Gluon, where a program says which thread has what.

Shape letters: M rows, N outputs, K inputs, S spans, W words of a span.
"""

# ruff: noqa: RUF005 - tuples grow as Gluon can read it
from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from hunch.kernels import gpu_launch
from hunch.kernels.gpu_activation import gate
from hunch.kernels.gpu_codes import (
    numbers_of,
    read_scales,
    route_of,
    scales_of,
)
from hunch.kernels.gpu_endings import Tile
from hunch.kernels.gpu_launch import cdiv, options
from hunch.kernels.quant import UNIT_GROUP, Quantised
from hunch.kernels.slices import NUM_SMS
from hunch.kernels.words import num_parts

MAX_ROWS = 8
TRIED = ("int4", "int8")  # on a GPU, without zero points, minima and units; others take `gpu_quant`
_EARLY = gl.constexpr(gpu_launch.HAS_EARLY_START)
_BLOCK = gl.constexpr(32)  # words


@gluon.constexpr_function
def _word_layout(block_n, num_warps):
    """Threads as a tensor core has them: each 8 words of two outputs that are 8 apart."""
    outputs, size = [[8, 0]], 16 * num_warps
    while size < block_n:
        outputs.append([size, 0])
        size *= 2
    warps = [[16 << at, 0] for at in range(num_warps.bit_length() - 1)]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *outputs], lanes, warps, [], [block_n, 32]
    )


@gluon.jit
def _ask(
    ring_w, ring_s, data_ptr, scale_ptr, unit_ptr, span, slot, offs_w, offs_s, num_rows,
    SPAN: gl.constexpr, WORDS: gl.constexpr, GROUP_K: gl.constexpr, UNIT_K: gl.constexpr,
    HAS_UNIT: gl.constexpr, HAS_RING: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Start to copy a span's words, in blocks of 32, and its scales, where they have a ring."""
    line = (offs_w + span * num_rows).to(gl.int64) * WORDS
    offs = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    for block in gl.static_range(WORDS // _BLOCK):
        async_copy.async_copy_global_to_shared(
            ring_w.index(slot * (WORDS // _BLOCK) + block),
            data_ptr + line[:, None] + offs[None, :] + block * _BLOCK,
        )
    if HAS_RING:
        NUM: gl.constexpr = (SPAN + GROUP_K - 1) // GROUP_K
        for group in gl.static_range(NUM):
            at = (span * SPAN + group * GROUP_K) // GROUP_K * num_rows
            async_copy.async_copy_global_to_shared(
                ring_s.index(slot * (NUM + HAS_UNIT) + group), scale_ptr + at + offs_s
            )
        if HAS_UNIT:
            async_copy.async_copy_global_to_shared(
                ring_s.index(slot * (NUM + 1) + NUM),
                unit_ptr + span * SPAN // UNIT_K * num_rows + offs_s,
            )


@gluon.jit
def _read_all_scales(
    scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, k, offs_w, num_rows,
    SPAN: gl.constexpr, GROUP_K: gl.constexpr, UNIT_K: gl.constexpr, HAS_ZERO: gl.constexpr,
    HAS_MINIMUM: gl.constexpr, HAS_UNIT: gl.constexpr, PAIRED: gl.constexpr,
):  # fmt: skip
    """Of each group of a span."""
    read = ()
    for group in gl.static_range((SPAN + GROUP_K - 1) // GROUP_K):
        read = read + (read_scales(scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr,
                                   k + group * GROUP_K, offs_w, num_rows, GROUP_K, UNIT_K,
                                   HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED),)  # fmt: skip
    return read


@gluon.jit
def _span(
    sum, ring_w, x_tile, slot, read,
    KIND: gl.constexpr, SPAN: gl.constexpr, WORDS: gl.constexpr, OFFSET: gl.constexpr,
    GROUP_K: gl.constexpr, HAS_ZERO: gl.constexpr, HAS_MINIMUM: gl.constexpr,
    HAS_UNIT: gl.constexpr, PAIRED: gl.constexpr, ROUTE: gl.constexpr, A: gl.constexpr,
    LAYOUT: gl.constexpr, B: gl.constexpr,
):  # fmt: skip
    """Add one span's products, 16 inputs at a time, in order."""
    dtype: gl.constexpr = x_tile.dtype
    BLOCK_N: gl.constexpr = sum.shape[0]
    turned = ()
    for block in gl.static_range(WORDS // _BLOCK):
        word = ring_w.index(slot * (WORDS // _BLOCK) + block).load(LAYOUT)
        word = word.reshape([BLOCK_N, 4, 2, 2, 2]).permute([0, 2, 3, 1, 4])
        word = gl.convert_layout(word.reshape([BLOCK_N, _BLOCK]), A, assert_trivial=True)
        turned = turned + (word,)
    for part in gl.static_range(SPAN // WORDS):
        scale, offset, minimum = scales_of(
            read[part * WORDS // GROUP_K], OFFSET, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED
        )
        for block in gl.static_range(WORDS // _BLOCK):
            x = x_tile.slice(part * WORDS + block * _BLOCK, _BLOCK, dim=1).permute([1, 0]).load(B)
            w = numbers_of(turned[block], scale, offset, minimum, dtype, part, KIND, ROUTE,
                           HAS_ZERO)  # fmt: skip
            sum = mma_v2(w, x, sum)
    return sum


@gluon.jit
def _outputs(offs, N, WIDTH: gl.constexpr):
    """The weight's rows of a program: of its outputs, and then of what these gate."""
    own = gl.minimum(gl.program_id(0) * WIDTH + offs % WIDTH, N - 1)
    return own + offs // WIDTH * N


@gluon.jit
def _wait_for_inputs():
    if _EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _let_next_start():
    if _EARLY:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@gluon.jit
def _walk(
    ring_w, ring_s, ring_x, x_ptrs, is_row, data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr,
    min_unit_ptr, first, last, offs_w, offs_a, offs_s, num_rows,
    DEPTH: gl.constexpr, KIND: gl.constexpr, SPAN: gl.constexpr, WORDS: gl.constexpr,
    OFFSET: gl.constexpr, GROUP_K: gl.constexpr, UNIT_K: gl.constexpr, HAS_ZERO: gl.constexpr,
    HAS_MINIMUM: gl.constexpr, HAS_UNIT: gl.constexpr, PAIRED: gl.constexpr, ROUTE: gl.constexpr,
    IS_WHOLE: gl.constexpr, HAS_RING: gl.constexpr, LAYOUT: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Spans [first, last], in order, the next ones being copied meanwhile."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    GROUPS: gl.constexpr = (SPAN + GROUP_K - 1) // GROUP_K
    PLACES: gl.constexpr = GROUPS + HAS_UNIT
    BLOCK_N: gl.constexpr = ring_w.shape[1]
    BLOCK_M: gl.constexpr = ring_x.shape[1]
    for ahead in gl.static_range(DEPTH - 1):  # weights do not depend on the kernel before
        _ask(ring_w, ring_s, data_ptr, scale_ptr, unit_ptr, gl.minimum(first + ahead, last), ahead,
             offs_w, offs_s, num_rows, SPAN, WORDS, GROUP_K, UNIT_K, HAS_UNIT, HAS_RING,
             LAYOUT)  # fmt: skip
    if not HAS_RING:
        read = _read_all_scales(scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr,
                                first * SPAN, offs_a, num_rows, SPAN, GROUP_K, UNIT_K,
                                HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED)  # fmt: skip
    _wait_for_inputs()
    for ahead in gl.static_range(DEPTH - 1):
        async_copy.async_copy_global_to_shared(
            ring_x.index(ahead), x_ptrs + gl.minimum(first + ahead, last) * SPAN, is_row
        )
    async_copy.commit_group()
    async_copy.wait_group(0)
    sum = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, layout=MMA)
    slot = 0
    free = DEPTH - 1
    for span in range(first, last + 1):
        async_copy.wait_group(DEPTH - 2)
        new = gl.minimum(span + DEPTH - 1, last)  # the last is copied again: nobody reads that
        async_copy.async_copy_global_to_shared(ring_x.index(free), x_ptrs + new * SPAN, is_row)
        _ask(ring_w, ring_s, data_ptr, scale_ptr, unit_ptr, new, free, offs_w, offs_s, num_rows,
             SPAN, WORDS, GROUP_K, UNIT_K, HAS_UNIT, HAS_RING, LAYOUT)  # fmt: skip
        async_copy.commit_group()
        if HAS_RING:
            read = ()
            unit = ring_s.index(slot * PLACES + PLACES - 1).load(gl.SliceLayout(1, A))
            for group in gl.static_range(GROUPS):
                some = ring_s.index(slot * PLACES + group).load(gl.SliceLayout(1, A))
                read = read + ((some, some, some, unit, unit),)
        sum = _span(sum, ring_w, ring_x.index(slot), slot, read, KIND, SPAN, WORDS, OFFSET, GROUP_K,
                    HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED, ROUTE, A, LAYOUT, B)  # fmt: skip
        if not HAS_RING and not IS_WHOLE:
            read = _read_all_scales(scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr,
                                    gl.minimum(span + 1, last) * SPAN, offs_a, num_rows, SPAN,
                                    GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT,
                                    PAIRED)  # fmt: skip
        slot = gl.where(slot == DEPTH - 1, 0, slot + 1)
        free = gl.where(free == DEPTH - 1, 0, free + 1)
    return sum


@gluon.jit
def _finish(
    sum, y_ptr, bias_ptr, residual_ptr, pid_s, M, N, y_stride, WIDTH: gl.constexpr,
    ENDING: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr,
):  # fmt: skip
    """As `gpu_endings.finish`; outputs are the first dimension."""
    BLOCK_N: gl.constexpr = sum.shape[0]
    BLOCK_M: gl.constexpr = sum.shape[1]
    if HAS_BIAS:  # noqa: SIM102 - known when the kernel is compiled
        if pid_s == 0:
            LINE: gl.constexpr = gl.SliceLayout(1, sum.type.layout)
            offs_b = _outputs(gl.arange(0, BLOCK_N, layout=LINE), N, WIDTH)
            sum += gl.load(bias_ptr + offs_b).to(gl.float32)[:, None]
    if ENDING == "store":
        y = sum
    else:  # both rounded first, as products of their own would be
        pair = sum.to(y_ptr.dtype.element_ty).to(gl.float32)
        a, b = pair.reshape([2, WIDTH, BLOCK_M]).permute([1, 2, 0]).split()
        y = gate(a, b, ENDING)
    OUT: gl.constexpr = y.type.layout
    offs_n = gl.program_id(0) * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, OUT))
    offs_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    is_out = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    to = offs_m.to(gl.int64)[None, :] * y_stride + offs_n[:, None]
    if HAS_RESIDUAL:
        y += gl.load(residual_ptr + to, mask=is_out, other=0.0).to(gl.float32)
    to += pid_s.to(gl.int64) * M * y_stride
    gl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=is_out)


@gluon.jit(do_not_specialize=["M", "num_spans"])
def _direct_kernel(
    x_ptr, data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, y_ptr, bias_ptr,
    residual_ptr, M, N, num_rows, num_spans, x_stride, y_stride,
    DEPTH: gl.constexpr, ENDING: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, KIND: gl.constexpr, SPAN: gl.constexpr, WORDS: gl.constexpr,
    OFFSET: gl.constexpr, GROUP_K: gl.constexpr, UNIT_K: gl.constexpr, HAS_ZERO: gl.constexpr,
    HAS_MINIMUM: gl.constexpr, HAS_UNIT: gl.constexpr, PAIRED: gl.constexpr, ROUTE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, IS_WHOLE: gl.constexpr,
):  # fmt: skip
    """One slice of some outputs. ENDING: "store" or an activation; then the upper half of a
    program's outputs are those that the lower half's gates multiply."""
    NUM_WARPS: gl.constexpr = gl.num_warps()
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NUM_WARPS, 1], [16, 8])
    LAYOUT: gl.constexpr = _word_layout(BLOCK_N, NUM_WARPS)
    OF_A: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, MMA, 2))
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (SPAN // 8), SPAN // 8], [NUM_WARPS, 1],
                                           [1, 0])  # fmt: skip
    HAS_RING: gl.constexpr = PAIRED != "" and not IS_WHOLE  # words of 32 bits are copied ahead
    NUM_SCALES: gl.constexpr = (SPAN + GROUP_K - 1) // GROUP_K + HAS_UNIT if HAS_RING else 1
    WIDTH: gl.constexpr = BLOCK_N if ENDING == "store" else BLOCK_N // 2
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    _let_next_start()
    offs_w = _outputs(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT)), N, WIDTH)
    offs_a = _outputs(gl.arange(0, BLOCK_N, layout=OF_A), N, WIDTH)
    offs_s = _outputs(gl.arange(0, BLOCK_N, layout=LINE), N, WIDTH)
    ring_w = gl.allocate_shared_memory(gl.int16, [DEPTH * (WORDS // _BLOCK), BLOCK_N, _BLOCK],
                                       PLAIN)  # fmt: skip
    ring_s = gl.allocate_shared_memory(gl.int32, [DEPTH * NUM_SCALES, BLOCK_N],
                                       gl.SwizzledSharedLayout(1, 1, 1, [0]))  # fmt: skip
    ring_x = gl.allocate_shared_memory(x_ptr.dtype.element_ty, [DEPTH, BLOCK_M, SPAN],
                                       gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # fmt: skip
    offs_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, LINES))
    offs_k = gl.arange(0, SPAN, layout=gl.SliceLayout(0, LINES))
    first = gl.program_id(1) * num_spans
    sum = _walk(ring_w, ring_s, ring_x, x_ptr + offs_m[:, None] * x_stride + offs_k[None, :],
                (offs_m < M)[:, None], data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr,
                min_unit_ptr, first, first + num_spans - 1, offs_w, offs_a, offs_s, num_rows, DEPTH,
                KIND, SPAN, WORDS, OFFSET, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED,
                ROUTE, IS_WHOLE, HAS_RING, LAYOUT, MMA)  # fmt: skip
    _finish(sum, y_ptr, bias_ptr, residual_ptr, gl.program_id(1), M, N, y_stride, WIDTH, ENDING,
            HAS_BIAS, HAS_RESIDUAL)  # fmt: skip


def can_multiply(x_MK: Tensor, w: Quantised, y: Tensor, ending: str, split: int) -> bool:
    """Whether this is a product for these kernels: of few rows, in whole spans of whole blocks,
    whose slices stay apart."""
    is_apart = split == 1 or (y.dim() == 3 and len(y) == split)
    is_even = w.shape[1] % (w.span * split) == 0 and w.data_SNW.shape[2] % 32 == 0
    is_plain = not (w.has_zero or w.has_minimum or w.unit_UN is not None)
    is_known = w.kind in TRIED and is_plain and ending != "rope" and route_of(w) != "plain"
    is_aligned = x_MK.stride(1) == 1 and x_MK.stride(0) % 8 == 0 and x_MK.data_ptr() % 16 == 0
    return len(x_MK) <= MAX_ROWS and is_apart and is_even and is_known and is_aligned


def tile_of(w: Quantised, split: int) -> Tile:
    """A tile by what was measured on an H200: warps for every scheduler of the chip come before
    long ones, and their copies must fit beside each other. Stages are spans copied ahead."""
    is_narrow = num_parts(w.kind) == 4
    is_wide = is_narrow and w.shape[0] * split >= 5 * 32 * NUM_SMS
    return Tile(MAX_ROWS, 32 if is_wide else 16, 0, 1, 6 if is_narrow else 4)


def launch(
    x_MK: Tensor, w: Quantised, y: Tensor, ending: str, num_outputs: int, split: int,
    *, bias: Tensor | None = None, residual: Tensor | None = None, tile: Tile | None = None,
) -> None:  # fmt: skip
    """A product of `gpu_quant`."""
    if w.order_K is not None:
        x_MK = x_MK.index_select(1, w.order_K)
    assert x_MK.dtype == w.dtype, "a weight stands for numbers of one precision"
    (m, k), span = x_MK.shape, w.span
    num_spans = k // (span * split)
    tile = tile or tile_of(w, split)
    scale, minimum, zero, unit = w.scale_GN, w.minimum_GN, w.zero_GN, w.unit_UN
    width = tile.block_n if ending == "store" else tile.block_n // 2
    _direct_kernel[(cdiv(num_outputs, width), split)](
        x_MK, w.data_SNW, scale, scale if zero is None else zero,
        scale if minimum is None else minimum, scale if unit is None else unit,
        scale if w.min_unit_UN is None else w.min_unit_UN, y, x_MK if bias is None else bias,
        x_MK if residual is None else residual, m, num_outputs, w.shape[0], num_spans,
        x_MK.stride(0), y.stride(-2),
        DEPTH=tile.num_stages, ENDING=ending, HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, KIND=w.kind, SPAN=span, WORDS=w.data_SNW.shape[2],
        OFFSET=w.offset, GROUP_K=w.group, UNIT_K=UNIT_GROUP, HAS_ZERO=w.has_zero,
        HAS_MINIMUM=w.has_minimum, HAS_UNIT=unit is not None, PAIRED=w.paired,
        ROUTE=route_of(w),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, IS_WHOLE=len(scale) == 1,
        **options(tile.num_warps),
    )  # fmt: skip
