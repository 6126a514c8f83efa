"""Draft from remembered answers with mistakes put in, on the device.

Shape letters: as in `gpu_step`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hunch.kernels import draft as at
from hunch.kernels.draft import Remembered
from hunch.kernels.gpu_launch import next_power_of_2, options
from hunch.kernels.gpu_step import live_row, put_chain
from hunch.kernels.step import RowState, StepRows

A_LENGTH, A_PROMPT, A_TURN = (
    tl.constexpr(at.LENGTH_OF),
    tl.constexpr(at.PROMPT_OF),
    tl.constexpr(at.TURN_OF),
)
STRIDE = tl.constexpr(at.STRIDE)


@triton.jit
def _remembered_kernel(
    ids_ptr, max_draft_ptr, num_checked_ptr, history_ptr, known_ptr, end_ptr, done_ptr,
    num_nodes_ptr, draft_ptr, parents_ptr, result_ptr, about_ptr, answers_ptr, runs_ptr,
    history_stride, draft_stride, result_stride, about_stride, answers_stride, num_runs, num_nodes,
    guesses_at, vocab_size, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: what its answer continued with, right as far as its turn says."""
    r, row, is_row = live_row(ids_ptr, num_checked_ptr, done_ptr)
    if is_row:
        about_ptr += row * about_stride
        answers_ptr += row * answers_stride
        known = tl.load(known_ptr + row)
        place = known - tl.load(about_ptr + A_PROMPT)
        length = tl.load(about_ptr + A_LENGTH)
        n = tl.arange(0, BLOCK).to(tl.int64)
        # The last tokens, as many as a step can commit, and one that the host did.
        back = place - 1 - n
        is_back = (n < num_nodes + 2) & (back >= 0) & (place <= length)
        was_N = tl.load(answers_ptr + back, mask=is_back, other=-1).to(tl.int64)
        is_N = tl.load(history_ptr + row * history_stride + known - 1 - n, mask=is_back, other=-1)
        has_departed = (place > length) | (tl.sum((was_N != is_N).to(tl.int32), axis=0) > 0)
        length = tl.where(has_departed, 0, length)
        tl.store(about_ptr + A_LENGTH, length)
        num_guesses = tl.minimum(tl.maximum(length - place, 0), num_nodes)
        is_node = n < num_guesses
        tokens = tl.load(answers_ptr + place + n, mask=is_node, other=-1).to(tl.int64)
        turn = (known * STRIDE + tl.load(about_ptr + A_TURN)) % num_runs
        is_wrong = is_node & (n >= tl.load(runs_ptr + turn))
        tokens = tl.where(is_wrong, (tokens + 1) % vocab_size, tokens)
        put_chain(
            tokens, n, num_guesses, 0, known, r, row, max_draft_ptr, end_ptr, num_nodes_ptr,
            draft_ptr, parents_ptr, result_ptr, draft_stride, result_stride, num_nodes, guesses_at,
        )  # fmt: skip


def remembered(
    state: RowState, step: StepRows, num_nodes: int, answers: Remembered, vocab_size: int
) -> None:
    """Draft up to `num_nodes` tokens of each row's remembered answer."""
    _remembered_kernel[(len(step.ids_R),)](
        step.ids_R, step.max_draft_R, step.num_checked_R, state.tokens_XL, state.known_X,
        state.end_X, state.is_done_X, state.num_nodes_X, state.draft_XG, state.parents_XG,
        step.result_RC, answers.about_XA, answers.tokens_XE, answers.runs_U,
        state.tokens_XL.stride(0), state.draft_XG.stride(0), step.result_RC.stride(0),
        answers.about_XA.stride(0), answers.tokens_XE.stride(0), len(answers.runs_U), num_nodes,
        step.guesses_at, vocab_size, BLOCK=next_power_of_2(num_nodes + 2), **options(1),
    )  # fmt: skip
