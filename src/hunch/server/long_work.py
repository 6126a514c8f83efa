"""Log-probabilities of whole vocabularies: so many values that others must not wait for them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from threading import Lock
from typing import TypeVar

from hunch.types import RequestOutput

T = TypeVar("T")
MANY = 10_000  # scores that take some tens of milliseconds to put into words
_pauses = 0
_lock = Lock()


async def beside(num_scores: int, work: Callable[[], T]) -> T:
    """What the work gives; where it is long, the other requests go on meanwhile."""
    if num_scores < MANY:
        return work()

    def run() -> T:
        with _no_collection():
            return work()

    return await asyncio.to_thread(run)


def scores_in(output: RequestOutput) -> int:
    """How many log-probabilities a request's answers and prompt have."""
    found = count(output.prompt_logprobs or ())
    return found + sum(count(choice.logprobs or ()) for choice in output.outputs)


def count(entries: Iterable[Sized | None]) -> int:
    return sum(len(entry) for entry in entries if entry is not None)


@contextmanager
def _no_collection() -> Iterator[None]:
    """All that is made is kept: looking for garbage in it again and again triples the time."""
    global _pauses
    with _lock:
        _pauses += 1
        gc.disable()
    try:
        yield
    finally:
        with _lock:
            _pauses -= 1
            if not _pauses:
                gc.enable()
