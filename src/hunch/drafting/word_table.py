"""The table of common words: what follows a word, or two words, in ordinary answers.

A *word* is a piece of text as tokenizers cut it before merging: " the", ".\\n", " =", "'s", "202".
The file is of safetensors, compressed as .xz; it holds words and counts, and no token of a model.

Shape letters: W words, C contexts, E successors of contexts.
"""

from __future__ import annotations

import lzma
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from hunch.errors import ModelFormatError
from hunch.kernels.successor_entries import CERTAIN, WIDTH

Array = np.ndarray

NO_WORD = -1  # in place of the first of two words: the context is the last word alone
MAX_WORDS = (1 << 16) - WIDTH  # so that a word or a rank is a number of two bytes
MAX_BYTES = 1 << 26  # of the file when it is not compressed
_PER_DOUBLING = 4  # steps in which the file tells how often something was seen
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 1, "pb": 1}]
_LARGEST = {np.uint8: 255, np.uint16: 65535}
_STORED: Mapping[str, type[np.uint8] | type[np.uint16]] = {
    "words": np.uint8,  # with a zero byte between two
    "word_levels": np.uint8,
    "firsts": np.uint16,  # plus one; 0 for NO_WORD
    "last_steps": np.uint16,  # from one context to the next
    "context_levels": np.uint8,
    "sizes": np.uint8,
    "nexts": np.uint16,  # below WIDTH: of this rank after the last word alone; else plus WIDTH
    "chance_levels": np.uint8,
}


@dataclass(frozen=True, slots=True)
class WordTable:
    """Contexts are sorted by their last word, then by the first; successors of one context by how
    likely they are."""

    words: list[str]
    total_W: Array  # float64: how often each was seen
    first_C: Array  # int32: the word before the last one, or NO_WORD
    last_C: Array  # int32
    total_C: Array  # float64: how often the context was seen
    size_C: Array  # int64, 1 to WIDTH: its successors
    next_E: Array  # int32
    chance_E: Array  # int64, 1 to CERTAIN

    @property
    def context_E(self) -> Array:
        return np.repeat(np.arange(len(self.size_C)), self.size_C)


def write_words(table: WordTable, path: Path) -> None:
    """How often things were seen is rounded to a tenth or so."""
    stored = {
        "words": np.frombuffer("\0".join(table.words).encode(), np.uint8),
        "word_levels": _levels(table.total_W),
        "firsts": table.first_C + 1,
        "last_steps": np.diff(table.last_C, prepend=0),
        "context_levels": _levels(table.total_C),
        "sizes": table.size_C,
        "nexts": _as_ranks(table),
        "chance_levels": _levels(CERTAIN / table.chance_E),
    }
    for name, dtype in _STORED.items():
        assert stored[name].min(initial=0) >= 0
        assert stored[name].max(initial=0) <= _LARGEST[dtype]
    data = save({name: stored[name].astype(dtype) for name, dtype in _STORED.items()})
    path.write_bytes(lzma.compress(data, format=lzma.FORMAT_XZ, filters=_FILTERS))


def read_words(path: Path) -> WordTable:
    try:
        return _unpacked(load(_decompressed(path.read_bytes())))
    except (OSError, EOFError, lzma.LZMAError, SafetensorError, KeyError, ValueError) as error:
        raise ModelFormatError(
            f"{path}: not a table of words, or damaged ({error}); install hunch again"
        ) from None


def _decompressed(data: bytes) -> bytes:
    """The stream a file holds, which may not be larger than MAX_BYTES."""
    stream = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=2 * MAX_BYTES)
    found = stream.decompress(data, max_length=MAX_BYTES)
    if not stream.eof:
        raise ValueError("it ends too early, or is too large")
    return found


def _unpacked(stored: Mapping[str, Array]) -> WordTable:
    for name, dtype in _STORED.items():
        if stored[name].dtype != dtype or stored[name].ndim != 1:
            raise ValueError(f"{name} is not a list of {np.dtype(dtype).name}")
    words = stored["words"].tobytes().decode().split("\0")
    size_C = stored["sizes"].astype(np.int64)
    if size_C.min(initial=1) < 1 or size_C.max(initial=1) > WIDTH:
        raise ValueError(f"a context has 1 to {WIDTH} successors")
    chance_E = np.round(CERTAIN / _from_levels(stored["chance_levels"])).astype(np.int64)
    table = WordTable(
        words,
        _from_levels(stored["word_levels"]),
        stored["firsts"].astype(np.int32) - 1,
        np.cumsum(stored["last_steps"], dtype=np.int64).astype(np.int32),
        _from_levels(stored["context_levels"]),
        size_C,
        stored["nexts"].astype(np.int32),
        chance_E,
    )
    lengths = [
        (len(words), len(table.total_W)),
        *((len(size_C), len(one)) for one in (table.first_C, table.last_C, table.total_C)),
        *((int(size_C.sum()), len(one)) for one in (table.next_E, chance_E)),
    ]
    if any(needed != given for needed, given in lengths):
        raise ValueError("its columns do not fit together")
    table = replace(table, next_E=_from_ranks(table))
    for word in (table.first_C, table.last_C, table.next_E):
        if word.max(initial=0) >= len(words):
            raise ValueError("it names words that it does not have")
    if chance_E.min(initial=1) < 1:
        raise ValueError("a chance is below one in 255")
    return table


def _as_ranks(table: WordTable) -> Array:
    """Successors of two words as ranks among those of the last word, where they are there."""
    found_E = table.next_E + WIDTH
    for rank in range(WIDTH):
        place_E = _place_alone(table, np.full(len(found_E), rank))
        is_it_E = (place_E >= 0) & (table.next_E[place_E] == table.next_E)
        found_E = np.where(is_it_E, rank, found_E)
    return found_E


def _from_ranks(table: WordTable) -> Array:
    place_E = _place_alone(table, table.next_E)
    is_rank_E = table.next_E < WIDTH
    if (place_E[is_rank_E] < 0).any():
        raise ValueError("it names successors that a word does not have")
    word_E: Array = np.where(is_rank_E, table.next_E[place_E], table.next_E) - WIDTH
    return word_E


def _place_alone(table: WordTable, rank_E: Array) -> Array:
    """Where the successor of this rank stands that the last word of two has alone; -1: nowhere."""
    is_one_C = table.first_C == NO_WORD
    one_W = np.full(int(table.last_C.max(initial=0)) + 1, -1)
    one_W[table.last_C[is_one_C]] = np.nonzero(is_one_C)[0]
    context_E = table.context_E
    one_E = np.where(is_one_C[context_E], -1, one_W[table.last_C[context_E]])
    start_C = np.cumsum(table.size_C) - table.size_C
    is_there_E = (one_E >= 0) & (rank_E < table.size_C[one_E])
    return np.where(is_there_E, start_C[one_E] + rank_E, -1)


def _levels(count: Array) -> Array:
    level: Array = np.round(np.log2(count) * _PER_DOUBLING)
    return level


def _from_levels(level: Array) -> Array:
    count: Array = np.exp2(level.astype(np.float64) / _PER_DOUBLING)
    return count
