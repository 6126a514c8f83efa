"""The inputs of a drafter's first pass on a device: known tokens, or those just committed.

Shape letters: R rows of the step, W tokens of a row in one pass, T packed tokens (R times W).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_launch import next_power_of_2, options, take_turns
from hunch.kernels.gpu_step import C_TOKENS, live_slots
from hunch.kernels.step import RowState, StepRows


@triton.jit
def _text_kernel(
    ids_ptr, num_checked_ptr, result_ptr, history_ptr, known_ptr, table_ptr, packed_ptr, pos_ptr,
    slot_ptr, seq_ptr, base_ptr, last_ptr, result_stride, history_stride, table_stride, width,
    IS_COMMITTED: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its last `width` known tokens, or those it just committed; ended rows too."""
    r = tl.program_id(0).to(tl.int64)
    take_turns()
    row = tl.maximum(tl.load(ids_ptr + r), 0)
    is_row = tl.load(num_checked_ptr + r) >= 0
    place = tl.arange(0, BLOCK).to(tl.int64)
    is_in = place < width
    at = r * width + place
    EARLY: tl.constexpr = 1 if IS_COMMITTED else 0  # positions: the network sees the next token
    count = width
    if IS_COMMITTED:
        count = tl.where(is_row, tl.load(result_ptr + r * result_stride + C_TOKENS), 0)
        tl.store(last_ptr + r, r * width + tl.maximum(count - 1, 0))
    where = tl.load(known_ptr + row) - count + place
    is_live = is_row & is_in & (place < count) & (where >= 0)
    token = tl.load(history_ptr + row * history_stride + where, mask=is_live, other=0)
    slot = live_slots(table_ptr + row * table_stride, where - EARLY, is_live, BLOCK_SIZE)
    tl.store(packed_ptr + at, token, mask=is_in)
    tl.store(pos_ptr + at, tl.where(is_live, where - EARLY, 0), mask=is_in)
    tl.store(slot_ptr + at, slot, mask=is_in)
    tl.store(seq_ptr + at, row + place * 0, mask=is_in)
    tl.store(base_ptr + at, tl.where(is_live, where - EARLY + 1, 1), mask=is_in)


def new_inputs(state: RowState, num_tokens: int, depth: int = 0) -> tuple[Tensor, AttnInputs]:
    """Buffers for the inputs of a pass: token ids, and what attention needs."""
    packed_5T = state.flat.new_empty(5, num_tokens)
    attn = AttnInputs.over(packed_5T, state.table_XB, state.block_size)
    if depth:
        attn.tree_TP = packed_5T.new_empty(num_tokens, depth)
    return packed_5T[0], attn


def _text_inputs(
    state: RowState, step: StepRows, ids_T: Tensor, attn: AttnInputs, last_R: Tensor | None
) -> None:
    width = len(ids_T) // len(step.ids_R)
    _text_kernel[(len(step.ids_R),)](
        step.ids_R, step.num_checked_R, step.result_RC, state.tokens_XL, state.known_X,
        state.table_XB, ids_T, attn.pos_T, attn.slot_T, attn.seq_T, attn.base_T, last_R,
        step.result_RC.stride(0), state.tokens_XL.stride(0), state.table_XB.stride(0), width,
        IS_COMMITTED=last_R is not None, BLOCK_SIZE=attn.block_size, BLOCK=next_power_of_2(width),
        **options(1),
    )  # fmt: skip


def known_inputs(state: RowState, step: StepRows, ids_T: Tensor, attn: AttnInputs) -> None:
    """Inputs of a pass over the last W known tokens of each row; places before them are padding.

    Rows that ended are included: their KV may serve other requests as a prefix.
    """
    _text_inputs(state, step, ids_T, attn, None)


def committed_inputs(
    state: RowState, step: StepRows, ids_T: Tensor, attn: AttnInputs, last_R: Tensor
) -> None:
    """Inputs of a pass over the tokens each row just committed, for a network that sees at
    position t the target's state of t and token t + 1.

    Place j of a row belongs to place j of the target's pass over a chain; places past the committed
    tokens are padding. last_R gets each row's last place that is not. Rows that ended are included:
    their KV may serve other requests as a prefix.
    """
    _text_inputs(state, step, ids_T, attn, last_R)
