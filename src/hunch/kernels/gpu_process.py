"""Applies rules to logits on a GPU, in one pass and without the host; see `process`.

Shape letters: as in `process`; a program takes one chunk of a row of logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels import process as plain
from hunch.kernels.gpu_launch import cdiv, next_power_of_2, options, take_turns, warp_block
from hunch.kernels.process import ProcessTables

CHUNK = 4096

PENALTIES = tl.constexpr(plain.PENALTIES)
BANS = tl.constexpr(plain.BANS)
MIN_TOKENS = tl.constexpr(plain.MIN_TOKENS)
BIAS = tl.constexpr(plain.BIAS)
BAD_WORDS = tl.constexpr(plain.BAD_WORDS)
IN_PROMPT = tl.constexpr(plain.IN_PROMPT)
IS_BANNED = tl.constexpr(plain.IS_BANNED)
IS_STOP = tl.constexpr(plain.IS_STOP)
ANY = tl.constexpr(plain.ANY)


@triton.jit
def _penalised(x, ids, is_in, flags, m, row, path_ptr, counts_ptr, penalties_ptr, vocab_size,
               max_path):  # fmt: skip
    count = tl.load(counts_ptr + row * vocab_size + ids, mask=is_in, other=0)
    for i in range(max_path):
        count += (ids == tl.load(path_ptr + m * max_path + i)).to(tl.int32)
    repetition = tl.load(penalties_ptr + row * 3)
    frequency = tl.load(penalties_ptr + row * 3 + 1)
    presence = tl.load(penalties_ptr + row * 3 + 2)
    is_known = ((flags & IN_PROMPT) > 0) | (count > 0)
    repeated = tl.where(x > 0, tl.div_rn(x, repetition + tl.zeros_like(x)), x * repetition)
    x = tl.where(is_known, repeated, x)
    return tl.where(count > 0, x - frequency * count.to(tl.float32) - presence, x)


@triton.jit
def _ruled(
    x, ids, is_in, m, row, rules, pos_ptr, path_ptr, min_pos_ptr, penalties_ptr, counts_ptr,
    bias_ptr, flags_ptr, vocab_size, max_path,
):  # fmt: skip
    """A chunk after all rules of its row but bad words."""
    flags = tl.zeros_like(ids).to(tl.uint8)
    if (rules & (BANS | MIN_TOKENS | PENALTIES)) > 0:
        flags = tl.load(flags_ptr + row * vocab_size + ids, mask=is_in, other=0)
    if (rules & BANS) > 0:
        x = tl.where((flags & IS_BANNED) > 0, float("-inf"), x)
    if (rules & MIN_TOKENS) > 0:
        is_early = tl.load(pos_ptr + m) < tl.load(min_pos_ptr + row)
        x = tl.where(((flags & IS_STOP) > 0) & is_early, float("-inf"), x)
    if (rules & BIAS) > 0:
        bias = tl.load(bias_ptr + row * vocab_size + ids, mask=is_in, other=0.0)
        x = tl.where(bias != 0, x + bias, x)
    if (rules & PENALTIES) > 0:
        x = _penalised(x, ids, is_in, flags, m, row, path_ptr, counts_ptr, penalties_ptr,
                       vocab_size, max_path)  # fmt: skip
    return x


@triton.jit
def _remove_word_ends(
    out_ptr, columns, ids, is_in, m, row, path_ptr, words_ptr, max_path,
    HAS_IDS: tl.constexpr, NUM_WORDS: tl.constexpr, NUM_PREFIX: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """-inf for the tokens of the chunk that would end a bad word; out_ptr is the row's."""
    width: tl.constexpr = NUM_WORDS * NUM_PREFIX + NUM_WORDS + NUM_PREFIX
    words_ptr += row * width
    word = tl.arange(0, BLOCK_W)
    is_word = word < NUM_WORDS
    last = tl.load(words_ptr + NUM_WORDS * NUM_PREFIX + word, mask=is_word, other=-1)
    is_match = is_word & (last >= 0)  # -1: there is no word
    if not HAS_IDS:
        is_match &= (last >= tl.min(columns, axis=0)) & (last <= tl.max(columns, axis=0))
    if tl.max(is_match.to(tl.int32), axis=0) > 0:
        tail_ptr = words_ptr + NUM_WORDS * NUM_PREFIX + NUM_WORDS
        node = tl.arange(0, BLOCK_P)
        path_ptr += m * max_path
        path = tl.load(path_ptr + node, mask=node < max_path, other=-1)
        depth = tl.sum((path >= 0).to(tl.int32), axis=0)
        for place in range(NUM_PREFIX):
            at = depth + place  # index in the tail, then in the path
            token = tl.load(tail_ptr + at, mask=at < NUM_PREFIX, other=0).to(tl.int64)
            token += tl.load(path_ptr + at - NUM_PREFIX, mask=at >= NUM_PREFIX, other=0)
            prefix = tl.load(words_ptr + word * NUM_PREFIX + place, mask=is_match, other=0)
            is_match &= (prefix == token) | (prefix == ANY)
        if HAS_IDS:
            last = tl.where(is_match, last, -1)
            for number in range(NUM_WORDS):
                token = tl.max(tl.where(word == number, last, -1), axis=0)
                if token >= 0:
                    tl.store(out_ptr + columns, float("-inf"), mask=is_in & (ids == token))
        else:
            tl.store(out_ptr + last, float("-inf"), mask=is_match)


