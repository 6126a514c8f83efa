"""A lookup's record by C++: what drafting/pace.py says, at a quarter of its cost per step.

Shape letters: X rows of the engine, R rows of the step, G guesses, K tokens of a step, S sizes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np

from hunch.kernels.build import load_host_library
from hunch.kernels.native_structs import _I64, _POINTER

_DOUBLE = ctypes.c_double
MAX_SIZES = 8  # as in pace.cpp
ARRAYS = ("first", "next", "doubt", "match", "before", "common", "guess")
NUMBERS = ("rate", "common_rate", "limit", "low", "high", "floor", "doubt_fade", "slow")


class _Pace(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ARRAYS),
        ("num_guesses", _I64),
        *((name, _DOUBLE * 2) for name in ("hope", "match_odds")),
        *((name, _DOUBLE) for name in NUMBERS),
    )


def is_available() -> bool:
    return load_host_library() is not None


class NativePace:
    """Learns into the arrays it is given, which stay Python's to read and write."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        hope: tuple[float, float],
        match_odds: tuple[float, float],
        numbers: Mapping[str, float],
    ) -> None:
        library = load_host_library()
        assert library is not None, "ask is_available() first"
        for name, array in arrays.items():
            assert array.dtype == (np.int64 if name == "guess" else np.float64), name
            assert array.flags.c_contiguous, name
        self._kept = dict(arrays)  # the kernels write them for as long as this lives
        self._spec = _Pace(
            *(arrays[name].ctypes.data for name in ARRAYS),
            arrays["guess"].shape[1],
            (_DOUBLE * 2)(*hope),
            (_DOUBLE * 2)(*match_odds),
            *(numbers[name] for name in NUMBERS),
        )
        self._at, self._num_guesses = ctypes.addressof(self._spec), arrays["guess"].shape[1]
        self._learn, self._gains = library.hunch_pace_learn, library.hunch_pace_gains
        # fmt: off
        self._learn.argtypes = (_POINTER, _I64, _POINTER, _I64, _POINTER, _POINTER, _I64,
                                _POINTER, _POINTER)
        self._gains.argtypes = (_POINTER, _I64, _POINTER, _POINTER, _I64, _I64, _POINTER, _POINTER)
        # fmt: on
        self._learn.restype = self._gains.restype = None
        self._gain_S = np.zeros(MAX_SIZES)
        self._gain_at = self._gain_S.ctypes.data
        self._sizes: dict[tuple[int, ...], tuple[np.ndarray, int]] = {}  # and where they lie
        self._rows: tuple[np.ndarray, int] = (self._gain_S, 0)  # the last asked for, the same

    def learn(
        self,
        row_R: np.ndarray,
        num_R: np.ndarray,
        tokens_RK: np.ndarray,
        guess_RG: np.ndarray,
        matched_R: np.ndarray,
    ) -> None:
        """All but row_R are columns of one matrix."""
        stride = tokens_RK.strides[0]
        assert num_R.strides[0] == guess_RG.strides[0] == matched_R.strides[0] == stride
        assert guess_RG.shape[1] >= self._num_guesses
        self._learn(
            self._at,
            len(row_R),
            self._rows_at(row_R),
            stride // 8,
            _address(num_R),
            _address(tokens_RK),
            tokens_RK.shape[1],
            _address(guess_RG),
            _address(matched_R),
        )

    def gains(
        self, row_R: np.ndarray, left_R: np.ndarray, sizes: tuple[int, ...], *, is_flowing: bool
    ) -> list[float]:
        """Tokens that a step of each size would bring, beside the bonus."""
        if sizes not in self._sizes:
            assert len(sizes) <= MAX_SIZES
            sizes_S = np.array(sizes, dtype=np.int64)
            self._sizes[sizes] = sizes_S, _address(sizes_S)
        self._gains(
            self._at,
            len(row_R),
            self._rows_at(row_R),
            _address(left_R),
            is_flowing,
            len(sizes),
            self._sizes[sizes][1],
            self._gain_at,
        )
        return self._gain_S[: len(sizes)].tolist()

    def _rows_at(self, row_R: np.ndarray) -> int:
        """Mostly they are those of the step before."""
        if row_R is not self._rows[0]:
            self._rows = row_R, _address(row_R)
        return self._rows[1]


def _address(array: np.ndarray) -> int:
    """Of int64 numbers; `array.ctypes` would take three times as long."""
    assert array.dtype == np.int64
    address: int = array.__array_interface__["data"][0]
    return address
