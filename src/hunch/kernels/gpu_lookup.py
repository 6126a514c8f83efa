"""Look up what may come next on the device: in a row's own text, and in a phrase table.

The row's text is searched by brute force for the longest earlier match of its end. If the table is
right more often, it guesses the next token instead, and all that follow. A table comes
with several log-odds; those by match, by level and of one against the other are used here. The
others, in `kernels.guided`, gain less than half a percent of the tokens.

Shape letters: as in `gpu_step`; E entries, O orders of a context, W places of a bucket.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from hunch.kernels import step as at
from hunch.kernels.gpu_launch import next_power_of_2, options
from hunch.kernels.gpu_step import C_DRAFTED, C_MATCHED, live_row
from hunch.kernels.lookup import BY_TABLE, LENGTHS, NUM_ASKED
from hunch.kernels.phrases import MULTIPLIER, NUM_LEVELS, SHIFT, ContinuedChain, PhraseTable
from hunch.kernels.step import RowState, StepRows

NUM_PLACES = 8  # entries of a bucket, read at once
MORE_BITS = 5  # of a hash, beyond what full buckets would need
MAX_ORDER = 5  # tokens of the longest context that is looked up
EMPTY = -1
ROOM_BITS = 16  # of a hash, where a table may grow while it is in use: half a million entries

R_SURE, R_MIN_MATCH = tl.constexpr(at.SURE), tl.constexpr(at.MIN_MATCH)
R_MAX_MATCH, R_HAS_TABLE = tl.constexpr(at.MAX_MATCH), tl.constexpr(at.HAS_TABLE)
AS_OTHERS = tl.constexpr(at.AS_OTHERS)


@dataclass(slots=True)
class DevicePhrases:
    """A phrase table where kernels find an entry by one read."""

    table: PhraseTable | None  # None: there is none yet
    entries: Tensor  # by bucket and place: hash, level, token in one number
    needed: Tensor  # lowest level at which the table is used, by length of the text's own match
    bits: int  # of a hash, that name its bucket
    is_growing: bool = False  # it is replaced while captured steps use it

    @property
    def max_order(self) -> int:
        """Tokens of the longest context that is looked up."""
        if self.is_growing or self.table is None:
            return MAX_ORDER
        return min(MAX_ORDER, self.table.max_order)

    @staticmethod
    def of(table: PhraseTable, device: torch.device | str) -> DevicePhrases:
        entries, bits = _buckets(table)
        needed = torch.tensor(needed_levels(table), dtype=torch.int64, device=device)
        return DevicePhrases(table, torch.from_numpy(entries).to(device), needed, bits)

    @staticmethod
    def with_room(table: PhraseTable | None, device: torch.device | str) -> DevicePhrases:
        """A table that can be replaced while captured steps use it; at first `table`, or none."""
        entries = torch.full(((1 << ROOM_BITS) * NUM_PLACES,), EMPTY, device=device)
        needed = torch.zeros(len(LENGTHS), dtype=torch.int64, device=device)
        made = DevicePhrases(None, entries, needed, ROOM_BITS, is_growing=True)
        if table is not None:
            made.take(table)
        return made

    def take(self, table: PhraseTable) -> None:
        """Replace the table; entries that do not fit are left out, the last ones first."""
        self.table, (entries, _) = table, _buckets(table, self.bits)
        self.entries.copy_(torch.from_numpy(entries))
        self.needed.copy_(torch.tensor(needed_levels(table)))


def needed_levels(table: PhraseTable) -> list[int]:
    """By length of the match: the lowest level at which the table is right more often."""
    levels = [0]
    for guess_type in LENGTHS[1:]:  # of a match in one place
        is_worse = table.level_odds + table.versus_odds[guess_type] <= table.own_odds[guess_type]
        levels.append(int(np.flatnonzero(is_worse).max(initial=-1)) + 1)
    return levels


def _buckets(table: PhraseTable, bits: int | None = None) -> tuple[np.ndarray, int]:
    """Entries by the first bits of their hashes, with enough buckets to hold them all, or as many
    as this number of bits gives.

    If a bucket is full, further entries are left out.
    """
    hash_E, at_E = np.unique(table.hash_E.astype(np.int64), return_index=True)
    entry_E = (table.level_E[at_E].astype(np.int64) << 24) | table.token_E[at_E]
    least = max(len(hash_E) // NUM_PLACES, 1).bit_length() - 1
    tried = range(least, least + MORE_BITS + 1) if bits is None else (bits,)
    for bits in tried:
        bucket_E = hash_E >> (32 - bits)
        place_E = np.arange(len(hash_E)) - np.searchsorted(bucket_E, bucket_E)
        if place_E.max(initial=0) < NUM_PLACES:
            break
    is_in_E = place_E < NUM_PLACES
    entries = np.full((1 << bits) * NUM_PLACES, EMPTY, dtype=np.int64)
    entries[(bucket_E * NUM_PLACES + place_E)[is_in_E]] = ((hash_E << 32) | entry_E)[is_in_E]
    return entries, bits


@triton.jit
def _mixed(state, token, MULTIPLIER: tl.constexpr, SHIFT: tl.constexpr):
    """A context's hash, one token further back."""
    state = (state ^ (token + 1).to(tl.uint64)) * MULTIPLIER
    return state ^ (state >> SHIFT)


