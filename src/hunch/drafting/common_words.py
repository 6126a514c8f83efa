"""What usually follows a token or two in ordinary answers, for any tokenizer.

Made of the table of common words that comes with hunch: each word is encoded once, and what is
known of words is added up for the tokens that they begin and end with.

Shape letters: W words, E successors of words, K tokens of all words, N contexts of tokens or their
successors as they are counted, some several times.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from hunch.drafters import COMMON_WORDS
from hunch.drafting.word_table import NO_WORD, WordTable, read_words
from hunch.errors import ConfigError, RequestError
from hunch.kernels.build import cache_dir
from hunch.kernels.successor_entries import (
    CERTAIN,
    DOUBT,
    ONE_TOKEN,
    Entries,
    contexts_of,
    sorted_entries,
)
from hunch.types import TextCodec

log = logging.getLogger(__name__)

Array = np.ndarray

FORM = 1  # of what is kept on disk: to be raised when it would be made otherwise
MIN_VOCAB = 2048  # of tokenizers that have tokens for whole words
_NONE = np.zeros(0, np.int32)
NOTHING = Entries(_NONE, _NONE, _NONE, _NONE)
NO_TOKEN = -2  # where a word has none, or one that cannot be drafted
MAX_BITS = 21  # of a token: three of them make one number
UNKNOWN = "\U000f0000"  # a character that no vocabulary has
# Words are spelled as after these texts, which stay as they are before a word; of those before
# letters, the first one that does so in this tokenizer.
BEFORE_LETTERS = ("\n", "(", ".")
BEFORE_OTHERS = "a"
PROBES = (" the", ".", "\n\n")  # that are none


@runtime_checkable
class HasDefinition(Protocol):
    """A tokenizer that can be told from others."""

    def definition(self) -> str: ...


def common_successors(codec: TextCodec, vocab_size: int) -> Entries:
    """Likely next tokens; none where the tokenizer spells no common word.

    Made once for a tokenizer and kept on disk, as spelling all words takes most of a second.
    """
    if vocab_size < MIN_VOCAB:
        return NOTHING
    if not isinstance(codec, HasDefinition):
        return successors_of(read_words(COMMON_WORDS), codec, vocab_size)
    digest = sha256(f"{FORM} {vocab_size} {codec.definition()}".encode())
    digest.update(COMMON_WORDS.read_bytes())
    file = cache_dir().parent / "words" / f"{digest.hexdigest()[:24]}.safetensors"
    if (kept := _kept(file, vocab_size)) is not None:
        return kept
    entries = successors_of(read_words(COMMON_WORDS), codec, vocab_size)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}.part")
        save_file(entries.files(""), part)
        part.replace(file)
    except OSError as error:
        log.info("the successors of common words cannot be kept for the next start: %s", error)
    return entries


def _kept(file: Path, vocab_size: int) -> Entries | None:
    """What a former start wrote; None: nothing, or it is damaged."""
    try:
        return Entries.of_files(load_file(file), "", vocab_size, str(file))
    except (OSError, SafetensorError, ConfigError):
        return None


def successors_of(table: WordTable, codec: TextCodec, vocab_size: int) -> Entries:
    spelling = Spelling.by(codec, table.words, vocab_size)
    counts = _Counts(vocab_size.bit_length())
    if counts.bits > MAX_BITS or not (spelling.token_K >= 0).any():
        log.info("no common words are drafted: this tokenizer cannot spell them")
        return NOTHING
    _count_within_words(counts, table, spelling)
    _count_after_one_word(counts, table, spelling)
    _count_after_two_words(counts, table, spelling)
    return counts.entries()


@dataclass(frozen=True, slots=True)
class Spelling:
    """The tokens of words, one word's after another's."""

    token_K: Array  # int64, or NO_TOKEN
    start_W: Array
    size_W: Array  # 0: how the word is spelled within a text is not known

    @staticmethod
    def by(codec: TextCodec, words: Sequence[str], vocab_size: int) -> Spelling:
        encoded = _encoded(codec, words)
        size_W = np.array([len(tokens) for tokens in encoded], np.int64)
        token_K = np.array([token for tokens in encoded for token in tokens], np.int64)
        is_known_K = (token_K < vocab_size) & (token_K != _unknown_token(codec))
        return Spelling(np.where(is_known_K, token_K, NO_TOKEN), np.cumsum(size_W) - size_W, size_W)

    def token_W(self, place: int) -> Array:
        """The token at this place of each word; below 0: counted from its end."""
        place_W = place + np.where(place < 0, self.size_W, 0)
        is_there_W = (place_W >= 0) & (place_W < self.size_W)
        token_W = np.full(len(self.size_W), NO_TOKEN, np.int64)
        token_W[is_there_W] = self.token_K[(self.start_W + place_W)[is_there_W]]
        return token_W


def _encoded(codec: TextCodec, words: Sequence[str]) -> list[list[int]]:
    """Each word's tokens; none where they cannot be told from those before it."""
    after_others = _After(codec, BEFORE_OTHERS)
    after_letters = [_After(codec, before) for before in BEFORE_LETTERS]
    if after_letters[0].is_plain("the") and all(map(after_others.is_plain, PROBES)):
        return [_tokens(codec, word) for word in words]
    # A text gets a space before it, or the like: only what follows another is as within a text.
    chosen = next((after for after in after_letters if after.tokens("the")), after_letters[0])
    return [(chosen if word[:1].isalpha() else after_others).tokens(word) for word in words]


