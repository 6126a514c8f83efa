"""What all Triton launchers share: launch options, rounding, and overlap with the previous kernel.

Kernels start early (programmatic dependent launch): before `wait_for_inputs` a kernel may read
weights only. Each kernel calls it once, so that a chain of kernels is safe.

When a kernel lets the next one start was measured. A product does so at once, so that the next
kernel starts as soon as there is room. Attention does so when it has read its positions, as waiting
programs beside it took an eighth of a small model's pass. All others do so when their own inputs
are ready, so that only one kernel waits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

IS_INTERPRETED = triton.knobs.runtime.interpret
USUAL_BYTES = 227 * 1024  # of shared memory that tiles were chosen for: an H100's or H200's


def options(num_warps: int, num_stages: int = 1) -> dict[str, object]:
    """Launch options. Multiply-add contraction is off: it could differ from tile to tile.

    Stages are tiles that a program has or is loading. A GPU with less shared memory gets fewer.
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
    """Wait for the previous kernel; nothing that it writes may be read before this call."""
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_start():
    """Let the next kernel use free multiprocessors now; it still waits for our results."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def take_turns(IS_EAGER: tl.constexpr = False):
    """Wait for the inputs, then let the next kernel start; IS_EAGER: the other way round."""
    if IS_EAGER:
        let_next_start()
    wait_for_inputs()
    if not IS_EAGER:
        let_next_start()


@triton.jit
def prefetch_l2(ptrs):
    """Load the cache lines of `ptrs` without waiting for them."""
    if EARLY:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [ptrs.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def slice_at(s, stride):
    """Where slice s begins: those of very many tokens are further apart than 32 bits can count."""
    return tl.full((), s, tl.int64) * stride


def cdiv(a: int, b: int) -> int:
    """Rounded up. Triton's own is made for kernels, and slow on the host."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def warp_block(n: int) -> int:
    """A block for this many places, at least a warp, so that steps of few nodes share a kernel."""
    return max(next_power_of_2(n), 32)