@triton.jit
def _follower(
    entries_ptr, bits, num_tokens, last1, last2, last3, last4, last5,
    MULTIPLIER: tl.constexpr, SHIFT: tl.constexpr, MAX_ORDER: tl.constexpr,
    NUM_PLACES: tl.constexpr,
):  # fmt: skip
    """Level and token after the longest known context of these last tokens; -1: none is known."""
    hash1 = _mixed(tl.zeros((), tl.uint64), last1, MULTIPLIER, SHIFT)
    hash2 = _mixed(hash1, last2, MULTIPLIER, SHIFT)
    hash3 = _mixed(hash2, last3, MULTIPLIER, SHIFT)
    hash4 = _mixed(hash3, last4, MULTIPLIER, SHIFT)
    hash5 = _mixed(hash4, last5, MULTIPLIER, SHIFT)
    order_O = tl.arange(1, 9)
    hash_O = tl.where(order_O == 1, hash1, tl.where(order_O == 2, hash2, hash3))
    hash_O = tl.where(order_O == 4, hash4, tl.where(order_O == 5, hash5, hash_O))
    hash_O = (hash_O >> 32).to(tl.int64)
    bucket_O = (hash_O >> (32 - bits)) * NUM_PLACES
    is_order_O = order_O <= tl.minimum(num_tokens, MAX_ORDER)
    at_OW = bucket_O[:, None] + tl.arange(0, NUM_PLACES)[None, :]
    entry_OW = tl.load(entries_ptr + at_OW, mask=is_order_O[:, None], other=-1)
    is_here_OW = (entry_OW >> 32) & 0xFFFFFFFF == hash_O[:, None]
    is_here_OW &= entry_OW != -1
    value_OW = (order_O[:, None].to(tl.int64) << 32) + (entry_OW & 0xFFFFFFFF)
    found = tl.max(tl.max(tl.where(is_here_OW, value_OW, -1), axis=1), axis=0)
    return tl.where(found >= 0, found & 0xFFFFFFFF, -1)


