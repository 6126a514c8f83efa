"""What every Triton launcher shares: launch options, rounding, and overlap with the kernel before.

Kernels start early (programmatic dependent launch): what comes before `wait_for_inputs` may touch
weights only, everything else comes after it. Each kernel calls it once, so a chain is safe.

When a kernel lets the next one start was measured: a product at once, so that the next can come as
soon as there is room; attention when its positions are read, as programs that wait beside it took
an eighth of a small model's pass; all others when their own inputs are there, so that one waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

IS_INTERPRETED = triton.knobs.runtime.interpret
USUAL_BYTES = 227 * 1024  # of shared memory, for which tiles were chosen: an H100's or H200's


def options(num_warps: int, num_stages: int = 1) -> dict[str, object]:
    """Launch options. Multiply-add contraction is off: it could differ from tile to tile.

    Stages are tiles that a program holds or has asked for. A GPU with less shared memory than
    they were chosen for gets fewer.
    """
    if IS_INTERPRETED:
        return {"num_warps": num_warps, "num_stages": num_stages}
    return {
        "num_warps": num_warps,
        "num_stages": stages_for(num_stages),
        "launch_pdl": HAS_EARLY_START,
        "enable_fp_fusion": False,
    }


def stages_for(num_stages: int) -> int:
    return max(num_stages * SHARED_BYTES // USUAL_BYTES, min(num_stages, 2))


def _shared_bytes() -> int:
    """Shared memory that one program may have."""
    if not torch.cuda.is_available():
        return USUAL_BYTES
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(found.shared_memory_per_block_optin)


def _has_early_start() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


SHARED_BYTES = min(_shared_bytes(), USUAL_BYTES)
HAS_EARLY_START = not IS_INTERPRETED and _has_early_start()
HAS_BULK_COPIES = IS_INTERPRETED or _has_early_start()  # of the same GPUs
EARLY = tl.constexpr(HAS_EARLY_START)  # known when a kernel is compiled


@triton.jit
def wait_for_inputs():
    """Nothing the kernel before writes may be read above this line."""
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_start():
    """The next kernel may take free multiprocessors now; it still waits for our results."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def take_turns(IS_EAGER: tl.constexpr):
    """Wait for the inputs; the next kernel may start before that (IS_EAGER), or after it."""
    if IS_EAGER:
        let_next_start()
    wait_for_inputs()
    if not IS_EAGER:
        let_next_start()


@triton.jit
def prefetch_l2(ptrs):
    """Ask for the lines behind `ptrs` without waiting for them."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [ptrs.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def cdiv(a: int, b: int) -> int:
    """Rounded up. Triton's own is made for kernels, and slow on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def warp_block(n: int) -> int:
    """A block for this many places, a warp's at least: steps of few nodes share one kernel."""
    return max(next_power_of_2(n), 32)
