"""A phrase table: what a target often writes next after its last few tokens, counted beforehand.

An entry is a context of one to a few tokens, known by its hash, with the token that follows it most
often and a level: how often. Beside the entries lie log-odds, measured on answers that were not
counted: how far to trust a guess from the request's own text, alone, with the table and against it.

Shape letters: E entries, S first bits of a hash, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from hunch.errors import ConfigError
from hunch.kernels.lookup import NUM_GUESS_TYPES, PRIOR_ODDS
from hunch.kernels.successor_entries import CERTAIN, ONE_TOKEN, Entries, mixed, ranks_of

FILE = "model.safetensors"
SUCCESSORS = "successors_"  # before the names of their tensors
NUM_LEVELS = 16
NOBODY = NUM_GUESS_TYPES  # the type where the request's own text has no guess
TRUST_UNIT = 1 / 16  # of the log-odds kept as bytes
MULTIPLIER, MASK, SHIFT = 0x9E3779B97F4A7C15, (1 << 64) - 1, 29
SORT_BITS = 16  # of a hash, by which the C++ form finds where to look

Array = np.ndarray


class ContinuedChain(NamedTuple):
    """A network's chain that a phrase table continues."""

    num_drafted: int  # nodes that the network drafts
    num_nodes: int  # with those of the table, at most


@dataclass(kw_only=True)
class PhraseTable:
    """Entries sorted by hash; of several contexts that a text ends with, the longest counts."""

    max_order: int  # tokens of the longest context
    hash_E: Array  # uint32
    token_E: Array  # int32
    level_E: Array  # uint8
    own_odds: Array  # of a guess from the request's own text, by its type
    seen_odds: Array  # added to it: nothing in the table, the same there by level, another by level
    level_odds: Array  # of a guess from the table
    # Added to it by the type of the other guess the own text has: NOBODY for none, the types of a
    # second guess where one of the own text's places says the same as the table.
    versus_odds: Array
    guess_trust_V: Array  # added to own_odds by the guessed token
    last_trust_V: Array  # and by the token before it
    # What follows single tokens and pairs of them, for trees of guesses; None: it was not counted.
    successors: Entries | None = None
    _hashes: Sequence[int] = field(init=False)

    def __post_init__(self) -> None:
        self._hashes = memoryview(self.hash_E)
        self._tokens, self._levels = memoryview(self.token_E), memoryview(self.level_E)

    @staticmethod
    def of_successors(entries: Entries, vocab_size: int) -> PhraseTable:
        """The likeliest successor of each context, as sure as it is likely. Guesses of the
        request's own text are trusted as without a table."""
        best = np.flatnonzero(ranks_of(entries.context_E) == 0)
        first_E, last_E = entries.first_E[best], entries.last_E[best]
        one_E, two_E = context_hash([last_E]), context_hash([last_E, first_E])
        hash_E, at_E = np.unique(np.where(first_E == ONE_TOKEN, one_E, two_E), return_index=True)
        level_E = entries.chance_E[best].astype(np.int64) * NUM_LEVELS // (CERTAIN + 1)
        return PhraseTable(
            max_order=2,
            hash_E=hash_E,
            token_E=entries.next_E[best][at_E].astype(np.int32),
            level_E=level_E[at_E].astype(np.uint8),
            own_odds=np.array(PRIOR_ODDS),
            seen_odds=np.zeros(1 + 2 * NUM_LEVELS),
            level_odds=level_odds(),
            versus_odds=np.zeros(NUM_GUESS_TYPES + 1),
            guess_trust_V=np.zeros(vocab_size),
            last_trust_V=np.zeros(vocab_size),
        )

    def find(self, tail: Sequence[int]) -> tuple[int, int] | None:
        """What follows the longest known context that `tail` ends with: token and level."""
        hashes, size, found, state = self._hashes, len(self.hash_E), -1, 0
        for token in tail[: -self.max_order - 1 : -1]:
            state = ((state ^ (token + 1)) * MULTIPLIER) & MASK
            state ^= state >> SHIFT
            at = bisect_left(hashes, state >> 32)
            if at < size and hashes[at] == state >> 32:
                found = at
        return None if found < 0 else (self._tokens[found], self._levels[found])

    def with_more(self, other: PhraseTable) -> PhraseTable:
        """Its entries too, and what they say of contexts that both know; how far to trust guesses
        stays as it is here."""
        hash_E, at_E = np.unique(np.concatenate((other.hash_E, self.hash_E)), return_index=True)
        token_E = np.concatenate((other.token_E, self.token_E))[at_E]
        level_E = np.concatenate((other.level_E, self.level_E))[at_E]
        successors = self.successors or other.successors
        if self.successors is not None and other.successors is not None:
            successors = mixed(other.successors, self.successors)
        return replace(self, hash_E=hash_E, token_E=token_E, level_E=level_E, successors=successors)

    @cached_property
    def start_S(self) -> Array:
        """The first entry whose hash begins with these bits or later ones."""
        first_S = np.arange((1 << SORT_BITS) + 1, dtype=np.uint64) << np.uint64(32 - SORT_BITS)
        return np.searchsorted(self.hash_E, first_S).astype(np.int32)

    def files(self) -> dict[str, Array]:
        """Tensors to store."""
        vocab_size = len(self.guess_trust_V)
        further = {} if self.successors is None else self.successors.files(SUCCESSORS)
        return {
            **further,
            "hashes": self.hash_E,
            "tokens": self.token_E.astype(np.uint16 if vocab_size <= 1 << 16 else np.uint32),
            "levels": self.level_E,
            **{name: getattr(self, name).astype(np.float32) for name in _ODDS},
            "guess_trust": _to_bytes(self.guess_trust_V),
            "last_trust": _to_bytes(self.last_trust_V),
            "max_order": np.array([self.max_order], dtype=np.int32),
        }


