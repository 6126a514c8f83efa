"""Trees of the target's best successors of tokens, on the device.

Shape letters: as in `successors`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hunch.kernels.gpu_launch import next_power_of_2, options
from hunch.kernels.gpu_step import C_DRAFTED, C_MATCHED, live_row
from hunch.kernels.step import RowState, StepRows
from hunch.kernels.successors import RankTree, Successors


@triton.jit
def _recycle_kernel(
    ids_ptr, room_ptr, count_in_ptr, history_ptr, known_ptr, end_ptr, done_ptr, count_ptr,
    draft_ptr, parents_ptr, result_ptr, token_ptr, next_ptr, rank_ptr, parent_ptr, history_stride,
    draft_stride, result_stride, num_slots, width, num_nodes,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: every node looks up its own path, then nodes that have one move together."""
    r, row, is_row = live_row(ids_ptr, count_in_ptr, done_ptr)
    if is_row:
        known = tl.load(known_ptr + row)
        left = tl.load(end_ptr + row) - known - 1  # levels that can still be committed
        last = tl.load(history_ptr + row * history_stride + known - 1)
        n = tl.arange(0, BLOCK).to(tl.int64)
        is_node = n < num_nodes
        has_path, token = is_node, tl.zeros((BLOCK,), tl.int64) + last
        for depth in tl.static_range(DEPTH):
            rank = tl.load(rank_ptr + n * DEPTH + depth, mask=is_node, other=-1)
            slot = token % num_slots
            held = tl.load(token_ptr + slot, mask=has_path, other=-1).to(tl.int64)
            has_path &= (rank < 0) | ((held == token) & (depth < left))
            is_on = has_path & (rank >= 0)
            follower = tl.load(next_ptr + slot * width + rank, mask=is_on, other=0).to(tl.int64)
            token = tl.where(is_on, follower, token)
        number = tl.cumsum(has_path.to(tl.int64), axis=0) - 1
        draft_ptr += row * draft_stride
        parents_ptr += row * draft_stride
        # The new number of each node's parent is read from where that one wrote its own.
        tl.store(parents_ptr + n, number, mask=is_node)
        tl.debug_barrier()
        parent = tl.load(parent_ptr + n, mask=is_node, other=-1)
        above = tl.load(parents_ptr + parent, mask=is_node & (parent >= 0), other=-1)
        tl.debug_barrier()
        tl.store(draft_ptr + number, token, mask=has_path)
        tl.store(parents_ptr + number, above, mask=has_path)
        count = tl.minimum(tl.sum(has_path.to(tl.int64), axis=0), tl.load(room_ptr + r))
        result_ptr += r * result_stride
        tl.store(result_ptr + C_MATCHED, 1)
        tl.store(result_ptr + C_DRAFTED, count)
        tl.store(count_ptr + row, count)


def recycled(state: RowState, step: StepRows, successors: Successors, tree: RankTree) -> None:
    """Draft a tree of successors for each row."""
    num_nodes, depth = tree.rank_NP.shape
    _recycle_kernel[(len(step.ids_R),)](
        step.ids_R, step.max_draft_R, step.num_checked_R, state.tokens_XL, state.known_X,
        state.end_X, state.is_done_X, state.num_nodes_X, state.draft_XG, state.parents_XG,
        step.result_RC, successors.token_S, successors.next_SC, tree.rank_NP, tree.parent_N,
        state.tokens_XL.stride(0), state.draft_XG.stride(0), step.result_RC.stride(0),
        successors.num_slots, successors.next_SC.stride(0), num_nodes,
        DEPTH=depth, BLOCK=next_power_of_2(num_nodes), **options(1),
    )  # fmt: skip
