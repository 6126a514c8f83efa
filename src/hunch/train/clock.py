"""The minutes a user gave, over all stages of a job and over all its starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from hunch.train.files import read_json, write_json


def in_words(minutes: float) -> str:
    """How long, for a user."""
    return "1 minute" if minutes == 1 else f"{minutes:.3g} minutes"


class Clock:
    """Knows what each stage took; a job that is started again goes on counting."""

    def __init__(self, path: Path, minutes: float) -> None:
        self.path, self.seconds = path, 60.0 * minutes
        self.spent: dict[str, float] = read_json(path) or {}
        self._stage: str | None = None
        self._began = 0.0

    @property
    def gone(self) -> float:
        """Seconds spent so far."""
        running = perf_counter() - self._began if self._stage is not None else 0.0
        return sum(self.spent.values()) + running

    def until(self, share: float) -> float:
        """Seconds that are left before this share of all the time is gone."""
        return max(share * self.seconds - self.gone, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """What happens within counts for this stage."""
        self._stage, self._began = name, perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + perf_counter() - self._began
            self._stage = None
            write_json(self.path, self.spent)
