"""Transfers between host and device around a step, through the host's pinned memory.

A copy before or after a captured step keeps the device idle for longer than these kernels take.

Shape letters: R rows of the step, W room of a buffer, Q buffers for results on the host.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options, take_turns
from hunch.kernels.gpu_step import now
from hunch.kernels.step import RowState, StepRows

# --- to the device --------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_changes"])
def _update_kernel(
    flat_ptr, inputs_ptr, buffer_ptr, num_changes, NUM_INPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of the inputs and a piece of the changes."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_input, is_change = offs < NUM_INPUTS, offs < num_changes
    inputs = tl.load(buffer_ptr + offs, mask=is_input)
    buffer_ptr += NUM_INPUTS
    place = tl.load(buffer_ptr + offs, mask=is_change, other=0)
    value = tl.load(buffer_ptr + num_changes + offs, mask=is_change)
    tl.store(inputs_ptr + offs, inputs, mask=is_input)
    tl.store(flat_ptr + place, value, mask=is_change)


def update(state: RowState, inputs_3R: Tensor, buffer_W: Tensor, num_changes: int) -> None:
    """Apply a buffer: the step's inputs, then the places of what changed, then the values."""
    size = inputs_3R.numel()
    # It runs between two captured steps, and starts when the first one is over.
    _update_kernel[(cdiv(max(size, num_changes), 256),)](
        state.flat, inputs_3R, buffer_W, num_changes, NUM_INPUTS=size, BLOCK=256, num_warps=4
    )


# --- to the host ----------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["size"])
def _deliver_kernel(
    ids_ptr, clock_ptr, result_ptr, buffers_ptr, size, num_buffers, buffer_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of the result, to the buffer whose turn it is; the first piece adds the time."""
    piece = tl.program_id(0).to(tl.int64)
    take_turns()
    is_step = tl.load(ids_ptr) >= 0
    offs = piece * BLOCK + tl.arange(0, BLOCK)
    is_in = (offs < size) & is_step
    buffers_ptr += (tl.load(clock_ptr) % num_buffers) * buffer_stride
    result = tl.load(result_ptr + offs, mask=is_in)
    tl.store(buffers_ptr + offs, result, mask=is_in)
    if piece == 0:
        tl.store(buffers_ptr + buffer_stride - 1, now() - tl.load(clock_ptr + 1), mask=is_step)


def deliver(state: RowState, step: StepRows, buffers_QW: Tensor) -> None:
    """Write the step's result to buffer (steps so far) modulo Q, with its time at the end.

    A step without rows writes nothing.
    """
    size = step.result_RC.numel()
    block = min(1024, next_power_of_2(size))
    _deliver_kernel[(cdiv(size, block),)](
        step.ids_R, state.clock_2, step.result_RC, buffers_QW, size, *buffers_QW.shape, BLOCK=block,
        **options(4),
    )  # fmt: skip
