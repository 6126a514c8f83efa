"""The likeliest successors of contexts, and trees of them, on the device.

Shape letters: as in `successors`; F nodes of the level above, N nodes of a tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels import successors as at
from hunch.kernels.gpu_filters import MAX_COLUMNS
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options, take_turns
from hunch.kernels.gpu_step import C_DRAFTED, C_MATCHED, live_row
from hunch.kernels.step import RowState, StepRows
from hunch.kernels.successors import Successors

NO_KEY = tl.constexpr(-(2**63))
CERTAIN, MULTIPLIER = tl.constexpr(at.CERTAIN), tl.constexpr(at.MULTIPLIER)
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
    logits_ptr, ids_ptr, slot_ptr, key_ptr, after_ptr, chance_ptr, num_columns, num_groups,
    num_tokens, NUM_BEST: tl.constexpr, WIDTH: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One token: its best successors, unless the same token comes again.

    They are in the groups with the best keys; as many groups as successors are enough.
    """
    t = tl.program_id(0).to(tl.int64)
    take_turns()
    token = tl.load(ids_ptr + t)
    other = tl.arange(0, BLOCK_T)
    is_later = (other > t) & (other < num_tokens)
    is_later &= tl.load(slot_ptr + other, mask=is_later, other=-1) >= 0
    later = tl.load(ids_ptr + other, mask=is_later, other=0)
    is_taken = tl.max((is_later & (later == token)).to(tl.int32), axis=0)
    if (tl.load(slot_ptr + t) >= 0) & (is_taken == 0):
        offs = tl.arange(0, BLOCK_G)
        key = tl.load(key_ptr + t * num_groups + offs, mask=offs < num_groups, other=NO_KEY)
        place_W = tl.arange(0, WIDTH)
        group_W = tl.full((WIDTH,), num_groups, tl.int32)  # none: past the last column
        for place in tl.static_range(NUM_BEST):
            best = tl.max(key, axis=0)
            column = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
            group_W = tl.where((place_W == place) & (best > NO_KEY), column // GROUP, group_W)
            key = tl.where(key == best, NO_KEY, key)
        columns = group_W[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        found = _keys(logits_ptr + t * num_columns, columns, columns < num_columns)
        successor_W = tl.zeros((WIDTH,), tl.int32)
        for place in tl.static_range(NUM_BEST):
            best = tl.max(tl.max(found, axis=1), axis=0)
            column = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
            packed = column * 256 + tl.load(chance_ptr + place)
            successor_W = tl.where(place_W == place, packed, successor_W)
            found = tl.where(found == best, NO_KEY, found)
        tl.store(after_ptr + token * WIDTH + place_W, successor_W)


def keep(successors: Successors, ids_T: Tensor, slot_T: Tensor, logits_TV: Tensor) -> None:
    """`Successors.keep` of all tokens but padding, which has no slot of the KV cache."""
    num_tokens, num_columns = logits_TV.shape
    num_groups = cdiv(num_columns, GROUP)
    assert logits_TV.is_contiguous()
    assert successors.num_best <= num_columns < MAX_COLUMNS
    key_TG = torch.empty(num_tokens, num_groups, dtype=torch.int64, device=logits_TV.device)
    _group_kernel[(num_tokens, cdiv(num_groups, GROUPS))](
        logits_TV, slot_T, key_TG, num_columns, num_groups, GROUP=GROUP, GROUPS=GROUPS, **options(4)
    )
    _keep_kernel[(num_tokens,)](
        logits_TV, ids_T, slot_T, key_TG, successors.after_token_VW, successors.chance_W,
        num_columns, num_groups, num_tokens, NUM_BEST=successors.num_best, WIDTH=at.WIDTH,
        BLOCK_T=next_power_of_2(num_tokens), BLOCK_G=next_power_of_2(num_groups), GROUP=GROUP,
        **options(4),
    )  # fmt: skip


@triton.jit
def _candidates(
    before_F, last_F, chance_F, pair_ptr, after_pair_ptr, after_token_ptr, num_slots, SCALE,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """What may follow each node: tokens, and the chances of the paths to them.

    The first WIDTH candidates of a node are the pair's successors, the others those of its token.
    """
    c = tl.arange(0, 2 * WIDTH)
    of_pair_C, of_token_C = (c < WIDTH)[None, :], (c >= WIDTH)[None, :]
    is_node_F = chance_F > 0
    pair_F = (before_F << 32) | last_F
    slot_F = ((pair_F * MULTIPLIER) >> 32) & (num_slots - 1)
    held_F = tl.load(pair_ptr + slot_F, mask=is_node_F, other=-1)
    is_held_F = is_node_F & (before_F >= 0) & (held_F == pair_F)
    at_FC = slot_F[:, None] * WIDTH + c[None, :]
    packed_FC = tl.load(after_pair_ptr + at_FC, mask=is_held_F[:, None] & of_pair_C, other=0)
    at_FC = last_F[:, None] * WIDTH + c[None, :] - WIDTH
    packed_FC |= tl.load(after_token_ptr + at_FC, mask=is_node_F[:, None] & of_token_C, other=0)
    share_FC, token_FC = packed_FC & 255, packed_FC >> 8
    by_pair_FC = tl.where(of_pair_C & (share_FC > 0), token_FC, -1)
    is_same_FCC = token_FC[:, :, None] == by_pair_FC[:, None, :]
    is_twice_FC = (tl.max(is_same_FCC.to(tl.int32), axis=2) > 0) & of_token_C
    left_F = CERTAIN - tl.sum(tl.where(of_pair_C, share_FC, 0), axis=1)
    share_FC = share_FC * tl.where(of_pair_C, CERTAIN, left_F[:, None])
    share_FC = tl.where(is_twice_FC, 0, share_FC)
    return token_FC, chance_F[:, None] * (share_FC.to(tl.float32) * SCALE)


@triton.jit
def _by_chance(chance_N, parent_N, n):
    """Where each node goes if the likeliest come first, and where its parent is then."""
    is_before_NN = (chance_N[None, :] > chance_N[:, None]) | (
        (chance_N[None, :] == chance_N[:, None]) & (n[None, :] < n[:, None])
    )
    place_N = tl.sum(is_before_NN.to(tl.int32), axis=1)
    is_parent_NN = parent_N[:, None] == n[None, :]
    above_N = tl.sum(tl.where(is_parent_NN, place_N[None, :], 0), axis=1)
    return place_N, tl.where(parent_N < 0, -1, above_N)


@triton.jit
def _tree_kernel(
    ids_ptr, max_draft_ptr, num_checked_ptr, history_ptr, known_ptr, end_ptr, done_ptr,
    num_nodes_ptr, draft_ptr, parents_ptr, result_ptr, pair_ptr, after_pair_ptr, after_token_ptr,
    width_ptr, history_stride, draft_stride, result_stride, num_slots, num_levels, SCALE,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: level by level, the likeliest candidates one after the other."""
    r, row, is_row = live_row(ids_ptr, num_checked_ptr, done_ptr)
    if is_row:
        known = tl.load(known_ptr + row)
        left = tl.load(end_ptr + row) - known - 1  # levels that can still be committed
        at_end = history_ptr + row * history_stride + known
        f, n = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
        flat_FC = f[:, None] * (2 * WIDTH) + tl.arange(0, 2 * WIDTH)[None, :]
        last_F = tl.zeros((WIDTH,), tl.int64) + tl.load(at_end - 1)
        before_F = tl.zeros((WIDTH,), tl.int64) + tl.load(at_end - 2, mask=known > 1, other=-1)
        chance_F, number_F = tl.where(f == 0, 1.0, 0.0), tl.full((WIDTH,), -1, tl.int32)
        token_N, chance_N = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.float32)
        parent_N, count = tl.full((BLOCK,), -1, tl.int32), tl.full((), 0, tl.int32)
        for level in range(tl.minimum(num_levels, left).to(tl.int32)):
            token_FC, path_FC = _candidates(
                before_F, last_F, chance_F, pair_ptr, after_pair_ptr, after_token_ptr, num_slots,
                SCALE, WIDTH,
            )  # fmt: skip
            above_F, above_number_F = last_F, number_F
            chance_F = tl.zeros((WIDTH,), tl.float32)
            for place in range(tl.load(width_ptr + level)):
                best = tl.max(tl.max(path_FC, axis=1), axis=0)
                if best > 0:
                    chosen = tl.where(path_FC == best, flat_FC, 2 * WIDTH * WIDTH)
                    chosen = tl.min(tl.min(chosen, axis=1), axis=0)
                    is_it_FC, is_above_F = flat_FC == chosen, f == chosen // (2 * WIDTH)
                    token = tl.sum(tl.sum(tl.where(is_it_FC, token_FC, 0), axis=1), axis=0)
                    parent = tl.sum(tl.where(is_above_F, above_number_F, 0), axis=0)
                    above = tl.sum(tl.where(is_above_F, above_F, 0), axis=0)
                    last_F = tl.where(f == place, token.to(tl.int64), last_F)
                    before_F = tl.where(f == place, above, before_F)
                    chance_F = tl.where(f == place, best, chance_F)
                    number_F = tl.where(f == place, count, number_F)
                    token_N = tl.where(n == count, token.to(tl.int64), token_N)
                    parent_N = tl.where(n == count, parent, parent_N)
                    chance_N = tl.where(n == count, best, chance_N)
                    path_FC = tl.where(is_it_FC, 0.0, path_FC)
                    count += 1
        place_N, above_N = _by_chance(chance_N, parent_N, n)
        to = row * draft_stride + place_N
        tl.store(draft_ptr + to, token_N, mask=n < count)
        tl.store(parents_ptr + to, above_N.to(tl.int64), mask=n < count)
        count = tl.minimum(count.to(tl.int64), tl.load(max_draft_ptr + r))
        result_ptr += r * result_stride
        tl.store(result_ptr + C_MATCHED, 1)
        tl.store(result_ptr + C_DRAFTED, count)
        tl.store(num_nodes_ptr + row, count)


def successor_tree(
    state: RowState, step: StepRows, successors: Successors, width_L: Tensor, num_nodes: int
) -> None:
    """Draft a tree of successors for each row; num_nodes: the sum of the widths."""
    _tree_kernel[(len(step.ids_R),)](
        step.ids_R, step.max_draft_R, step.num_checked_R, state.tokens_XL, state.known_X,
        state.end_X, state.is_done_X, state.num_nodes_X, state.draft_XG, state.parents_XG,
        step.result_RC, successors.pair_S, successors.after_pair_SW, successors.after_token_VW,
        width_L, state.tokens_XL.stride(0), state.draft_XG.stride(0), step.result_RC.stride(0),
        len(successors.pair_S), len(width_L), at.SCALE, WIDTH=at.WIDTH,
        BLOCK=next_power_of_2(num_nodes), **options(1),
    )  # fmt: skip
