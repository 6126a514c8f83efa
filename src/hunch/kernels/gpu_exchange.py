"""Parts of a result, exchanged between the GPUs of a node through memory that all of them can see.

A rank writes its part into its own memory, raises a flag in every other's, waits for theirs and
reads their parts. The host has no part in it, so that it can be captured in a step.

Each program p of a launch has its own piece of the parts, two regions that it writes in turn, one
flag from each rank, and a count of its turns. A region is written again two turns later: by then
the flag of the turn between has shown that the others have read it.

Shape letters: S slices of a sum, W 32-bit words of a part, R ranks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_launch import IS_INTERPRETED, cdiv, slice_at

MAX_PROGRAMS = 64  # must all run at once, as each waits for its counterpart on other GPUs
REGION = 1 << 16  # words that a program exchanges in one launch
MAX_WORDS = MAX_PROGRAMS * REGION  # of a part; a longer one is exchanged in pieces
SMALL, LARGE = 1024, 4096  # words that a program moves at once
PEERS_DIED, TIMED_OUT = 1, 2  # why waiting was given up

POLLS = tl.constexpr(1 << 10)  # looks at a flag before each check whether to give up
HAS_RELEASE = tl.constexpr(not IS_INTERPRETED)
NUM_FLAGS = tl.constexpr(MAX_PROGRAMS)
SPAN = tl.constexpr(REGION)
NUM_THREADS = tl.constexpr(256)


def buffer_words(num_ranks: int) -> int:
    """32-bit words of one rank's buffer: flags of all ranks, then regions. Zero at first."""
    return MAX_PROGRAMS * num_ranks + 2 * MAX_PROGRAMS * REGION


def exchange_ref(parts_SW: list[Tensor]) -> Tensor:
    """What every rank gets: the slices of each rank, added in order, rank after rank."""
    sums = []
    for part_SW in parts_SW:
        total_W = part_SW[0]
        for slice_W in part_SW[1:]:
            total_W = total_W + slice_W
        sums.append(total_W)
    return torch.stack(sums)


