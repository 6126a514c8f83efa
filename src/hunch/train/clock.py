"""Keeps to the minutes a user gave, over all stages of a job and all its starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from hunch.train.files import read_json, write_json

# Parts of stages, and their names in the account of a job's time.
LOAD, CAPTURE, READ, REPLAY, WRITE = "load", "capture", "read", "replay", "write"
OTHER = "other"  # time that belongs to no stage
_TIMED = 5.0  # seconds of the target's passes that are timed


def in_words(minutes: float) -> str:
    """The time in words, for a user."""
    return "1 minute" if minutes == 1 else f"{minutes:.3g} minutes"


def account_text(spent: Mapping[str, float]) -> str:
    """Where the seconds went, as one line."""
    parts = [f"{name} {seconds:.0f}" for name, seconds in spent.items() if round(seconds)]
    return f"of {sum(spent.values()):.0f} s: {', '.join(parts)}"


class Clock:
    """Knows the seconds of each stage and of its parts. If a job is started again, they add up."""

    def __init__(self, path: Path | None = None, minutes: float = 0.0) -> None:
        """Without a path nothing is stored."""
        self.path, self.seconds = path, 60.0 * minutes
        # By "stage", and by "stage/part", which the stage's own figure leaves out.
        self.spent: dict[str, float] = {} if path is None else read_json(path) or {}
        self._open: list[str] = []  # stages and parts that are under way, the innermost last
        self._began = 0.0  # of the time that is not in `spent` yet

    @property
    def gone(self) -> float:
        """Seconds spent so far."""
        running = perf_counter() - self._began if self._open else 0.0
        return sum(self.spent.values()) + running

    def until(self, share: float) -> float:
        """Seconds that are left before this share of all the time is gone."""
        return max(share * self.seconds - self.gone, 0.0)

    def of(self, stage: str) -> float:
        """Seconds of a stage with all its parts."""
        return sum(s for key, s in self.spent.items() if key.split("/")[0] == stage)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time spent within counts for this stage."""
        try:
            with self._timed(name):
                yield
        finally:
            if self.path is not None:
                write_json(self.path, self.spent)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time spent within counts for this part of the stage, and not for the part around it."""
        with self._timed(f"{self._stage}/{name}"):
            yield

    def move(self, name: str, seconds: float) -> None:
        """Count so many seconds for this part, and not for the stage or part that is under way."""
        now, key = self._open[-1], f"{self._stage}/{name}"
        self.spent[now] = self.spent.get(now, 0.0) - seconds
        self.spent[key] = self.spent.get(key, 0.0) + seconds

    @property
    def _stage(self) -> str:
        return next((key for key in reversed(self._open) if "/" not in key), OTHER)

    @contextmanager
    def _timed(self, key: str) -> Iterator[None]:
        self._count()
        self._open.append(key)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    def _count(self) -> None:
        """Count the time until now for the stage or part that is under way."""
        now = perf_counter()
        if self._open:
            key = self._open[-1]
            self.spent[key] = self.spent.get(key, 0.0) + now - self._began
        self._began = now

    def account(self) -> dict[str, float]:
        """Seconds by what took them, the most first: parts, over all stages, and the rest of each
        stage."""
        found = dict[str, float]()
        for key, seconds in self.spent.items():
            name = key.split("/")[-1]
            found[name] = found.get(name, 0.0) + seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


class Rates:
    """The target's speed over new texts, and the seconds that were no steps of the student."""

    def __init__(self) -> None:
        self.num_tokens, self.seconds = 0, 0.0
        self.num_read = 0  # tokens of all passes, timed or not
        self.looking = 0.0  # seconds of looks at held-out answers
        self.saving = 0.0  # of checkpoints

    @property
    def is_known(self) -> bool:
        """Whether enough was timed: to wait for a device at every step costs a little."""
        return self.seconds > _TIMED

    @property
    def per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)

    def target(self, num_tokens: int, seconds: float | None) -> None:
        """Note a pass over so many tokens; None: it was launched, and nothing waited for it."""
        self.num_read += num_tokens
        if seconds is not None:
            self.num_tokens += num_tokens
            self.seconds += seconds

    @property
    def reading(self) -> float:
        """Seconds of all passes, by the speed of the timed ones."""
        return self.num_read / self.per_second if self.num_tokens else 0.0

    def beside(self) -> dict[str, float]:
        """Seconds that were no steps of the student."""
        return {READ: self.reading, REPLAY: self.looking, WRITE: self.saving}
