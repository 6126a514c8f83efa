"""Bars on the terminal when a person watches; lines in the log when nobody does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("hunch")

Advance = Callable[[float, str], None]


class Progress:
    """One bar per stage, with what matters written behind it."""

    def __init__(self, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet

    @contextmanager
    def stage(self, name: str, total: float) -> Iterator[Advance]:
        """`advance(done, words)` moves the bar."""
        from rich.console import Console

        console = Console(stderr=True)
        if self.is_quiet or not console.is_terminal:
            yield lambda done, words: log.info("%s %.0f of %.0f: %s", name, done, total, words)
            return
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
        with Bars(*columns, TextColumn("{task.fields[words]}"), console=console) as bars:
            task = bars.add_task(name, total=total, words="")
            yield lambda done, words: bars.update(task, completed=done, words=words)
