"""CUDA graphs: a function captured once and replayed. No other file uses torch's graphs.

Without a GPU (in tests) a graph simply calls its function, the body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import torch

from hunch.garbage import without_collector

TIMED = 5  # replays by which a graph is timed

# In a rehearsal: how bodies are run instead of being captured.
_rehearse: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar(
    "rehearse", default=None
)


@contextmanager
def rehearsed(run: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    """In this context graphs are not captured: `run` runs their bodies once."""
    token = _rehearse.set(run)
    try:
        yield
    finally:
        _rehearse.reset(token)


class Graph:
    """A body with fixed buffers: run once to compile, captured, then replayed."""

    def __init__(
        self,
        body: Callable[[], Any],
        device: torch.device,
        pool: Any,
        # Called each time before it runs, with whether it is captured now.
        before: Callable[[bool], None] | None = None,
    ) -> None:
        self._body, self._graph, self._before = body, None, before
        if (rehearse := _rehearse.get()) is not None:
            self.outputs = rehearse(body)
            return
        if before is not None:
            before(True)
        self.outputs = body()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            self._graph = torch.cuda.CUDAGraph()
            # Collecting the graph of another engine would break this capture.
            with without_collector(), torch.cuda.graph(self._graph, pool=pool):
                self.outputs = body()

    def replay(self) -> Any:
        if self._before is not None:
            self._before(False)
        if self._graph is None:
            self.outputs = self._body()
        else:
            self._graph.replay()
        return self.outputs


def seconds_of(graph: Graph, device: torch.device) -> float:
    """Seconds of a replay on the device, the least of a few; 0 without a GPU."""
    if device.type != "cuda" or _rehearse.get() is not None:
        return 0.0
    events = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]  # type: ignore[no-untyped-call]
    graph.replay()  # warms caches
    for event in events:
        event.record()
        if event is not events[-1]:
            graph.replay()
    events[-1].synchronize()
    return float(min(first.elapsed_time(last) for first, last in pairwise(events))) / 1e3


class StepTimer:
    """Seconds on the device from here to `end`, once both were passed; 0 without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[Any] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()

    def end(self) -> None:
        for event in self._events[1:]:
            event.record()

    def seconds(self) -> float:
        if not self._events:
            return 0.0
        first, last = self._events
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3


def new_pool(device: torch.device) -> Any:
    """A memory pool that all graphs share, as only one of them runs at a time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
