"""The target's best successors of tokens, and trees of them, on the device.

Shape letters: as in `successors`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.gpu_filters import MAX_COLUMNS
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options, take_turns
from hunch.kernels.gpu_step import C_DRAFTED, C_MATCHED, live_row
from hunch.kernels.step import RowState, StepRows
from hunch.kernels.successors import RankTree, Successors

NO_KEY = tl.constexpr(-(2**63))
GROUP, GROUPS = 128, 32  # columns of a group of logits; groups of one program


@triton.jit
def _keys(logits_ptr, columns, is_in):
    """Numbers that are ordered as the logits are, and of equal ones the lowest column first."""
    x = tl.load(logits_ptr + columns, mask=is_in, other=0).to(tl.float32)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # zero without its sign
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | (0x7FFFFFFF - columns).to(tl.int64)
    return tl.where(is_in, key, NO_KEY)


@triton.jit
def _group_kernel(
    logits_ptr, slot_ptr, key_ptr, num_columns, num_groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """The best key of each group of columns."""
    t = tl.program_id(0).to(tl.int64)
    take_turns()
    if tl.load(slot_ptr + t) >= 0:
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        columns = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        key = _keys(logits_ptr + t * num_columns, columns, columns < num_columns)
        tl.store(key_ptr + t * num_groups + group, tl.max(key, axis=1), mask=group < num_groups)


@triton.jit
def _keep_kernel(
    logits_ptr, ids_ptr, slot_ptr, key_ptr, token_ptr, next_ptr, num_columns, num_groups,
    num_tokens, num_slots, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One token: its best successors, unless a later token takes its slot.

    They are in the groups with the best keys; as many groups as successors are enough.
    """
    t = tl.program_id(0).to(tl.int64)
    take_turns()
    token = tl.load(ids_ptr + t)
    other = tl.arange(0, BLOCK_T)
    is_later = (other > t) & (other < num_tokens)
    is_later &= tl.load(slot_ptr + other, mask=is_later, other=-1) >= 0
    later = tl.load(ids_ptr + other, mask=is_later, other=0)
    is_taken = tl.max((is_later & (later % num_slots == token % num_slots)).to(tl.int32), axis=0)
    if (tl.load(slot_ptr + t) >= 0) & (is_taken == 0):
        offs = tl.arange(0, BLOCK_G)
        key = tl.load(key_ptr + t * num_groups + offs, mask=offs < num_groups, other=NO_KEY)
        place_W = tl.arange(0, BLOCK_W)
        group_W = tl.full((BLOCK_W,), num_groups, tl.int32)  # none: past the last column
        for place in tl.static_range(WIDTH):
            best = tl.max(key, axis=0)
            column = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
            group_W = tl.where((place_W == place) & (best > NO_KEY), column // GROUP, group_W)
            key = tl.where(key == best, NO_KEY, key)
        columns = group_W[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        found = _keys(logits_ptr + t * num_columns, columns, columns < num_columns)
        slot = token % num_slots
        tl.store(token_ptr + slot, token.to(tl.int32))
        for place in tl.static_range(WIDTH):
            best = tl.max(tl.max(found, axis=1), axis=0)
            column = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
            tl.store(next_ptr + slot * WIDTH + place, column)
            found = tl.where(found == best, NO_KEY, found)


def keep(successors: Successors, ids_T: Tensor, slot_T: Tensor, logits_TV: Tensor) -> None:
    """`Successors.keep` of all tokens but padding, which has no slot of the KV cache."""
    num_tokens, num_columns = logits_TV.shape
    width, num_groups = successors.next_SC.shape[1], cdiv(num_columns, GROUP)
    assert logits_TV.is_contiguous()
    assert width <= num_columns < MAX_COLUMNS
    key_TG = torch.empty(num_tokens, num_groups, dtype=torch.int64, device=logits_TV.device)
    _group_kernel[(num_tokens, cdiv(num_groups, GROUPS))](
        logits_TV, slot_T, key_TG, num_columns, num_groups, GROUP=GROUP, GROUPS=GROUPS, **options(4)
    )
    _keep_kernel[(num_tokens,)](
        logits_TV, ids_T, slot_T, key_TG, successors.token_S, successors.next_SC, num_columns,
        num_groups, num_tokens, successors.num_slots, WIDTH=width, BLOCK_W=next_power_of_2(width),
        BLOCK_T=next_power_of_2(num_tokens), BLOCK_G=next_power_of_2(num_groups), GROUP=GROUP,
        **options(4),
    )  # fmt: skip


@triton.jit
def _recycle_kernel(
    ids_ptr, max_draft_ptr, num_checked_ptr, history_ptr, known_ptr, end_ptr, done_ptr,
    num_nodes_ptr, draft_ptr, parents_ptr, result_ptr, token_ptr, next_ptr, rank_ptr, parent_ptr,
    history_stride, draft_stride, result_stride, num_slots, width, num_nodes, DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: every node looks up its own path; those that have one are written without gaps."""
    r, row, is_row = live_row(ids_ptr, num_checked_ptr, done_ptr)
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
        count = tl.minimum(tl.sum(has_path.to(tl.int64), axis=0), tl.load(max_draft_ptr + r))
        result_ptr += r * result_stride
        tl.store(result_ptr + C_MATCHED, 1)
        tl.store(result_ptr + C_DRAFTED, count)
        tl.store(num_nodes_ptr + row, count)


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