@triton.jit
def _bits(mask_ptr, chunk, num_words, CHUNK: tl.constexpr):
    """A chunk's bits of a mask, which may be in the host's memory: each word is read once."""
    word = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
    words = tl.load(mask_ptr + word, mask=word < num_words, other=0)
    return tl.reshape((words[:, None] >> tl.arange(0, 32)[None, :]) & 1, (CHUNK,))


@triton.jit(do_not_specialize=["max_path"])
def _process_kernel(
    logits_ptr, row_ptr, pos_ptr, path_ptr, mask_ptr, is_masked_ptr, rules_ptr, min_pos_ptr,
    penalties_ptr, counts_ptr, bias_ptr, flags_ptr, words_ptr, ids_ptr, out_ptr, num_columns,
    vocab_size, max_path, mask_stride, HAS_MASK: tl.constexpr, HAS_IDS: tl.constexpr,
    IN_PLACE: tl.constexpr, NUM_WORDS: tl.constexpr, NUM_PREFIX: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk of a row of logits; a chunk without rules is copied, or left as it is."""
    m, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    take_turns()
    row = tl.load(row_ptr + m)
    rules = tl.load(rules_ptr + row, mask=row >= 0, other=0)
    is_masked = tl.zeros((), tl.int32)
    if HAS_MASK:
        is_masked = tl.load(is_masked_ptr + m).to(tl.int32)
    is_ruled = (rules != 0) | (is_masked != 0)
    if is_ruled | (not IN_PLACE):
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        is_in = columns < num_columns
        ids = columns
        if HAS_IDS:
            ids = tl.load(ids_ptr + columns, mask=is_in, other=0).to(tl.int32)
        logits_ptr += m * num_columns
        out_ptr += m * num_columns
        x = tl.load(logits_ptr + columns, mask=is_in, other=0.0).to(tl.float32)
        if HAS_MASK:  # noqa: SIM102 - known when compiled, unlike what follows
            if is_masked != 0:
                bits = _bits(mask_ptr + m * mask_stride, chunk, mask_stride, CHUNK)
                x = tl.where(bits > 0, x, float("-inf"))
        if rules != 0:
            x = _ruled(x, ids, is_in, m, row, rules, pos_ptr, path_ptr, min_pos_ptr,
                       penalties_ptr, counts_ptr, bias_ptr, flags_ptr, vocab_size,
                       max_path)  # fmt: skip
        tl.store(out_ptr + columns, x, mask=is_in)
        if (rules & BAD_WORDS) > 0:
            tl.debug_barrier()  # other threads may have written the tokens that are removed
            _remove_word_ends(out_ptr, columns, ids, is_in, m, row, path_ptr, words_ptr, max_path,
                              HAS_IDS, NUM_WORDS, NUM_PREFIX, BLOCK_W, BLOCK_P)  # fmt: skip


def process(
    logits_MV: Tensor, row_M: Tensor, pos_M: Tensor, path_MP: Tensor, tables: ProcessTables,
    mask_MB: Tensor | None = None, is_masked_M: Tensor | None = None, out_MV: Tensor | None = None,
    ids_C: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`process_ref` into out_MV, which may be the logits themselves."""
    num_rows, num_columns = logits_MV.shape
    assert logits_MV.is_contiguous()
    assert path_MP.is_contiguous()
    vocab_size = tables.counts_XV.shape[1]
    assert num_columns == (vocab_size if ids_C is None else len(ids_C))
    assert (mask_MB is None) == (is_masked_M is None)
    assert mask_MB is None or ids_C is None
    if out_MV is None:
        out_MV = torch.empty_like(logits_MV, dtype=torch.float32)
    has_mask = mask_MB is not None
    if is_masked_M is not None and is_masked_M.dtype == torch.bool:
        is_masked_M = is_masked_M.view(torch.uint8)
    _process_kernel[(num_rows, cdiv(num_columns, CHUNK))](
        logits_MV, row_M, pos_M, path_MP, mask_MB if has_mask else row_M,
        is_masked_M if has_mask else row_M, tables.rules_X, tables.min_pos_X, tables.penalties_X3,
        tables.counts_XV, tables.bias_XV, tables.flags_XV, tables.words_XN,
        row_M if ids_C is None else ids_C, out_MV, num_columns, vocab_size, path_MP.shape[1],
        mask_MB.stride(0) if has_mask else 0, HAS_MASK=has_mask, HAS_IDS=ids_C is not None,
        IN_PLACE=out_MV.data_ptr() == logits_MV.data_ptr(), NUM_WORDS=tables.num_words,
        NUM_PREFIX=tables.num_prefix, BLOCK_W=next_power_of_2(tables.num_words),
        BLOCK_P=warp_block(path_MP.shape[1]), CHUNK=CHUNK, **options(8),
    )  # fmt: skip
    return out_MV


# --- paths of drafted nodes -----------------------------------------------------------------------


@triton.jit(do_not_specialize=["first_node", "max_path", "width"])
def _paths_kernel(
    rows_ptr, count_ptr, draft_ptr, parents_ptr, path_ptr, first_node, max_path, width,
    draft_stride, BLOCK_W: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """One row: from every node up to the root, twice: to find its depth, then its tokens."""
    r = tl.program_id(0).to(tl.int64)
    take_turns()
    row, count = tl.load(rows_ptr + r), tl.load(count_ptr + r)
    draft_ptr += row * draft_stride
    parents_ptr += row * draft_stride
    place = tl.arange(0, BLOCK_W)
    is_place = place < width
    last = (first_node + place).to(tl.int64)
    last = tl.where(is_place & (row >= 0) & (last < count), last, -1)
    depth = tl.zeros((BLOCK_W,), tl.int32)
    node = last
    for _ in range(max_path):
        depth += (node >= 0).to(tl.int32)
        node = tl.load(parents_ptr + node, mask=node >= 0, other=-1)
    path_ptr += (r * width + place) * max_path
    step = tl.arange(0, BLOCK_P)
    is_after = is_place[:, None] & (step[None, :] >= depth[:, None]) & (step[None, :] < max_path)
    nothing = tl.full((BLOCK_W, BLOCK_P), -1, tl.int64)
    tl.store(path_ptr[:, None] + step[None, :], nothing, mask=is_after)
    node = last
    for i in range(max_path):
        token = tl.load(draft_ptr + node, mask=node >= 0, other=-1)
        tl.store(path_ptr + depth - 1 - i, token, mask=node >= 0)
        node = tl.load(parents_ptr + node, mask=node >= 0, other=-1)


def draft_paths(
    ids_R: Tensor, count_R: Tensor, draft_XG: Tensor, parents_XG: Tensor, first_node: int,
    path_MP: Tensor,
) -> None:  # fmt: skip
    """`draft_paths_ref`; no node may be deeper than path_MP is wide."""
    num_rows = len(ids_R)
    width, max_path = len(path_MP) // num_rows, path_MP.shape[1]
    assert path_MP.is_contiguous()
    assert draft_XG.stride() == parents_XG.stride()
    if max_path:
        _paths_kernel[(num_rows,)](
            ids_R, count_R, draft_XG, parents_XG, path_MP, first_node, max_path, width,
            draft_XG.stride(0), BLOCK_W=warp_block(width), BLOCK_P=warp_block(max_path),
            **options(1),
        )  # fmt: skip


def process_level(
    logits_TC: Tensor, row_T: Tensor, ids_R: Tensor, known_X: Tensor, draft_XG: Tensor,
    parents_XG: Tensor, depth: int, width: int, tables: ProcessTables,
    ids_C: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Apply the rows' rules to a drafter's logits, so that it guesses what the target will choose.

    The logits are those after the first nodes of the level before `depth`, where all levels have
    one width; at depth 0 those after the rows' known tokens.
    """
    path_TP = ids_R.new_empty(len(logits_TC), depth)
    count_R = ids_R.new_full((len(ids_R),), depth * width)
    first_node = (depth - 1) * width if depth else -1
    draft_paths(ids_R, count_R, draft_XG, parents_XG, first_node, path_TP)
    pos_T = known_X[row_T] + depth
    return process(logits_TC, row_T.contiguous(), pos_T, path_TP, tables, ids_C=ids_C)


# --- what was committed ---------------------------------------------------------------------------


@triton.jit(do_not_specialize=["num_tokens"])
def _count_kernel(
    row_ptr, tokens_ptr, num_ptr, rules_ptr, counts_ptr, words_ptr, num_columns, num_tokens,
    tokens_stride, num_stride, words_stride, NUM_PREFIX: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """One row of the step: add its tokens to its counts and its tail."""
    r = tl.program_id(0).to(tl.int64)
    take_turns()
    row = tl.load(row_ptr + r)
    rules = tl.load(rules_ptr + row, mask=row >= 0, other=0)
    num = tl.load(num_ptr + r * num_stride)
    tokens_ptr += r * tokens_stride
    if ((rules & PENALTIES) > 0) & (num > 0):
        place = tl.arange(0, BLOCK_K)
        is_new = (place < num) & (place < num_tokens)
        token = tl.load(tokens_ptr + place, mask=is_new, other=0)
        tl.atomic_add(counts_ptr + row * num_columns + token, (place * 0 + 1).to(tl.int32),
                      mask=is_new, sem="relaxed")  # fmt: skip
    if ((rules & BAD_WORDS) > 0) & (num > 0):
        words_ptr += row * words_stride + words_stride - NUM_PREFIX
        place = tl.arange(0, BLOCK_H)
        is_place = place < NUM_PREFIX
        at = place + num
        is_old = at < NUM_PREFIX
        old = tl.load(words_ptr + at, mask=is_place & is_old, other=0)
        new = tl.load(tokens_ptr + at - NUM_PREFIX, mask=is_place & ~is_old, other=0)
        tl.debug_barrier()  # all of the old tail is read before any of it is written
        tl.store(words_ptr + place, tl.where(is_old, old, new.to(tl.int32)), mask=is_place)


def count_committed(
    tables: ProcessTables, row_R: Tensor, tokens_RK: Tensor, num_tokens_R: Tensor
) -> None:
    """`count_committed_ref`; tokens and their numbers may be views of a step's result lines."""
    num_rows, num_tokens = tokens_RK.shape
    assert tokens_RK.stride(1) == 1
    assert row_R.is_contiguous()
    _count_kernel[(num_rows,)](
        row_R, tokens_RK, num_tokens_R, tables.rules_X, tables.counts_XV, tables.words_XN,
        tables.counts_XV.shape[1], num_tokens, tokens_RK.stride(0), num_tokens_R.stride(0),
        tables.words_XN.stride(0), NUM_PREFIX=tables.num_prefix,
        BLOCK_K=warp_block(num_tokens), BLOCK_H=next_power_of_2(tables.num_prefix),
        **options(1),
    )  # fmt: skip
