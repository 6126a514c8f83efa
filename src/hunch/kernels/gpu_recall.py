"""Look up what may come next in recent answers of all requests, on the device.

The ring of answers is searched by brute force: programs share out its places, and a place is read
no further back than tokens are equal. A second kernel takes the best of each row.

Shape letters: as in `gpu_step`; K places of the ring, C chunks of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hunch.kernels import step as at
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options
from hunch.kernels.gpu_step import C_MATCHED, live_row, put_chain
from hunch.kernels.lookup import MAX_MATCH
from hunch.kernels.shared_texts import SharedTexts
from hunch.kernels.step import RowState, StepRows

CHUNK = 4096  # places of a program
R_SURE, AS_OTHERS = tl.constexpr(at.SURE), tl.constexpr(at.AS_OTHERS)


@triton.jit
def _asking_row(
    ids_ptr, num_checked_ptr, done_ptr, settings_ptr, settings_stride, HAS_METHODS: tl.constexpr
):
    """`live_row` for rows that draft as the others do."""
    r, row, is_row = live_row(ids_ptr, num_checked_ptr, done_ptr)
    if HAS_METHODS:
        is_row &= tl.load(settings_ptr + row * settings_stride + R_SURE) == AS_OTHERS
    return r, row, is_row


@triton.jit
def _search_kernel(
    ids_ptr, num_checked_ptr, history_ptr, known_ptr, done_ptr, result_ptr, settings_ptr, ring_ptr,
    first_ptr, best_ptr, history_stride, result_stride, settings_stride, size, num_chunks,
    MAX_MATCH: tl.constexpr, HAS_METHODS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row and one chunk of the ring: the longest match, the most recent among equals."""
    c = tl.program_id(1)
    r, row, is_row = _asking_row(
        ids_ptr, num_checked_ptr, done_ptr, settings_ptr, settings_stride, HAS_METHODS
    )
    known = tl.where(is_row, tl.load(known_ptr + row), 0).to(tl.int32)
    own = tl.load(result_ptr + r * result_stride + C_MATCHED).to(tl.int32)
    first = tl.load(first_ptr).to(tl.int32)
    history_ptr += row * history_stride
    place = c * BLOCK + tl.arange(0, BLOCK)  # from the oldest on; the token there follows the match
    at = first + place
    at = tl.where(at >= size, at - size, at)
    is_place = (place >= 1) & (place < size) & is_row
    is_equal = tl.load(ring_ptr + at, mask=is_place, other=-1) >= 0
    matched = tl.zeros((BLOCK,), tl.int32)
    most = tl.minimum(known, MAX_MATCH)
    i = tl.zeros((), tl.int32)
    while (i < most) & (tl.max(is_equal.to(tl.int32), axis=0) > 0):
        at = tl.where(at == 0, size - 1, at - 1)
        token = tl.load(ring_ptr + at, mask=is_equal & (place - 1 - i >= 0), other=-1)
        is_equal &= token == tl.load(history_ptr + known - 1 - i)
        matched += is_equal.to(tl.int32)
        i += 1
    score = tl.where(matched > own, (matched.to(tl.int64) << 32) + place, 0)
    tl.store(best_ptr + r * num_chunks + c, tl.max(score, axis=0))


@triton.jit
def _take_kernel(
    ids_ptr, max_draft_ptr, num_checked_ptr, known_ptr, end_ptr, done_ptr, num_nodes_ptr, draft_ptr,
    parents_ptr, result_ptr, settings_ptr, ring_ptr, first_ptr, best_ptr, draft_stride,
    result_stride, settings_stride, size, num_chunks, num_nodes, guesses_at,
    HAS_METHODS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row: what followed the best match of all chunks, up to the end of that answer."""
    r, row, is_row = _asking_row(
        ids_ptr, num_checked_ptr, done_ptr, settings_ptr, settings_stride, HAS_METHODS
    )
    chunk = tl.arange(0, BLOCK_C)
    best_C = tl.load(best_ptr + r * num_chunks + chunk, mask=chunk < num_chunks, other=0)
    best = tl.max(best_C, axis=0)
    if is_row & (best > 0):
        node = tl.arange(0, BLOCK_N)
        place = (best & 0xFFFFFFFF).to(tl.int32) + node
        at = tl.load(first_ptr).to(tl.int32) + place
        at = tl.where(at >= size, at - size, at)
        is_place = (place < size) & (node < num_nodes)
        tokens = tl.load(ring_ptr + at, mask=is_place, other=-1).to(tl.int64)
        num_guesses = tl.min(tl.where(tokens < 0, node, BLOCK_N), axis=0)
        num_guesses = tl.minimum(num_guesses, num_nodes).to(tl.int64)
        put_chain(
            tokens, node, num_guesses, best >> 32, tl.load(known_ptr + row), r, row, max_draft_ptr,
            end_ptr, num_nodes_ptr, draft_ptr, parents_ptr, result_ptr, draft_stride, result_stride,
            num_nodes, guesses_at,
        )  # fmt: skip


def recall(state: RowState, step: StepRows, num_nodes: int, texts: SharedTexts) -> None:
    """As `shared_texts.recall_ref`, after `gpu_lookup.lookup`."""
    settings = step.ids_R if step.methods is None else step.methods.settings_XW
    has_methods, size = step.methods is not None, len(texts.tokens_K)
    num_rows, num_chunks = len(step.ids_R), cdiv(size, CHUNK)
    best_RC = torch.empty(num_rows, num_chunks, dtype=torch.int64, device=step.ids_R.device)
    _search_kernel[(num_rows, num_chunks)](
        step.ids_R, step.num_checked_R, state.tokens_XL, state.known_X, state.is_done_X,
        step.result_RC, settings, texts.tokens_K, texts.first_1, best_RC, state.tokens_XL.stride(0),
        step.result_RC.stride(0), settings.stride(0), size, num_chunks, MAX_MATCH=MAX_MATCH,
        HAS_METHODS=has_methods, BLOCK=CHUNK, **options(8),
    )  # fmt: skip
    _take_kernel[(num_rows,)](
        step.ids_R, step.max_draft_R, step.num_checked_R, state.known_X, state.end_X,
        state.is_done_X, state.num_nodes_X, state.draft_XG, state.parents_XG, step.result_RC,
        settings, texts.tokens_K, texts.first_1, best_RC, state.draft_XG.stride(0),
        step.result_RC.stride(0), settings.stride(0), size, num_chunks, num_nodes,
        step.guesses_at, HAS_METHODS=has_methods, BLOCK_C=next_power_of_2(num_chunks),
        BLOCK_N=next_power_of_2(num_nodes), **options(4),
    )  # fmt: skip
