"""Bars on the terminal when a person watches; a line now and then when nobody does."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

Advance = Callable[[float, str], None]
_EVERY = 15.0  # seconds between two lines,
_FIRST = 3.0  # and before the first one: a rate over less time says nothing


class Progress:
    """A bar for each stage, with its most important figures behind it."""

    def __init__(self, is_quiet: bool = False, peak: float | None = None) -> None:
        """`peak`: FLOP per second of the device by its maker, where it is known."""
        self.is_quiet, self.peak = is_quiet, peak

    @contextmanager
    def stage(self, name: str, total: float) -> Iterator[Advance]:
        """`advance(done, words)` moves the bar."""
        from rich.console import Console

        console = Console(stderr=True)
        if self.is_quiet:
            yield lambda done, words: None
            return
        if not console.is_terminal:
            yield _Lines(name, total)
            return
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
        with Bars(*columns, TextColumn("{task.fields[words]}"), console=console) as bars:
            task = bars.add_task(name, total=total, words="")
            yield lambda done, words: bars.update(task, completed=done, words=words)


class _Lines:
    """Lines for a pipe or a log: the progress, its figures, and the time left."""

    def __init__(self, name: str, total: float) -> None:
        self.name, self.total = name, total
        self.first: tuple[float, float] | None = None  # the first time, and the progress then
        self.shown, self.done = monotonic() - _EVERY + _FIRST, 0.0

    def __call__(self, done: float, words: str) -> None:
        now = monotonic()
        if self.first is None:
            self.first = now, done
        is_end = done >= self.total > self.done  # what still runs past it is told like the rest
        self.done = done
        if now - self.shown < _EVERY and not is_end:
            return
        self.shown = now
        began, start = self.first
        left = ""
        if start < done < self.total:
            left = f", {(now - began) * (self.total - done) / (done - start):.0f} s left"
        share = min(done / self.total, 1.0)
        print(f"{self.name} {share:.0%}{left}: {words}", file=sys.stderr, flush=True)
