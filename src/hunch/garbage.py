"""Python's garbage collector, switched off where it would disturb."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

_lock = Lock()
_num_inside = 0  # contexts of all threads
_was_collecting = True  # before the first of them


@contextmanager
def without_collector() -> Iterator[None]:
    """Garbage of this context is collected after it, and after those of other threads."""
    global _num_inside, _was_collecting
    with _lock:
        if not _num_inside:
            _was_collecting = gc.isenabled()
            gc.disable()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if not _num_inside and _was_collecting:
                gc.enable()
