"""The library of C++ kernels: its functions, and the teams of threads that compute."""

from __future__ import annotations

import ctypes
import os
from functools import cache

from hunch.kernels.build import load_library, num_cores

POINTER, I32, I64, F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float


@cache
def _found_library() -> ctypes.CDLL | None:
    found = load_library()
    if found is None:
        return None
    # fmt: off
    signatures = {
        "hunch_team_new": (POINTER, I32),
        "hunch_matrix_new": (POINTER, I32, I32, I32),
        "hunch_matrix_bytes": (I64, POINTER),
        "hunch_matrix_levels": (None, POINTER, POINTER, F32),
        "hunch_matrix_fill": (None, POINTER, POINTER, I32, POINTER, I64, I64, I64),
        "hunch_matrix_rows": (None, POINTER, POINTER, I64, POINTER),
        "hunch_matrix_free": (None, POINTER),
        "hunch_multiply": (None, POINTER, POINTER, POINTER, I64, POINTER, I32),
        "hunch_panel": (I32,),
        "hunch_multiply_rows": (
            None, POINTER, POINTER, I64, I64, POINTER, I32, I64, POINTER,
        ),
        "hunch_attend": (
            None, *([POINTER] * 10), *([I64] * 8), F32, POINTER, POINTER, I64, POINTER,
        ),
        "hunch_decoder_new": (POINTER, POINTER),
        "hunch_decoder_free": (None, POINTER),
        "hunch_decoder_forward": (I32, POINTER, POINTER, POINTER),
        "hunch_decoder_logits": (None, POINTER, POINTER, POINTER, I64, POINTER),
        "hunch_choose_row": (
            I64, POINTER, I64, F32, I64, ctypes.c_double, F32, I64, I64, I64, I64,
        ),
        "hunch_choose": (None, POINTER, *([POINTER] * 10), I64, I64, I64, I32),
        "hunch_scores": (None, *([POINTER] * 7), *([I64] * 4)),
        "hunch_best": (None, POINTER, *([POINTER] * 11), I64, I64, I64, I64, I32),
        "hunch_draft_chain": (I32, POINTER, POINTER, POINTER),
        "hunch_lookup_new": (POINTER, POINTER, I64),
        "hunch_lookup_free": (None, POINTER),
        "hunch_lookup_forget": (None, POINTER, I64),
        "hunch_lookup_follow": (None, POINTER, I64, POINTER, I64),
        "hunch_lookup_guess": (I64, POINTER, I64, I64, POINTER, POINTER),
        "hunch_successors_new": (POINTER, POINTER, I64),
        "hunch_successors_free": (None, POINTER),
        "hunch_successors_forget": (None, POINTER, I64),
        "hunch_successors_follow": (None, POINTER, I64, POINTER, I64),
        "hunch_successors_guess": (
            I64, POINTER, I64, I64, POINTER, POINTER, I64, POINTER, POINTER, POINTER,
        ),
        "hunch_shared_bytes": (I64, I32),
        "hunch_shared_end": (None, POINTER),
        "hunch_shared_gather": (I32, POINTER, I32, I32, POINTER, I64, POINTER),
        "hunch_shared_sum": (I32, POINTER, I32, I32, POINTER, I64, POINTER),
        "hunch_shared_broadcast": (I32, POINTER, I32, I32, POINTER, I64),
    }
    # fmt: on
    for name, (result, *arguments) in signatures.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def is_available() -> bool:
    """Whether the kernels could be built; the first call may build them."""
    return _found_library() is not None


def library() -> ctypes.CDLL:
    found = _found_library()
    assert found is not None, "ask is_available() first"
    return found


@cache
def team(num_threads: int | None = None) -> int:
    """The threads that share every call; one team per size, for the life of the process."""
    return library().hunch_team_new(num_threads or num_cores())


def new_team(num_threads: int) -> int:
    """Threads of their own, for a network that computes while others do."""
    return int(library().hunch_team_new(num_threads))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=team.cache_clear)  # threads do not survive a fork
