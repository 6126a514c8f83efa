"""What a draft model needs between its passes on a device: inputs of a level, and new nodes.

Shape letters: R rows of the step, W tokens of a row in one pass, T packed tokens (R times W), X
rows of the engine, G nodes a draft can have, P tree depth.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels.attention import AttnInputs
from hunch.kernels.gpu_launch import let_next_start, next_power_of_2, options, wait_for_inputs
from hunch.kernels.gpu_spec import Cells, StepRows


@triton.jit
def _level_kernel(
    ids_ptr, room_ptr, count_in_ptr, history_ptr, known_ptr, end_ptr, done_ptr, table_ptr,
    draft_ptr, parents_ptr, packed_ptr, pos_ptr, slot_ptr, seq_ptr, base_ptr, tree_ptr,
    first_node, depth, max_depth, history_stride, table_stride, draft_stride, width,
    IS_KNOWN: tl.constexpr, IS_TREE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its last `width` known tokens, or the nodes of one level."""
    r = tl.program_id(0).to(tl.int64)
    let_next_start()
    wait_for_inputs()
    row = tl.maximum(tl.load(ids_ptr + r), 0)
    is_row = (tl.load(count_in_ptr + r) >= 0) & (tl.load(done_ptr + row) == 0)
    known = tl.load(known_ptr + row)
    place = tl.arange(0, BLOCK).to(tl.int64)
    is_in = place < width
    at = r * width + place
    history_ptr += row * history_stride
    table_ptr += row * table_stride
    if IS_KNOWN:
        where = known - width + place
        is_live = is_row & is_in & (where >= 0)
        token = tl.load(history_ptr + where, mask=is_live, other=0)
        pos = where
        tl.store(base_ptr + at, where + 1, mask=is_in)
    else:
        node = first_node + place
        where = known + node  # a node's keys stand after the known tokens, in order of nodes
        room = tl.minimum(tl.load(room_ptr + r), tl.load(end_ptr + row) - known)
        is_live = is_row & is_in & (node < room)
        token = tl.load(draft_ptr + row * draft_stride + node, mask=is_live, other=0)
        pos = known + depth - 1 + place * 0
        tl.store(base_ptr + at, known + place * 0 if IS_TREE else pos + 1, mask=is_in)
        if IS_TREE:
            up = tl.where(is_live, node, -1)
            for i in range(depth):
                is_up = up >= 0
                p = known + up
                block = tl.load(table_ptr + p // BLOCK_SIZE, mask=is_up, other=0)
                tl.store(tree_ptr + at * max_depth + depth - 1 - i,
                         block * BLOCK_SIZE + p % BLOCK_SIZE, mask=is_up)  # fmt: skip
                up = tl.load(parents_ptr + row * draft_stride + up, mask=is_up, other=-1)
    block = tl.load(table_ptr + where // BLOCK_SIZE, mask=is_live, other=0)
    slot = tl.where(is_live, block * BLOCK_SIZE + where % BLOCK_SIZE, -1)
    tl.store(packed_ptr + at, token, mask=is_in)
    tl.store(pos_ptr + at, tl.where(is_live, pos, 0), mask=is_in)
    tl.store(slot_ptr + at, slot, mask=is_in)
    tl.store(seq_ptr + at, row + place * 0, mask=is_in)


def level_inputs(
    cells: Cells, step: StepRows, ids_T: Tensor, attn: AttnInputs, *, first_node: int = 0,
    depth: int = 0,
) -> None:  # fmt: skip
    """Inputs of a pass over W tokens per row: the last known ones (depth 0), or the level's nodes.

    A node at depth d (the first is 1) has position known + d - 1; its KV goes to the slot after
    the known tokens that is its number. Nodes past a row's room are padding.
    """
    tree_TP, width = attn.tree_TP, len(ids_T) // len(step.ids_R)
    _level_kernel[(len(step.ids_R),)](
        step.ids_R, step.room_R, step.count_R, cells.tokens_XL, cells.known_X, cells.end_X,
        cells.is_done_X, cells.table_XB, cells.draft_XG, cells.parents_XG, ids_T, attn.pos_T,
        attn.slot_T, attn.seq_T, attn.base_T, ids_T if tree_TP is None else tree_TP, first_node,
        depth, 0 if tree_TP is None else tree_TP.shape[1], cells.tokens_XL.stride(0),
        cells.table_XB.stride(0), cells.draft_XG.stride(0), width, IS_KNOWN=depth == 0,
        IS_TREE=tree_TP is not None, BLOCK_SIZE=attn.block_size, BLOCK=next_power_of_2(width),
        **options(1),
    )  # fmt: skip


@triton.jit
def _nodes_kernel(
    ids_ptr, room_ptr, count_in_ptr, known_ptr, end_ptr, done_ptr, count_ptr, draft_ptr,
    parents_ptr, token_ptr, parent_ptr, result_ptr, first_node, draft_stride, result_stride, width,
    guesses_at, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: `width` new nodes after the first ones, as far as there is room."""
    r = tl.program_id(0).to(tl.int64)
    let_next_start()
    wait_for_inputs()
    row = tl.maximum(tl.load(ids_ptr + r), 0)
    is_row = (tl.load(count_in_ptr + r) >= 0) & (tl.load(done_ptr + row) == 0)
    place = tl.arange(0, BLOCK).to(tl.int64)
    is_in = place < width
    token = tl.load(token_ptr + r * width + place, mask=is_in, other=0)
    parent = tl.load(parent_ptr + r * width + place, mask=is_in, other=-1)
    at = row * draft_stride + first_node + place
    left = tl.maximum(tl.load(end_ptr + row) - tl.load(known_ptr + row) - 1, 0)
    count = tl.minimum(tl.minimum(tl.load(room_ptr + r), left), first_node + width)
    result_ptr += r * result_stride
    if is_row:
        tl.store(draft_ptr + at, token, mask=is_in)
        tl.store(parents_ptr + at, parent, mask=is_in)
        tl.store(count_ptr + row, count)
        tl.store(result_ptr + guesses_at + first_node + place, token, mask=is_in)
        tl.store(result_ptr + 3, tl.full((), 1, tl.int64))
        tl.store(result_ptr + 4, count)


def add_nodes(
    cells: Cells, step: StepRows, token_T: Tensor, parent_T: Tensor, first_node: int, num_nodes: int
) -> None:  # fmt: skip
    """W tokens per row become nodes, children of the nodes parent_T names (-1: the root)."""
    width = len(token_T) // len(step.ids_R)
    _nodes_kernel[(len(step.ids_R),)](
        step.ids_R, step.room_R, step.count_R, cells.known_X, cells.end_X, cells.is_done_X,
        cells.count_X, cells.draft_XG, cells.parents_XG, token_T, parent_T, step.result_RC,
        first_node, cells.draft_XG.stride(0), step.result_RC.stride(0), width,
        step.result_RC.shape[1] - num_nodes, BLOCK=next_power_of_2(width), **options(1),
    )  # fmt: skip
