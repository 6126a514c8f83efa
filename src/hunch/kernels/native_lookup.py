"""Suffix lookup by the C++ kernels: what guided.py says, at a tenth of its cost per step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

from hunch.kernels.lookup import MIN_CHANCE, RATES
from hunch.kernels.native_library import I64, POINTER, library
from hunch.kernels.native_structs import fields
from hunch.kernels.phrases import SORT_BITS, PhraseTable

_DOUBLE = ctypes.c_double
_ENTRIES = ("hashes", "tokens", "levels", "starts")
_ODDS = ("seen_odds", "level_odds", "versus_odds", "guess_trust", "last_trust")


class _Spec(ctypes.Structure):
    _fields_ = (
        ("own_odds", POINTER),
        *fields(I64, "num_entries", "max_order", "sort_bits", "vocab_size"),
        *fields(POINTER, *_ENTRIES, *_ODDS),
        *fields(_DOUBLE, "min_chance", *RATES),
    )


class NativeLookup:
    """Chains for rows; without a table, `own_odds` are the log-odds to start from, by type."""

    def __init__(
        self, own_odds: Sequence[float], table: PhraseTable | None, num_rows: int, num_nodes: int
    ) -> None:
        self.tokens_N = np.zeros(num_nodes, dtype=np.int64)  # of the last guess asked for
        self.chance_N = np.zeros(num_nodes)
        self._out = self.tokens_N.ctypes.data, self.chance_N.ctypes.data
        arrays = _arrays(own_odds, table)
        self._kept = arrays  # the kernels read them for as long as this lives
        spec = _Spec(
            **{name: array.ctypes.data for name, array in arrays.items()},
            num_entries=0 if table is None else len(table.hash_E),
            max_order=0 if table is None else table.max_order,
            sort_bits=SORT_BITS,
            vocab_size=0 if table is None else len(table.guess_trust_V),
            min_chance=MIN_CHANCE,
            **RATES,
        )
        lib = library()
        self._free, self._follow, self._guess = (
            lib.hunch_lookup_free,
            lib.hunch_lookup_follow,
            lib.hunch_lookup_guess,
        )
        self._forget = lib.hunch_lookup_forget
        self.handle = lib.hunch_lookup_new(ctypes.byref(spec), num_rows)

    def forget(self, row: int) -> None:
        self._forget(self.handle, row)

    def follow(self, row: int, address: int, count: int) -> None:
        """The target committed the `count` tokens (int64) at this address."""
        self._follow(self.handle, row, address, count)

    def guess(self, row: int, max_guesses: int) -> int:
        """How many guesses there are now in tokens_N, with the chances of the paths to them."""
        return int(self._guess(self.handle, row, min(max_guesses, len(self.tokens_N)), *self._out))

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._free(self.handle)


def _arrays(own_odds: Sequence[float], table: PhraseTable | None) -> dict[str, np.ndarray]:
    if table is None:
        return {"own_odds": np.array(own_odds)}
    return {
        "own_odds": np.ascontiguousarray(table.own_odds),
        "hashes": np.ascontiguousarray(table.hash_E),
        "tokens": np.ascontiguousarray(table.token_E),
        "levels": np.ascontiguousarray(table.level_E),
        "starts": table.start_S,
        "seen_odds": np.ascontiguousarray(table.seen_odds),
        "level_odds": np.ascontiguousarray(table.level_odds),
        "versus_odds": np.ascontiguousarray(table.versus_odds),
        "guess_trust": np.ascontiguousarray(table.guess_trust_V),
        "last_trust": np.ascontiguousarray(table.last_trust_V),
    }
