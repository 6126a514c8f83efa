"""What becomes of a tree that a network grew: its likeliest nodes stay, a lookup's chain is added.

Shape letters: as in `step`; N nodes that were grown.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels import step as at
from hunch.kernels.gpu_filters import rank_of
from hunch.kernels.gpu_launch import next_power_of_2, options
from hunch.kernels.gpu_step import C_DRAFTED, live_row
from hunch.kernels.step import RowState, StepRows

R_SURE, AS_OTHERS = tl.constexpr(at.SURE), tl.constexpr(at.AS_OTHERS)


@triton.jit(do_not_specialize=["most", "guesses_at", "least"])
def _likeliest_kernel(
    chance_ptr, ids_ptr, max_draft_ptr, num_checked_ptr, known_ptr, end_ptr, done_ptr,
    num_nodes_ptr, draft_ptr, parents_ptr, result_ptr, chance_stride, draft_stride, result_stride,
    guesses_at, num_grown, most, least, LEVEL_SIZE: tl.constexpr, HAS_LEAST: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row: the path of first children and the likeliest nodes, in place of all grown ones."""
    r, row, is_row = live_row(ids_ptr, num_checked_ptr, done_ptr)
    if is_row:
        draft_ptr += row * draft_stride
        parents_ptr += row * draft_stride
        result_ptr += r * result_stride
        room = tl.load(max_draft_ptr + r)
        left = tl.load(end_ptr + row) - tl.load(known_ptr + row)
        n = tl.arange(0, BLOCK_N).to(tl.int64)
        token = tl.load(draft_ptr + n, mask=n < num_grown, other=0)
        parent = tl.load(parents_ptr + n, mask=n < num_grown, other=-1)
        # Nodes without a slot got no children, nor did those of the row's last token.
        is_in = (n < num_grown) & (n // LEVEL_SIZE < left - 1) & (parent < room)
        chance = tl.load(chance_ptr + r * chance_stride + n, mask=is_in, other=float("-inf"))
        if HAS_LEAST:
            is_in &= chance >= least
        # The target is likeliest to take the path of first children.
        order = tl.where(n % LEVEL_SIZE == 0, 0x7FFFFFFFFFFFFFFF - n, rank_of(chance, n))
        order = tl.where(is_in, order, -1)
        place = tl.sum((order[None, :] > order[:, None]).to(tl.int64), axis=1)
        is_parent = n[None, :] == parent[:, None]
        parent = tl.sum(tl.where(is_parent, place[None, :] + 1, 0), axis=1) - 1
        count = tl.minimum(tl.minimum(tl.sum(is_in.to(tl.int64), axis=0), room), most)
        is_in &= place < count
        tl.debug_barrier()  # all nodes were read
        tl.store(draft_ptr + place, token, mask=is_in)
        tl.store(parents_ptr + place, parent, mask=is_in)
        tl.store(num_nodes_ptr + row, count)
        tl.store(result_ptr + guesses_at + place, token, mask=is_in)
        tl.store(result_ptr + guesses_at + n, n * 0 - 1, mask=(n >= count) & (n < num_grown))
        tl.store(result_ptr + C_DRAFTED, count)


@triton.jit
def _graft_kernel(
    ids_ptr, max_draft_ptr, num_checked_ptr, known_ptr, end_ptr, done_ptr, num_nodes_ptr, draft_ptr,
    parents_ptr, result_ptr, settings_ptr, draft_stride, result_stride, settings_stride, guesses_at,
    num_guesses, most, HAS_METHODS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_G: tl.constexpr,
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
        stays = n < tl.minimum(count, most - num_guesses)  # however many guesses are new
        token_N = tl.load(draft_ptr + n, mask=stays, other=-1)
        parent_N = tl.load(parents_ptr + n, mask=stays, other=-2)
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
        count = tl.minimum(count, most - (num_left - place))
        to = count + g - place
        is_new = (g >= place) & (g < num_left)
        tl.store(draft_ptr + to, guess_G, mask=is_new)
        tl.store(parents_ptr + to, tl.where(g == place, node, to - 1), mask=is_new)
        count = tl.minimum(tl.load(max_draft_ptr + r), count + num_left - place)
        tl.store(num_nodes_ptr + row, count)
        tl.store(result_ptr + C_DRAFTED, count)


def keep_likeliest(
    state: RowState, step: StepRows, chances_RN: Tensor, *, level_size: int, most: int,
    least: float | None,
) -> None:  # fmt: skip
    """`best_first.keep_likeliest_ref`."""
    num_grown = chances_RN.shape[1]
    _likeliest_kernel[(len(step.ids_R),)](
        chances_RN, step.ids_R, step.max_draft_R, step.num_checked_R, state.known_X, state.end_X,
        state.is_done_X, state.num_nodes_X, state.draft_XG, state.parents_XG, step.result_RC,
        chances_RN.stride(0), state.draft_XG.stride(0), step.result_RC.stride(0),
        step.guesses_at, num_grown, most, least or 0.0, LEVEL_SIZE=level_size,
        HAS_LEAST=least is not None, BLOCK_N=next_power_of_2(num_grown), **options(4),
    )  # fmt: skip


def graft(state: RowState, step: StepRows, num_guesses: int, most: int) -> None:
    """Add the first guesses that a lookup wrote into the result to the row's tree.

    most: nodes in all; of a larger tree the last ones make room. Rows whose requests name a method
    keep their draft.
    """
    settings = step.ids_R if step.methods is None else step.methods.settings_XW
    _graft_kernel[(len(step.ids_R),)](
        step.ids_R, step.max_draft_R, step.num_checked_R, state.known_X, state.end_X,
        state.is_done_X, state.num_nodes_X, state.draft_XG, state.parents_XG, step.result_RC,
        settings, state.draft_XG.stride(0), step.result_RC.stride(0), settings.stride(0),
        step.guesses_at, num_guesses, most, HAS_METHODS=step.methods is not None,
        BLOCK_N=next_power_of_2(state.draft_XG.shape[1]), BLOCK_G=next_power_of_2(num_guesses),
        **options(1),
    )  # fmt: skip
