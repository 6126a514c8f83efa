"""Trees of likely successors by the C++ kernels: what successor_trees.py says."""

from __future__ import annotations

import ctypes

import numpy as np

from hunch.kernels.lookup import RATES
from hunch.kernels.native_library import I64, POINTER, library
from hunch.kernels.native_structs import fields
from hunch.kernels.successor_entries import WIDTH
from hunch.kernels.successor_trees import BESIDE, EMPTY, Chain, TreeLimits, first_odds
from hunch.kernels.successors import Successors


class _Spec(ctypes.Structure):
    _fields_ = (
        *fields(POINTER, "pair", "after_pair", "after_token", "odds"),
        *fields(I64, "num_slots", "width", "num_nodes", "depth"),
        *fields(ctypes.c_double, "min_chance", "beside", *RATES),
    )


class NativeTrees:
    """What was guessed last is in tokens_N, parents_N and chance_N, which are overwritten."""

    def __init__(self, successors: Successors, limits: TreeLimits, num_rows: int) -> None:
        self.tokens_N = np.zeros(limits.num_nodes, np.int64)
        self.parents_N = np.zeros(limits.num_nodes, np.int64)
        self.chance_N = np.zeros(limits.num_nodes)
        arrays = self.tokens_N, self.parents_N, self.chance_N
        self._out = tuple(array.ctypes.data for array in arrays)
        self._successors = successors  # the kernels read it for as long as this lives
        odds = np.array(first_odds())
        spec = _Spec(
            pair=successors.pair_S.data_ptr(),
            after_pair=successors.after_pair_SW.data_ptr(),
            after_token=successors.after_token_VW.data_ptr(),
            odds=odds.ctypes.data,
            num_slots=len(successors.pair_S),
            width=WIDTH,
            num_nodes=limits.num_nodes,
            depth=limits.depth,
            min_chance=limits.min_chance,
            beside=BESIDE,
            **RATES,
        )
        lib = library()
        self._free, self._follow = lib.hunch_successors_free, lib.hunch_successors_follow
        self._forget, self._guess = lib.hunch_successors_forget, lib.hunch_successors_guess
        self.handle = lib.hunch_successors_new(ctypes.byref(spec), num_rows)

    def forget(self, row: int) -> None:
        self._forget(self.handle, row)

    def follow(self, row: int, tokens_N: np.ndarray) -> None:
        """The target committed these."""
        self._follow(self.handle, row, tokens_N.ctypes.data, len(tokens_N))

    def guess(self, row: int, most: int, chain: Chain = EMPTY) -> int:
        """How many nodes there are now."""
        tokens_N, chance_N = chain
        addresses = tokens_N.ctypes.data, chance_N.ctypes.data
        return int(self._guess(self.handle, row, most, *addresses, len(tokens_N), *self._out))

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._free(self.handle)
