"""Log-probabilities of whole vocabularies: so many values that others must not wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sized
from typing import TypeVar

from hunch.step.collector import without_collector
from hunch.types import RequestOutput

T = TypeVar("T")
MANY = 10_000  # scores that take some tens of milliseconds to put into words


async def beside(num_scores: int, work: Callable[[], T]) -> T:
    """What the work gives; where it is long, the other requests go on meanwhile."""
    if num_scores < MANY:
        return work()

    def run() -> T:
        with without_collector():  # all that is made is kept: looking for garbage triples the time
            return work()

    return await asyncio.to_thread(run)


def scores_in(output: RequestOutput) -> int:
    """How many log-probabilities a request's answers and prompt have."""
    found = count(output.prompt_logprobs or ())
    return found + sum(count(choice.logprobs or ()) for choice in output.outputs)


def count(entries: Iterable[Sized | None]) -> int:
    return sum(len(entry) for entry in entries if entry is not None)