class _After:
    """Encodes what stands after a text."""

    def __init__(self, codec: TextCodec, before: str) -> None:
        self._codec, self._before = codec, before
        self._known = _tokens(codec, before)

    def tokens(self, text: str) -> list[int]:
        """None where the text changes the tokens of what stands before it."""
        tokens, size = _tokens(self._codec, self._before + text), len(self._known)
        return tokens[size:] if tokens[:size] == self._known else []

    def is_plain(self, text: str) -> bool:
        """Whether it has the tokens that it has alone."""
        return self.tokens(text) == _tokens(self._codec, text)


def _tokens(codec: TextCodec, text: str) -> list[int]:
    try:
        return codec.encode(text, add_special_tokens=False)
    except RequestError:  # no token for a character, and none for what is unknown
        return []


def _unknown_token(codec: TextCodec) -> int:
    """What stands for characters that the vocabulary does not have, if something does."""
    tokens = _tokens(codec, UNKNOWN)
    is_lost = bool(tokens) and UNKNOWN not in codec.decode(tokens, skip_special_tokens=False)
    return tokens[-1] if is_lost else NO_TOKEN


@dataclass(slots=True)
class _Counts:
    """How often contexts of one or two tokens were seen, and each successor after them.

    A context is a number: the token before the last one plus one, so that ONE_TOKEN is 0, then the
    last one's bits.
    """

    bits: int  # of a token
    contexts: list[tuple[Array, Array]] = field(default_factory=list)  # and how often
    successors: list[tuple[Array, Array]] = field(default_factory=list)  # and how often

    def see(self, first: Array | int, last: Array, count: Array) -> None:
        """Contexts, whatever followed."""
        is_real = (np.asarray(first) > NO_TOKEN) & (last >= 0)
        self.contexts.append((self._context(first, last)[is_real], count[is_real]))

    def follow(self, first: Array | int, last: Array, next_: Array, count: Array) -> None:
        """What followed contexts."""
        is_real = (np.asarray(first) > NO_TOKEN) & (last >= 0) & (next_ >= 0)
        successor = self._context(first, last) << self.bits | next_
        self.successors.append((successor[is_real], count[is_real]))

    def _context(self, first: Array | int, last: Array) -> Array:
        context: Array = (np.asarray(first, np.int64) + 1) << self.bits | last
        return context

    def entries(self) -> Entries:
        context_N, seen_N = _added_up(self.contexts)
        successor_N, count_N = _added_up(self.successors)
        at_N = np.searchsorted(context_N, successor_N >> self.bits)
        # Counts are rounded: of all successors there may be a few more than of their context.
        seen_N = np.maximum(seen_N, np.bincount(at_N, count_N, len(context_N)))
        mask = (1 << self.bits) - 1
        first_N, last_N = (successor_N >> 2 * self.bits) - 1, successor_N >> self.bits & mask
        share_N, seen_N = count_N / (seen_N[at_N] + DOUBT), seen_N[at_N]
        return sorted_entries(contexts_of(first_N, last_N), successor_N & mask, share_N, seen_N)


