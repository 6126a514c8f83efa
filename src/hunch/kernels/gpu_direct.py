"""Products of few rows with weights in few bits: codes go from memory to a tensor core's registers.

The results are bit for bit those of `gpu_quant`, but codes do not go through shared memory: each
thread reads 16 bytes at once, which are the ones it multiplies (see `quant`), several spans ahead,
and the first of them before the previous kernel has ended. Only inputs are in shared memory.
Written in Gluon, where a program says which thread has what.

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
    MOVED,
    can_move,
    form_of,
    moved_of,
    numbers_of,
    pointers_of,
    read_scales,
    route_of,
    scales_of,
)
from hunch.kernels.gpu_endings import Tile
from hunch.kernels.gpu_launch import cdiv, options
from hunch.kernels.quant import Quantised
from hunch.kernels.slices import NUM_SMS
from hunch.kernels.words import num_parts

MAX_ROWS = 16
MAX_INPUT_BYTES = 128 * 1024  # of shared memory
ALONE_BYTES = 96 * 1024  # with more, a multiprocessor runs one program at a time
MANY_OUTPUTS = 24576  # of all slices: enough to fill the chip
SHORT = 8  # spans that are read at once
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
def _outputs(offs, N, WIDTH: gl.constexpr, IS_DUAL: gl.constexpr):
    """The weight's rows of a program; for pairs, 8 of its outputs and the 8 that they gate, in
    turn, so that a thread has both."""
    if IS_DUAL:
        own = gl.program_id(0) * WIDTH + offs // 16 * 8 + offs % 8
        rows = gl.minimum(own, N - 1) + offs // 8 % 2 * N
    else:
        rows = gl.minimum(gl.program_id(0) * WIDTH + offs, N - 1)
    return rows


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
def _read(
    data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, span, offs_w, offs_a,
    num_rows, SPAN: gl.constexpr, WORDS: gl.constexpr, GROUP_K: gl.constexpr,
    UNIT_K: gl.constexpr, HAS_ZERO: gl.constexpr, HAS_MINIMUM: gl.constexpr,
    HAS_UNIT: gl.constexpr, PAIRED: gl.constexpr, IS_WHOLE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A span's words, in blocks of 32, and what is stored for each of its groups."""
    line = (offs_w + span * num_rows).to(gl.int64) * WORDS
    offs = gl.arange(0, _BLOCK, layout=gl.SliceLayout(0, LAYOUT))
    words, scales = (), ()
    for block in gl.static_range(WORDS // _BLOCK):
        ptrs = data_ptr + line[:, None] + offs[None, :] + block * _BLOCK
        words = words + (gl.load(ptrs, eviction_policy="evict_first"),)
    if not IS_WHOLE:
        for group in gl.static_range((SPAN + GROUP_K - 1) // GROUP_K):
            scales = scales + (read_scales(scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr,
                                           span * SPAN + group * GROUP_K, offs_a, num_rows, GROUP_K,
                                           UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT,
                                           PAIRED),)  # fmt: skip
    return words, scales


@gluon.jit
def _numbers(
    words, scales, dtype: gl.constexpr, FORMAT: gl.constexpr, SPAN: gl.constexpr,
    WORDS: gl.constexpr, OFFSET: gl.constexpr, GROUP_K: gl.constexpr, HAS_ZERO: gl.constexpr,
    HAS_MINIMUM: gl.constexpr, HAS_UNIT: gl.constexpr, PAIRED: gl.constexpr, ROUTE: gl.constexpr,
    IS_MOVED: gl.constexpr, A: gl.constexpr,
):  # fmt: skip
    """A span's numbers, 32 inputs at a time; IS_MOVED: MOVED of them."""
    BLOCK_N: gl.constexpr = words[0].shape[0]
    PARTS: gl.constexpr = SPAN // WORDS
    BLOCKS: gl.constexpr = WORDS // _BLOCK
    turned, known, factors, numbers = (), (), (), ()
    for block in gl.static_range(BLOCKS):
        word = words[block].reshape([BLOCK_N, 4, 2, 2, 2]).permute([0, 2, 3, 1, 4])
        word = gl.convert_layout(word.reshape([BLOCK_N, _BLOCK]), A, assert_trivial=True)
        turned = turned + (word,)
    for part in gl.static_range(PARTS):
        read = scales[part * WORDS // GROUP_K]
        known = known + (scales_of(read, OFFSET, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED),)
        factors = factors + (known[part][0],)
    if IS_MOVED:
        moved = ()
        for block in gl.static_range(BLOCKS):
            moved = moved + (moved_of(turned[block], factors, FORMAT),)
        for at in gl.static_range(PARTS * BLOCKS):
            numbers = numbers + (moved[at % BLOCKS][at // BLOCKS],)
    else:
        for at in gl.static_range(PARTS * BLOCKS):
            numbers = numbers + (
                numbers_of(turned[at % BLOCKS], factors[at // BLOCKS], known[at // BLOCKS][1],
                           known[at // BLOCKS][2], dtype, at // BLOCKS, FORMAT, ROUTE, HAS_ZERO),
            )  # fmt: skip
    return numbers


@gluon.jit
def _add_span(
    sum, held, whole, x_tile, FORMAT: gl.constexpr, SPAN: gl.constexpr, WORDS: gl.constexpr,
    OFFSET: gl.constexpr, GROUP_K: gl.constexpr, HAS_ZERO: gl.constexpr,
    HAS_MINIMUM: gl.constexpr, HAS_UNIT: gl.constexpr, PAIRED: gl.constexpr, ROUTE: gl.constexpr,
    IS_MOVED: gl.constexpr, MMA: gl.constexpr,
):  # fmt: skip
    """Add one span's products, 16 inputs at a time, in order."""
    A: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    numbers = _numbers(held[0], whole if len(held[1]) == 0 else held[1], x_tile.dtype, FORMAT, SPAN,
                       WORDS, OFFSET, GROUP_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED, ROUTE,
                       IS_MOVED, A)  # fmt: skip
    for at in gl.static_range(SPAN // _BLOCK):
        x = x_tile.slice(at * _BLOCK, _BLOCK, dim=1).permute([1, 0]).load(B)
        sum = mma_v2(numbers[at], x.broadcast_to([_BLOCK, sum.shape[1]]), sum)
    return sum


@gluon.jit
def _finish(
    sum, y_ptr, bias_ptr, residual_ptr, pid_s, M, N, y_stride, WIDTH: gl.constexpr,
    ENDING: gl.constexpr,
):  # fmt: skip
    """As `gpu_endings.finish`; outputs are the first dimension."""
    BLOCK_N: gl.constexpr = sum.shape[0]
    BLOCK_M: gl.constexpr = sum.shape[1]
    IS_DUAL: gl.constexpr = ENDING != "store"
    if bias_ptr is not None:  # noqa: SIM102 - known when the kernel is compiled
        if pid_s == 0:
            LINE: gl.constexpr = gl.SliceLayout(1, sum.type.layout)
            offs_b = _outputs(gl.arange(0, BLOCK_N, layout=LINE), N, WIDTH, IS_DUAL)
            sum += gl.load(bias_ptr + offs_b).to(gl.float32)[:, None]
    if IS_DUAL:  # both rounded first, as products of their own would be
        pair = sum.to(y_ptr.dtype.element_ty).to(gl.float32)
        pair = pair.reshape([BLOCK_N // 16, 2, 8, BLOCK_M]).permute([0, 2, 3, 1])
        a, b = pair.reshape([WIDTH, BLOCK_M, 2]).split()
        y = gate(a, b, ENDING)
    else:
        y = sum
    OUT: gl.constexpr = y.type.layout
    offs_n = gl.program_id(0) * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, OUT))
    offs_m = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, OUT))
    is_out = (offs_n < N)[:, None] & (offs_m < M)[None, :]
    to = offs_m.to(gl.int64)[None, :] * y_stride + offs_n[:, None]
    if residual_ptr is not None:
        y += gl.load(residual_ptr + to, mask=is_out, other=0.0).to(gl.float32)
    to += pid_s.to(gl.int64) * M * y_stride
    gl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), mask=is_out)


@gluon.jit
def _copy_inputs(
    ring_x, x_ptr, first, M, x_stride, NUM_SPANS: gl.constexpr, ROWS: gl.constexpr,
    SPAN: gl.constexpr, TOGETHER: gl.constexpr,
):  # fmt: skip
    """A slice of the rows to shared memory, TOGETHER spans at a time."""
    NUM: gl.constexpr = TOGETHER * ROWS
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (SPAN // 8), SPAN // 8],
                                           [gl.num_warps(), 1], [1, 0])  # fmt: skip
    offs_r = gl.arange(0, NUM, layout=gl.SliceLayout(1, LINES))
    offs_k = gl.arange(0, SPAN, layout=gl.SliceLayout(0, LINES))
    row, span = offs_r % ROWS, offs_r // ROWS
    x_ptrs = x_ptr + (row * x_stride + (first + span) * SPAN)[:, None] + offs_k[None, :]
    for at in gl.static_range((NUM_SPANS + TOGETHER - 1) // TOGETHER):
        is_in = (row < M) & (at * TOGETHER + span < NUM_SPANS)
        async_copy.async_copy_global_to_shared(
            ring_x.index(at), x_ptrs + at * TOGETHER * SPAN, is_in[:, None]
        )
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["M"])
def _direct_kernel(
    x_ptr, data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, y_ptr, bias_ptr,
    residual_ptr, M, N, num_rows, x_stride, y_stride, NUM_SPANS: gl.constexpr, DEPTH: gl.constexpr,
    ENDING: gl.constexpr, FORMAT: gl.constexpr, SPAN: gl.constexpr, WORDS: gl.constexpr,
    OFFSET: gl.constexpr, GROUP_K: gl.constexpr, UNIT_K: gl.constexpr, HAS_ZERO: gl.constexpr,
    HAS_MINIMUM: gl.constexpr, HAS_UNIT: gl.constexpr, PAIRED: gl.constexpr, ROUTE: gl.constexpr,
    ROWS: gl.constexpr, BLOCK_N: gl.constexpr, IS_WHOLE: gl.constexpr, TOGETHER: gl.constexpr,
    IS_MOVED: gl.constexpr,
):  # fmt: skip
    """One slice of some outputs. ENDING: "store" or an activation, of pairs of outputs."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    LAYOUT: gl.constexpr = _word_layout(BLOCK_N, gl.num_warps())
    OF_A: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, MMA, 2))
    IS_DUAL: gl.constexpr = ENDING != "store"
    WIDTH: gl.constexpr = BLOCK_N // 2 if IS_DUAL else BLOCK_N
    PHASES: gl.constexpr = 1 if ROWS == 1 else 8  # with one row, all threads read the same
    ROUNDS: gl.constexpr = NUM_SPANS // DEPTH - 1
    REST: gl.constexpr = NUM_SPANS % DEPTH
    _let_next_start()
    offs_w = _outputs(gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, LAYOUT)), N, WIDTH, IS_DUAL)
    offs_a = _outputs(gl.arange(0, BLOCK_N, layout=OF_A), N, WIDTH, IS_DUAL)
    first = gl.program_id(1) * NUM_SPANS
    held, whole = (), ()
    for ahead in gl.static_range(DEPTH):  # weights do not depend on the previous kernel
        held = held + (_read(data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr,
                             first + ahead, offs_w, offs_a, num_rows, SPAN, WORDS, GROUP_K, UNIT_K,
                             HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED, IS_WHOLE,
                             LAYOUT),)  # fmt: skip
    if IS_WHOLE:
        whole = (read_scales(scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr, 0, offs_a,
                             num_rows, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT,
                             PAIRED),)  # fmt: skip
    _wait_for_inputs()
    ring_x = gl.allocate_shared_memory(
        x_ptr.dtype.element_ty, [(NUM_SPANS + TOGETHER - 1) // TOGETHER, TOGETHER * ROWS, SPAN],
        gl.SwizzledSharedLayout(8, 1, PHASES, [1, 0]))  # fmt: skip
    _copy_inputs(ring_x, x_ptr, first, M, x_stride, NUM_SPANS, ROWS, SPAN, TOGETHER)
    sum = gl.zeros([BLOCK_N, 8 if ROWS == 1 else ROWS], gl.float32, layout=MMA)
    for turn in range(ROUNDS):
        read = ()
        for at in gl.static_range(DEPTH):
            x_tile = ring_x.index(turn * (DEPTH // TOGETHER) + at // TOGETHER)
            sum = _add_span(sum, held[at], whole, x_tile.slice(at % TOGETHER * ROWS, ROWS, dim=0),
                            FORMAT, SPAN, WORDS, OFFSET, GROUP_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT,
                            PAIRED, ROUTE, IS_MOVED, MMA)  # fmt: skip
            read = read + (_read(data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr,
                                 first + (turn + 1) * DEPTH + at, offs_w, offs_a, num_rows, SPAN,
                                 WORDS, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED,
                                 IS_WHOLE, LAYOUT),)  # fmt: skip
        held = read
    for at in gl.static_range(DEPTH + REST):
        if at < REST:
            held = held + (_read(data_ptr, scale_ptr, zero_ptr, minimum_ptr, unit_ptr, min_unit_ptr,
                                 first + (ROUNDS + 1) * DEPTH + at, offs_w, offs_a, num_rows, SPAN,
                                 WORDS, GROUP_K, UNIT_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT, PAIRED,
                                 IS_WHOLE, LAYOUT),)  # fmt: skip
        x_tile = ring_x.index((ROUNDS * DEPTH + at) // TOGETHER)
        sum = _add_span(sum, held[at], whole, x_tile.slice(at % TOGETHER * ROWS, ROWS, dim=0),
                        FORMAT, SPAN, WORDS, OFFSET, GROUP_K, HAS_ZERO, HAS_MINIMUM, HAS_UNIT,
                        PAIRED, ROUTE, IS_MOVED, MMA)  # fmt: skip
    if IS_MOVED:
        sum = sum * (1 / MOVED)  # exact
    _finish(sum, y_ptr, bias_ptr, residual_ptr, gl.program_id(1), M, N, y_stride, WIDTH, ENDING)


def can_multiply(x_MK: Tensor, w: Quantised, y: Tensor, ending: str, split: int) -> bool:
    """Whether these kernels can compute a product: of few rows, in whole spans of whole blocks,
    with separate slices."""
    num_rows, num_inputs = x_MK.shape
    is_apart = split == 1 or (y.dim() == 3 and len(y) == split)
    is_even = num_inputs % (w.span * split) == 0 and w.data_SNW.shape[2] % 32 == 0
    is_known = ending != "rope" and route_of(w) != "plain"
    is_aligned = x_MK.stride(1) == 1 and x_MK.stride(0) % 8 == 0 and x_MK.data_ptr() % 16 == 0
    size = x_MK.element_size() * num_inputs // split * _height(num_rows)
    is_small = num_rows <= MAX_ROWS and size <= MAX_INPUT_BYTES
    return is_small and is_apart and is_even and is_known and is_aligned


def _height(num_rows: int) -> int:
    """Rows of a tile."""
    return 1 if num_rows == 1 else 8 if num_rows <= 8 else MAX_ROWS


def tile_of(w: Quantised, num_rows: int, split: int) -> Tile:
    """The best tile as measured on an H200. Stages are spans read ahead."""
    num_spans = w.shape[1] // (w.span * split)
    is_narrow, is_short = num_parts(w.format) == 4, num_spans <= SHORT
    is_one, is_many = num_rows == 1, w.shape[0] * split > MANY_OUTPUTS
    if w.has_minimum:
        num_warps, depth = (8, 2) if is_many and not is_one else (2, 4)
    elif is_one:
        num_warps, depth = (2, 4) if is_many else (4, 8) if is_narrow else (2, 4 if is_short else 8)
    elif is_many:
        num_warps, depth = 8, 4
    elif is_narrow:
        num_warps, depth = 8, 8 if is_short else 7
    else:
        num_warps, depth = (8, 4) if is_short else (2, 4)
    height = _height(num_rows)
    if 2 * height * num_spans * w.span > ALONE_BYTES:
        depth = min(depth, 4)
        num_warps = 8 if w.shape[0] * split <= 128 * NUM_SMS else 16
    return Tile(height, 16 * num_warps, 0, num_warps, depth)


def launch(
    x_MK: Tensor, w: Quantised, y: Tensor, ending: str, num_outputs: int, split: int,
    *, bias: Tensor | None = None, residual: Tensor | None = None,
) -> None:  # fmt: skip
    """A product of `gpu_quant`."""
    if w.order_K is not None:
        x_MK = x_MK.index_select(1, w.order_K)
    assert x_MK.dtype == w.dtype, "a weight stands for numbers of one precision"
    (m, k), span = x_MK.shape, w.span
    num_spans = k // (span * split)
    tile = tile_of(w, m, split)
    depth, together = min(tile.num_stages, num_spans), tile.num_warps * 256 // span // tile.block_m
    while together > 1 and depth % together:
        together //= 2
    width = tile.block_n if ending == "store" else tile.block_n // 2
    _direct_kernel[(cdiv(num_outputs, width), split)](
        x_MK, *pointers_of(w), y, bias, residual, m, num_outputs, w.shape[0], x_MK.stride(0),
        y.stride(-2), NUM_SPANS=num_spans, DEPTH=depth, ENDING=ending, **form_of(w),
        ROWS=tile.block_m, BLOCK_N=tile.block_n, IS_WHOLE=len(w.scale_GN) == 1,
        TOGETHER=max(together, 1), IS_MOVED=can_move(w), **options(tile.num_warps),
    )  # fmt: skip
