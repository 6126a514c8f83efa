"""Look up what comes next in the prediction of a row's request, on the device.

Shape letters: as in `gpu_step`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hunch.kernels import step as at
from hunch.kernels.gpu_launch import next_power_of_2, options
from hunch.kernels.gpu_step import live_row, put_chain
from hunch.kernels.lookup import MAX_MATCH, NEAR
from hunch.kernels.step import RowState, StepRows

R_EXPECTED, R_IS_ALONE = tl.constexpr(at.EXPECTED), tl.constexpr(at.IS_ALONE)
R_PROMPT, R_SHIFT = tl.constexpr(at.PROMPT), tl.constexpr(at.SHIFT)
BY_PREDICTION = tl.constexpr(at.BY_PREDICTION)


@triton.jit
def _longest_expected(
    answer_ptr, num_answer, expected_ptr, num_expected, ahead,
    MAX_MATCH: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The longest match of an answer's end in its prediction: length, and the place after it."""
    offs = tl.arange(0, BLOCK)
    best = tl.zeros((BLOCK,), tl.int64)
    for start in range(1, num_expected + 1, BLOCK):
        place = start + offs
        matched = tl.zeros((BLOCK,), tl.int32)
        is_place = place <= num_expected
        is_equal = is_place
        for i in tl.static_range(MAX_MATCH):
            at = place - 1 - i
            token = tl.load(expected_ptr + at, mask=is_place & (at >= 0), other=-1)
            own = tl.load(answer_ptr + num_answer - 1 - i, mask=num_answer > i, other=-2)
            is_equal &= token == own
            matched += is_equal.to(tl.int32)
        away = tl.abs(place - ahead)
        is_believed = (matched > 1) | ((matched == 1) & (away < NEAR))
        # Among equals the nearest; at the same distance, the one ahead.
        order = 2 * away + (place < ahead).to(tl.int32)
        score = (matched.to(tl.int64) << 32) + (0x7FFFFFFF - order)
        best = tl.maximum(best, tl.where(is_believed, score, 0))
    found = tl.max(best, axis=0)
    order = (0x7FFFFFFF - (found & 0xFFFFFFFF)).to(tl.int32)
    away = order // 2
    place = tl.where(order % 2 == 1, ahead - away, ahead + away)
    matched = (found >> 32).to(tl.int32)
    return matched, tl.where(matched > 0, place, ahead)


@triton.jit
def _expect_kernel(
    ids_ptr, max_draft_ptr, num_checked_ptr, history_ptr, known_ptr, end_ptr, done_ptr,
    num_nodes_ptr, draft_ptr, parents_ptr, result_ptr, settings_ptr, expected_ptr, history_stride,
    draft_stride, result_stride, settings_stride, expected_stride, num_nodes, guesses_at,
    MAX_MATCH: tl.constexpr, NEAR: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row: what comes next in its prediction, instead of the draft it has."""
    r, row, is_row = live_row(ids_ptr, num_checked_ptr, done_ptr)
    settings_ptr += row * settings_stride
    num_expected = tl.where(is_row, tl.load(settings_ptr + R_EXPECTED), 0).to(tl.int32)
    is_alone = is_row & (tl.load(settings_ptr + R_IS_ALONE) > 0)
    if (num_expected > 0) | is_alone:
        known = tl.load(known_ptr + row).to(tl.int32)
        prompt = tl.load(settings_ptr + R_PROMPT).to(tl.int32)
        num_answer = known - prompt
        expected_ptr += row * expected_stride
        ahead = num_answer + tl.load(settings_ptr + R_SHIFT).to(tl.int32)
        has_draft = (
            tl.load(num_nodes_ptr + row) > 0
        )  # read by all warps before one of them writes it
        matched, place = _longest_expected(
            history_ptr + row * history_stride + prompt, num_answer, expected_ptr, num_expected,
            ahead, MAX_MATCH, NEAR, BLOCK,
        )  # fmt: skip
        tl.store(settings_ptr + R_SHIFT, (place - num_answer).to(tl.int64))
        num_guesses = tl.minimum(tl.maximum(num_expected - place, 0), num_nodes)
        is_kept = (num_guesses > 0) & ((matched > 1) | ((matched == 1) & (place == ahead)))
        if is_kept | is_alone | ~has_draft:
            node = tl.arange(0, BLOCK_N)
            tokens = tl.load(expected_ptr + place + node, mask=node < num_guesses, other=-1)
            heard = tl.where(is_kept, tl.minimum(4 + 4 * matched, MAX_MATCH), 0) + BY_PREDICTION
            put_chain(
                tokens.to(tl.int64), node, num_guesses, heard.to(tl.int64), known, r, row,
                max_draft_ptr, end_ptr, num_nodes_ptr, draft_ptr, parents_ptr, result_ptr,
                draft_stride, result_stride, num_nodes, guesses_at,
            )  # fmt: skip


def expect(state: RowState, step: StepRows, num_nodes: int) -> None:
    """Draft from rows' predictions, if they have one and the answer follows it."""
    methods = step.methods
    assert methods is not None
    _expect_kernel[(len(step.ids_R),)](
        step.ids_R, step.max_draft_R, step.num_checked_R, state.tokens_XL, state.known_X,
        state.end_X, state.is_done_X, state.num_nodes_X, state.draft_XG, state.parents_XG,
        step.result_RC, methods.settings_XW, methods.expected_XE, state.tokens_XL.stride(0),
        state.draft_XG.stride(0), step.result_RC.stride(0), methods.settings_XW.stride(0),
        methods.expected_XE.stride(0), num_nodes, step.guesses_at, MAX_MATCH=MAX_MATCH,
        NEAR=NEAR, BLOCK=1024, BLOCK_N=next_power_of_2(num_nodes), **options(8),
    )  # fmt: skip