@triton.jit
def _raise_flag(flag_ptr, turn):
    """Set a flag; what this program wrote before is visible to all that see the flag."""
    tl.debug_barrier()
    if HAS_RELEASE:
        tl.inline_asm_elementwise(  # by one thread
            "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
            "@p st.release.sys.global.u32 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,r",
            [flag_ptr.to(tl.int64), turn],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_xchg(flag_ptr, turn)


@triton.jit
def _wait_for(flag_ptr, turn, stop_ptr, limit):
    """Wait until the flag shows this turn or a later one, or waiting is given up."""
    behind = turn - tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    num_polls = 0
    stop = 0
    while (behind > 0) & (stop == 0):
        num_polls += 1
        behind = turn - tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        if num_polls % POLLS == 0:
            # Threads may have seen different values: all take the largest, so as not to diverge.
            stop = tl.max(tl.load(stop_ptr + tl.zeros((NUM_THREADS,), tl.int32), volatile=True))
            if (stop == 0) & (num_polls >= limit):
                stop = 2
                tl.store(stop_ptr, stop)


@triton.jit(
    do_not_specialize=[
        "num_words", "per_program", "num_slices", "slice_stride", "line_stride", "limit",
    ]
)  # fmt: skip
def _exchange_kernel(
    part_ptr, out_ptr, buffers_ptr, turns_ptr, stop_ptr, num_words, per_program, num_slices,
    slice_stride, line_stride, limit, RANK: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr, WRITES: tl.constexpr, IS_SUM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One piece of the parts: write it, tell the others, wait for them, read ranks FIRST to LAST.

    Ranks that neither write nor read set flags and wait too, so that all have the same turn.
    """
    p = tl.program_id(0)
    turn = tl.load(turns_ptr + p) + 1
    region = NUM_FLAGS * SIZE + ((turn & 1) * NUM_FLAGS + p).to(tl.int64) * SPAN
    first = p.to(tl.int64) * per_program
    count = tl.minimum(num_words - first, per_program)
    own_ptr = tl.load(buffers_ptr + RANK).to(tl.pointer_type(tl.int32))
    for start in range(0, count if WRITES else 0, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        is_in = offs < count
        if IS_SUM:
            total = tl.load(part_ptr + first + offs, mask=is_in, other=0.0)
            for s in range(1, num_slices):
                at_ptr = part_ptr + slice_at(s, slice_stride) + first
                total += tl.load(at_ptr + offs, mask=is_in, other=0.0)
            word = total.to(tl.int32, bitcast=True)
        else:
            word = tl.load(part_ptr + first + offs, mask=is_in, other=0)
        tl.store(own_ptr + region + offs, word, mask=is_in)
    for other in tl.static_range(SIZE):
        if other != RANK:
            buffer_ptr = tl.load(buffers_ptr + other).to(tl.pointer_type(tl.int32))
            _raise_flag(buffer_ptr + RANK * NUM_FLAGS + p, turn)
    for other in tl.static_range(SIZE):
        if other != RANK:
            _wait_for(own_ptr + other * NUM_FLAGS + p, turn, stop_ptr, limit)
    tl.debug_barrier()
    for other in tl.static_range(FIRST, LAST):
        buffer_ptr = tl.load(buffers_ptr + other).to(tl.pointer_type(tl.int32))
        line_ptr = out_ptr + (other - FIRST) * line_stride.to(tl.int64) + first
        for start in range(0, count, BLOCK):
            offs = start + tl.arange(0, BLOCK)
            is_in = offs < count
            word = tl.load(buffer_ptr + region + offs, mask=is_in, other=0, cache_modifier=".cg")
            tl.store(line_ptr + offs, word, mask=is_in)
    tl.debug_barrier()
    tl.store(turns_ptr + p, turn)


class Exchange:
    """One rank's access to the memory that ranks share."""

    def __init__(self, rank: int, buffers: list[int], stop_1: Tensor, device: torch.device) -> None:
        """`buffers`: the address of each rank's buffer, as this process sees it.

        `stop_1` is in the host's memory, pinned: while it is 0, ranks wait for each other, up to
        `limit` looks at a flag.
        """
        self.rank, self.size, self.stop_1 = rank, len(buffers), stop_1
        self.buffers_R = torch.tensor(buffers, dtype=torch.int64, device=device)
        self.turns = torch.zeros(MAX_PROGRAMS, dtype=torch.int32, device=device)
        self.limit, self.device = 1 << 27, device

    def gather(self, part_SW: Tensor, *, writers: range, readers: range) -> Tensor:
        """The parts of ranks `writers`, as [R, W], for ranks `readers`; all ranks must call it.

        Parts of float32 have slices S, which are added; all others are one line of words. A rank
        that does not read gets no lines.
        """
        lines = writers if self.rank in readers else writers[:0]
        num_words = part_SW.shape[1]
        out_RW = part_SW.new_empty(len(lines), num_words)
        for start in range(0, num_words, MAX_WORDS):  # nothing is allocated between two pieces
            piece = slice(start, start + MAX_WORDS)
            self._launch(part_SW[:, piece], out_RW[:, piece], lines, writes=self.rank in writers)
        return out_RW

    def _launch(self, part_SW: Tensor, out_RW: Tensor, lines: range, *, writes: bool) -> None:
        num_words = part_SW.shape[1]
        block = SMALL if num_words <= SMALL * MAX_PROGRAMS else LARGE
        per_program = cdiv(cdiv(num_words, MAX_PROGRAMS), block) * block
        # It starts after all earlier kernels, and the next one after it.
        _exchange_kernel[(cdiv(num_words, per_program),)](
            part_SW, out_RW.view(torch.int32), self.buffers_R, self.turns, self.stop_1, num_words,
            per_program, len(part_SW), part_SW.stride(0), out_RW.stride(0), self.limit,
            RANK=self.rank, SIZE=self.size, FIRST=lines.start, LAST=lines.stop, WRITES=writes,
            IS_SUM=part_SW.dtype == torch.float32, BLOCK=block, num_warps=8,
        )  # fmt: skip