@triton.jit
def _longest(history_ptr, known, least, most, avoided, MAX_MATCH: tl.constexpr,
             HAS_AVOIDED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The longest earlier match of a text's end, the most recent among equals: length, place.

    With HAS_AVOIDED, the token that follows it is not `avoided`.
    """
    offs = tl.arange(0, BLOCK)
    best = tl.zeros((BLOCK,), tl.int64)
    for start in range(1, known, BLOCK):
        place = start + offs  # the token here follows the match
        matched = tl.zeros((BLOCK,), tl.int32)
        is_place = place < known
        is_equal = is_place
        for i in tl.static_range(MAX_MATCH):
            # Loaded whether or not the tokens after it are equal: no load waits for another.
            at = place - 1 - i
            token = tl.load(history_ptr + at, mask=is_place & (at >= 0), other=-1)
            is_equal &= token == tl.load(history_ptr + tl.maximum(known - 1 - i, 0))
            matched += is_equal.to(tl.int32)
        matched = tl.minimum(matched, most)
        if HAS_AVOIDED:
            follower = tl.load(history_ptr + place, mask=is_place, other=-1)
            matched = tl.where(follower == avoided, 0, matched)
        score = (matched.to(tl.int64) << 32) + place
        best = tl.maximum(best, tl.where(matched >= least, score, 0))
    found = tl.max(best, axis=0)
    return (found >> 32).to(tl.int32), (found & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _with_table(
    tokens, num_guesses, matched, node, place, period, known, may_ask, history_ptr,
    entries_ptr, needed_ptr, bits, num_asked,
    MAX_MATCH: tl.constexpr, NUM_LEVELS: tl.constexpr, BY_TABLE: tl.constexpr,
    MULTIPLIER: tl.constexpr, SHIFT: tl.constexpr, MAX_ORDER: tl.constexpr,
    NUM_PLACES: tl.constexpr,
):  # fmt: skip
    """The text's own guesses until the table is right more often, then the table's."""
    last1 = tl.load(history_ptr + tl.maximum(known - 1, 0))
    last2 = tl.load(history_ptr + tl.maximum(known - 2, 0))
    last3 = tl.load(history_ptr + tl.maximum(known - 3, 0))
    last4 = tl.load(history_ptr + tl.maximum(known - 4, 0))
    last5 = tl.load(history_ptr + tl.maximum(known - 5, 0))
    length = matched  # of the text's own match; 0: the table guesses the rest
    i = tl.zeros((), tl.int32)
    needed = tl.load(needed_ptr + length)
    is_asking = may_ask & (needed < NUM_LEVELS)
    while is_asking:
        told = _follower(
            entries_ptr, bits, known + i, last1, last2, last3, last4, last5,
            MULTIPLIER, SHIFT, MAX_ORDER, NUM_PLACES,
        )  # fmt: skip
        own = tl.load(history_ptr + place + i % period, mask=length > 0, other=-1)
        is_told = (told >= 0) & (told >> 24 >= needed) & (told & 0xFFFFFF != own)
        guess = tl.where(is_told, told & 0xFFFFFF, own)
        matched = tl.where(is_told & (i == 0), BY_TABLE, matched)
        num_guesses = tl.where(is_told, i + 1, num_guesses)
        length = tl.where(is_told | (length == 0), 0, tl.minimum(length + 1, MAX_MATCH))
        tokens = tl.where(node == i, guess, tokens)
        last5, last4, last3, last2, last1 = last4, last3, last2, last1, guess
        i += 1
        needed = tl.load(needed_ptr + length)
        is_asking = (guess >= 0) & (i < num_asked) & (needed < NUM_LEVELS)
    return tokens, num_guesses, matched


@triton.jit
def _go_on(
    known, most, is_asking, history_ptr, draft_ptr, parents_ptr, entries_ptr, bits,
    NUM_DRAFTED: tl.constexpr, MULTIPLIER: tl.constexpr, SHIFT: tl.constexpr,
    MAX_ORDER: tl.constexpr, NUM_PLACES: tl.constexpr,
):  # fmt: skip
    """Continue a chain of NUM_DRAFTED nodes from the table; returns the new number of nodes."""
    last1 = tl.load(draft_ptr + NUM_DRAFTED - 1)
    last2 = _before(history_ptr, draft_ptr, known, 2, NUM_DRAFTED)
    last3 = _before(history_ptr, draft_ptr, known, 3, NUM_DRAFTED)
    last4 = _before(history_ptr, draft_ptr, known, 4, NUM_DRAFTED)
    last5 = _before(history_ptr, draft_ptr, known, 5, NUM_DRAFTED)
    i = tl.full((), NUM_DRAFTED, tl.int32)
    is_asking = is_asking & (i < most)
    while is_asking:
        told = _follower(
            entries_ptr, bits, known + i, last1, last2, last3, last4, last5,
            MULTIPLIER, SHIFT, MAX_ORDER, NUM_PLACES,
        )  # fmt: skip
        is_told = told >= 0
        guess = told & 0xFFFFFF
        tl.store(draft_ptr + i, guess, mask=is_told)
        tl.store(parents_ptr + i, (i - 1).to(tl.int64), mask=is_told)
        last5, last4, last3, last2, last1 = last4, last3, last2, last1, guess
        i += is_told.to(tl.int32)
        is_asking = is_told & (i < most)
    return i


@triton.jit
def _before(history_ptr, draft_ptr, known, BACK: tl.constexpr, NUM_DRAFTED: tl.constexpr):
    """The token BACK places before the end of a text and the chain after it."""
    if BACK <= NUM_DRAFTED:
        token = tl.load(draft_ptr + NUM_DRAFTED - BACK)
    else:
        token = tl.load(history_ptr + tl.maximum(known - (BACK - NUM_DRAFTED), 0))
    return token


@triton.jit
def _with_second(
    tokens, parents, count, node, place, known, least, most, is_open, left, room, num_nodes,
    history_ptr, NUM_SECOND: tl.constexpr, MAX_MATCH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A second chain from the root in place of the last nodes, if another token came too."""
    num_first = num_nodes - NUM_SECOND
    is_open &= (left >= num_first) & (room > num_first)
    avoided = tl.load(history_ptr + place)
    text = tl.where(is_open, known, 0)
    second, place = _longest(history_ptr, text, least, most, avoided, MAX_MATCH, True, BLOCK)
    is_second = (node >= num_first) & (node < num_nodes) & (second > 0)
    at = place + tl.maximum(node - num_first, 0) % tl.maximum(known - place, 1)
    tokens = tl.where(is_second, tl.load(history_ptr + at, mask=is_second, other=-1), tokens)
    parents = tl.where(is_second & (node == num_first), -1, parents)
    return tokens, parents, tl.where(second > 0, tl.minimum(room, num_nodes), count)


@triton.jit
def _own_settings(
    settings_ptr, MIN_MATCH: tl.constexpr, MAX_MATCH: tl.constexpr, SURE: tl.constexpr
):
    """Whether the row's request names a method; the match that counts, and goes before others."""
    sure = tl.load(settings_ptr + R_SURE).to(tl.int32)
    is_named = sure != AS_OTHERS
    least = tl.where(is_named, tl.load(settings_ptr + R_MIN_MATCH).to(tl.int32), MIN_MATCH)
    most = tl.where(is_named, tl.load(settings_ptr + R_MAX_MATCH).to(tl.int32), MAX_MATCH)
    return is_named, least, most, tl.where(is_named, sure, SURE)


@triton.jit
def _lookup_kernel(
    ids_ptr, max_draft_ptr, num_checked_ptr, history_ptr, known_ptr, end_ptr, done_ptr,
    num_nodes_ptr, draft_ptr, parents_ptr, result_ptr, entries_ptr, needed_ptr, settings_ptr,
    history_stride, draft_stride, result_stride, settings_stride, num_nodes, num_columns,
    guesses_at, bits, num_asked, most_nodes, MIN_MATCH: tl.constexpr, MAX_MATCH: tl.constexpr,
    SURE: tl.constexpr, NUM_LEVELS: tl.constexpr, BY_TABLE: tl.constexpr, MULTIPLIER: tl.constexpr,
    SHIFT: tl.constexpr, MAX_ORDER: tl.constexpr, NUM_PLACES: tl.constexpr,
    HAS_METHODS: tl.constexpr, NUM_DRAFTED: tl.constexpr, NUM_SECOND: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row: what followed the longest match of its end, or what the table holds."""
    r, row, is_row = live_row(ids_ptr, num_checked_ptr, done_ptr)
    history_ptr += row * history_stride
    known = tl.where(is_row, tl.load(known_ptr + row), 0).to(tl.int32)
    least, most, sure, may_ask = MIN_MATCH, MAX_MATCH, SURE, is_row
    if HAS_METHODS:
        settings_ptr += row * settings_stride
        is_named, least, most, sure = _own_settings(settings_ptr, MIN_MATCH, MAX_MATCH, SURE)
        may_ask = is_row & ((tl.load(settings_ptr + R_HAS_TABLE) > 0) | ~is_named)
    matched, place = _longest(history_ptr, known, least, most, 0, MAX_MATCH, False, BLOCK)
    node = tl.arange(0, BLOCK_N)
    period = tl.maximum(known - place, 1)  # past the text's end the guesses repeat
    is_own = (node < num_nodes) & (matched > 0)
    tokens = tl.load(history_ptr + place + node % period, mask=is_own, other=-1)
    num_guesses = tl.where(matched > 0, num_nodes, 0)
    if MAX_ORDER:
        tokens, num_guesses, matched = _with_table(
            tokens, num_guesses, matched, node, place, period, known, may_ask, history_ptr,
            entries_ptr, needed_ptr, bits, num_asked,
            MAX_MATCH, NUM_LEVELS, BY_TABLE, MULTIPLIER, SHIFT, MAX_ORDER, NUM_PLACES,
        )  # fmt: skip
    is_node = node < num_guesses
    is_kept = is_node & (matched >= sure)
    left = tl.maximum(tl.load(end_ptr + row) - known - 1, 0)
    room = tl.load(max_draft_ptr + r)
    count = tl.minimum(tl.minimum(room, left), num_guesses)
    drafted, parents = tokens, (node - 1).to(tl.int64)
    if NUM_SECOND:
        is_open = is_row & (matched > 0)
        if HAS_METHODS:
            is_open &= ~is_named
        drafted, parents, count = _with_second(
            drafted, parents, count, node, place, known, least, most, is_open, left, room,
            num_nodes, history_ptr, NUM_SECOND, MAX_MATCH, BLOCK,
        )  # fmt: skip
    tl.store(draft_ptr + row * draft_stride + node, drafted, mask=is_kept)
    tl.store(parents_ptr + row * draft_stride + node, parents, mask=is_kept)
    result_ptr += r * result_stride
    tokens = tl.where(is_node, tokens, -1)
    tl.store(result_ptr + guesses_at + node, tokens, mask=node < num_columns)
    tl.store(result_ptr + C_MATCHED, matched.to(tl.int64))
    if matched >= sure:
        tl.store(result_ptr + C_DRAFTED, count)
        if is_row:
            tl.store(num_nodes_ptr + row, count)
    if NUM_DRAFTED:
        is_open = is_row & may_ask & (matched < sure)
        if is_open & (tl.load(num_nodes_ptr + row) == NUM_DRAFTED):
            most = tl.minimum(tl.minimum(tl.load(max_draft_ptr + r), left), most_nodes).to(tl.int32)
            count = _go_on(
                known, most, is_row, history_ptr, draft_ptr + row * draft_stride,
                parents_ptr + row * draft_stride, entries_ptr, bits,
                NUM_DRAFTED, MULTIPLIER, SHIFT, MAX_ORDER, NUM_PLACES,
            ).to(tl.int64)  # fmt: skip
            tl.store(result_ptr + C_DRAFTED, count)
            tl.store(num_nodes_ptr + row, count)


def lookup(
    state: RowState,
    step: StepRows,
    room: int,
    min_match: int,
    max_match: int,
    sure: int = 0,
    phrases: DevicePhrases | None = None,
    chain: ContinuedChain | None = None,
    num_second: int = 0,
    num_guesses: int | None = None,
) -> None:
    """A chain per row, as in `drafting.ngram` or with a table; all guesses go into the result.

    Rows whose match is shorter than `sure` keep their draft; if it is the whole `chain`, the table
    continues it. A row whose request names a lookup, or a network alone, has its own settings
    (`RowMethods`).
    room: guesses that the result has room for. num_guesses: those that are made; None: as many.
    num_second: last nodes, which become a second chain where the text's end was followed by another
    token too; there is no table then.
    """
    assert not num_second or phrases is None
    settings = step.ids_R if step.methods is None else step.methods.settings_XW
    entries, needed, bits, max_order = step.ids_R, step.ids_R, 0, 0
    if phrases is not None:
        entries, needed, bits = phrases.entries, phrases.needed, phrases.bits
        max_order = phrases.max_order
    num_drafted, max_chain = (0, 0) if chain is None or phrases is None else chain
    num_guesses = room if num_guesses is None else num_guesses
    _lookup_kernel[(len(step.ids_R),)](
        step.ids_R, step.max_draft_R, step.num_checked_R, state.tokens_XL, state.known_X,
        state.end_X, state.is_done_X, state.num_nodes_X, state.draft_XG, state.parents_XG,
        step.result_RC, entries, needed, settings, state.tokens_XL.stride(0),
        state.draft_XG.stride(0), step.result_RC.stride(0), settings.stride(0), num_guesses,
        room, step.guesses_at, bits, min(num_guesses, NUM_ASKED), max_chain,
        MIN_MATCH=min_match, MAX_MATCH=max_match, SURE=sure,
        NUM_LEVELS=NUM_LEVELS, BY_TABLE=BY_TABLE, MULTIPLIER=MULTIPLIER, SHIFT=SHIFT,
        MAX_ORDER=max_order, NUM_PLACES=NUM_PLACES, HAS_METHODS=step.methods is not None,
        NUM_DRAFTED=num_drafted, NUM_SECOND=num_second, BLOCK=2048,
        BLOCK_N=next_power_of_2(room), **options(8),
    )  # fmt: skip
