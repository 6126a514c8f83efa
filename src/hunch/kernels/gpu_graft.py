"""Add a lookup's chain to the tree that a network grew for the same row.

Shape letters: as in `step`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hunch.kernels import step as at
from hunch.kernels.gpu_launch import next_power_of_2, options
from hunch.kernels.gpu_step import C_DRAFTED, live_row
from hunch.kernels.step import RowState, StepRows

R_SURE, AS_OTHERS = tl.constexpr(at.SURE), tl.constexpr(at.AS_OTHERS)


@triton.jit
def _graft_kernel(
    ids_ptr, max_draft_ptr, num_checked_ptr, known_ptr, end_ptr, done_ptr, num_nodes_ptr, draft_ptr,
    parents_ptr, result_ptr, settings_ptr, draft_stride, result_stride, settings_stride, guesses_at,
    num_guesses, HAS_METHODS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """One row: down the tree while a child is the next guess, then the rest as a chain."""
    r, row, is_row = live_row(ids_ptr, num_checked_ptr, done_ptr)
    if HAS_METHODS:
        is_row &= tl.load(settings_ptr + row * settings_stride + R_SURE) == AS_OTHERS
    if is_row:
        draft_ptr += row * draft_stride
        parents_ptr += row * draft_stride
        result_ptr += r * result_stride
        count = tl.load(num_nodes_ptr + row)
        n = tl.arange(0, BLOCK_N).to(tl.int64)
        token_N = tl.load(draft_ptr + n, mask=n < count, other=-1)
        parent_N = tl.load(parents_ptr + n, mask=n < count, other=-2)
        g = tl.arange(0, BLOCK_G)
        guess_G = tl.load(result_ptr + guesses_at + g, mask=g < num_guesses, other=-1)
        left = tl.maximum(tl.load(end_ptr + row) - tl.load(known_ptr + row) - 1, 0)
        num_left = tl.minimum(tl.sum((guess_G >= 0).to(tl.int64), axis=0), left)
        node, place = tl.full((), -1, tl.int64), tl.zeros((), tl.int64)
        is_found = num_left > 0
        while is_found:
            token = tl.load(result_ptr + guesses_at + place)
            child = tl.max(tl.where((parent_N == node) & (token_N == token), n, -1), axis=0)
            is_found = child >= 0
            node = tl.where(is_found, child, node)
            place += is_found.to(tl.int64)
            is_found &= place < num_left
        to = count + g - place
        is_new = (g >= place) & (g < num_left)
        tl.store(draft_ptr + to, guess_G, mask=is_new)
        tl.store(parents_ptr + to, tl.where(g == place, node, to - 1), mask=is_new)
        count = tl.minimum(tl.load(max_draft_ptr + r), count + num_left - place)
        tl.store(num_nodes_ptr + row, count)
        tl.store(result_ptr + C_DRAFTED, count)


def graft(state: RowState, step: StepRows, num_nodes: int, num_guesses: int) -> None:
    """Add the first guesses that a lookup wrote into the result to the row's tree.

    num_nodes: guesses that the result has room for. Rows whose requests name a method keep their
    draft.
    """
    settings = step.ids_R if step.methods is None else step.methods.settings_XW
    _graft_kernel[(len(step.ids_R),)](
        step.ids_R, step.max_draft_R, step.num_checked_R, state.known_X, state.end_X,
        state.is_done_X, state.num_nodes_X, state.draft_XG, state.parents_XG, step.result_RC,
        settings, state.draft_XG.stride(0), step.result_RC.stride(0), settings.stride(0),
        step.guesses_at(num_nodes), num_guesses, HAS_METHODS=step.methods is not None,
        BLOCK_N=next_power_of_2(state.draft_XG.shape[1]), BLOCK_G=next_power_of_2(num_guesses),
        **options(1),
    )  # fmt: skip