_ODDS = ("own_odds", "seen_odds", "level_odds", "versus_odds")
_SIZES = (NUM_GUESS_TYPES, 1 + 2 * NUM_LEVELS, NUM_LEVELS, NUM_GUESS_TYPES + 1)


def context_hash(before_KN: Sequence[Array]) -> Array:
    """Hashes of N contexts; before_KN[0] are their last tokens, [1] those before them, ..."""
    state_N = np.zeros(len(before_KN[0]), dtype=np.uint64)
    for token_N in before_KN:
        state_N = (state_N ^ (token_N.astype(np.uint64) + np.uint64(1))) * np.uint64(MULTIPLIER)
        state_N ^= state_N >> np.uint64(SHIFT)
    return (state_N >> np.uint64(32)).astype(np.uint32)


def level_odds() -> Array:
    """Log-odds of a table's guesses by level, if they are right as often as the level says."""
    share = (np.arange(NUM_LEVELS) + 0.5) / NUM_LEVELS
    odds: Array = np.log(share / (1 - share))
    return odds


def read_phrases(folder: Path, vocab_size: int) -> PhraseTable:
    """The table a directory holds, made for a vocabulary of this size."""
    try:
        data = (folder / FILE).read_bytes()
    except OSError as error:
        raise ConfigError(f"phrases={folder}: no phrase table there ({error})") from None
    return load_phrases(data, vocab_size, folder)


def load_phrases(data: bytes, vocab_size: int, folder: Path | str = "memory") -> PhraseTable:
    """The table that a file's bytes hold."""
    try:
        stored = load(data)
        vocab = len(stored["guess_trust"])
        table = PhraseTable(
            successors=Entries.of_files(stored, SUCCESSORS, vocab, f"phrases={folder}"),
            max_order=int(stored["max_order"][0]),
            hash_E=stored["hashes"].astype(np.uint32),
            token_E=stored["tokens"].astype(np.int32),
            level_E=stored["levels"].astype(np.uint8),
            **{name: stored[name].astype(np.float64) for name in _ODDS},
            guess_trust_V=stored["guess_trust"] * TRUST_UNIT,
            last_trust_V=stored["last_trust"] * TRUST_UNIT,
        )
    except (SafetensorError, KeyError) as error:
        raise ConfigError(f"phrases={folder}: no phrase table there ({error})") from None
    sizes = [len(getattr(table, name)) for name in _ODDS]
    num_entries = {len(table.hash_E), len(table.token_E), len(table.level_E)}
    if sizes != list(_SIZES) or len(num_entries) != 1:
        raise ConfigError(f"phrases={folder}: its tensors have other sizes than a phrase table's")
    if len(table.guess_trust_V) != vocab_size or len(table.last_trust_V) != vocab_size:
        raise ConfigError(
            f"phrases={folder}: made for a vocabulary of {len(table.guess_trust_V)}, "
            f"the target has {vocab_size}"
        )
    if not 0 <= table.token_E.min(initial=0) <= table.token_E.max(initial=0) < vocab_size:
        raise ConfigError(f"phrases={folder}: it guesses tokens the target does not have")
    if table.level_E.max(initial=0) >= NUM_LEVELS:
        raise ConfigError(f"phrases={folder}: levels above {NUM_LEVELS - 1}")
    return table


def _to_bytes(trust_V: Array) -> Array:
    return np.clip(np.round(trust_V / TRUST_UNIT), -127, 127).astype(np.int8)