def _count_within_words(counts: _Counts, table: WordTable, spelling: Spelling) -> None:
    for place in range(1, int(spelling.size_W.max())):
        is_longer_W = spelling.size_W > place
        last_W, next_W = (spelling.token_W(at)[is_longer_W] for at in (place - 1, place))
        count_W = table.total_W[is_longer_W]
        counts.see(ONE_TOKEN, last_W, count_W)
        counts.follow(ONE_TOKEN, last_W, next_W, count_W)
        if place > 1:
            first_W = spelling.token_W(place - 2)[is_longer_W]
            counts.see(first_W, last_W, count_W)
            counts.follow(first_W, last_W, next_W, count_W)


def _count_after_one_word(counts: _Counts, table: WordTable, spelling: Spelling) -> None:
    first_W, last_W, head_W = (spelling.token_W(place) for place in (-2, -1, 0))
    counts.see(ONE_TOKEN, last_W, table.total_W)
    counts.see(first_W, last_W, table.total_W)  # where the word has two tokens
    is_one_E = (table.first_C == NO_WORD)[table.context_E]
    word_E, next_E = table.last_C[table.context_E][is_one_E], table.next_E[is_one_E]
    count_E = _counts_of(table)[is_one_E]
    counts.follow(ONE_TOKEN, last_W[word_E], head_W[next_E], count_E)
    counts.follow(first_W[word_E], last_W[word_E], head_W[next_E], count_E)
    # From the word into the next one. Where the next one is of one token, and what follows both
    # words is in the table, that is where the two of them are counted.
    second_E = spelling.token_W(1)[next_E]
    counts.follow(last_W[word_E], head_W[next_E], second_E, count_E)
    is_listed_E = np.isin(_pair(table, word_E, next_E), _pair(table, table.first_C, table.last_C))
    is_new_E = (spelling.size_W[next_E] > 1) | ~is_listed_E
    counts.see(last_W[word_E][is_new_E], head_W[next_E][is_new_E], count_E[is_new_E])


def _count_after_two_words(counts: _Counts, table: WordTable, spelling: Spelling) -> None:
    """Where the second one has two tokens itself, more is known of what follows these."""
    last_W, head_W = spelling.token_W(-1), spelling.token_W(0)
    is_pair_C = (table.first_C != NO_WORD) & (spelling.size_W[table.last_C] == 1)
    first_C, last_C = last_W[table.first_C], last_W[table.last_C]
    counts.see(first_C[is_pair_C], last_C[is_pair_C], table.total_C[is_pair_C])
    is_pair_E = is_pair_C[table.context_E]
    context_E, next_E = table.context_E[is_pair_E], head_W[table.next_E[is_pair_E]]
    counts.follow(first_C[context_E], last_C[context_E], next_E, _counts_of(table)[is_pair_E])


def _counts_of(table: WordTable) -> Array:
    """How often each successor was seen after its context."""
    count_E: Array = table.chance_E / CERTAIN * (table.total_C[table.context_E] + DOUBT)
    return count_E


def _pair(table: WordTable, first: Array, last: Array) -> Array:
    pair: Array = first.astype(np.int64) * len(table.words) + last
    return pair


def _added_up(parts: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Each number once, in order, with the sum of its counts."""
    number_N, count_N = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(number_N)
    number_N, count_N = number_N[order], count_N[order]
    start = np.nonzero(_is_new(number_N))[0]
    return number_N[start], np.add.reduceat(count_N, start) if len(start) else count_N


def _is_new(number_N: Array) -> Array:
    """Whether a number is another than the one before it."""
    is_new_N: Array = np.diff(number_N, prepend=number_N[:1] - 1) != 0
    return is_new_N
