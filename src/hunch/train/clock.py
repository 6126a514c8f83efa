"""The minutes a user gave, over all stages of a job and over all its starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

from hunch.train.files import read_json, write_json

# Parts of stages, by what they are called in the account of a job's time.
LOAD, CAPTURE, READ, REPLAY, WRITE = "load", "capture", "read", "replay", "write"
OTHER = "other"  # what belongs to no stage
_TIMED = 5.0  # seconds of the target's passes that are timed


def in_words(minutes: float) -> str:
    """How long, for a user."""
    return "1 minute" if minutes == 1 else f"{minutes:.3g} minutes"


def account_text(spent: Mapping[str, float]) -> str:
    """Where the seconds went, as one line."""
    parts = [f"{name} {seconds:.0f}" for name, seconds in spent.items() if round(seconds)]
    return f"of {sum(spent.values()):.0f} s: {', '.join(parts)}"


class Clock:
    """Knows what each stage took, and what parts of it did; a job that is started again goes on
    counting."""

    def __init__(self, path: Path | None = None, minutes: float = 0.0) -> None:
        """Without a path nothing is kept: for work that nobody accounts for."""
        self.path, self.seconds = path, 60.0 * minutes
        # By "stage", and by "stage/part" for what the stage's own figure leaves out.
        self.spent: dict[str, float] = {} if path is None else read_json(path) or {}
        self._open: list[str] = []  # stages and parts that are under way, the innermost last
        self._began = 0.0  # what is not in `spent` yet

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
        """What happens within counts for this stage."""
        try:
            with self._timed(name):
                yield
        finally:
            if self.path is not None:
                write_json(self.path, self.spent)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """What happens within counts for this part of the stage, whatever part it is in."""
        with self._timed(f"{self._stage}/{name}"):
            yield

    def move(self, name: str, seconds: float) -> None:
        """So much of the stage's time, or of the part's that is under way, was for this part."""
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
        """Give the time until now to what is under way."""
        now = perf_counter()
        if self._open:
            key = self._open[-1]
            self.spent[key] = self.spent.get(key, 0.0) + now - self._began
        self._began = now

    def account(self) -> dict[str, float]:
        """Seconds by what they went to: parts of all stages together, and what stages did beside
        them; the most first."""
        found = dict[str, float]()
        for key, seconds in self.spent.items():
            name = key.split("/")[-1]
            found[name] = found.get(name, 0.0) + seconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))


class Rates:
    """The target's speed over new texts, and the seconds that no step of the student took."""

    def __init__(self) -> None:
        self.num_tokens, self.seconds = 0, 0.0
        self.num_read = 0  # tokens of all passes, timed or not
        self.looking = 0.0  # seconds of looks at held-out answers
        self.saving = 0.0  # of checkpoints

    @property
    def is_known(self) -> bool:
        """Long enough timed: to wait for a device at every step costs a little."""
        return self.seconds > _TIMED

    @property
    def per_second(self) -> float:
        return self.num_tokens / max(self.seconds, 1e-9)

    def target(self, num_tokens: int, seconds: float | None) -> None:
        """A pass over so many tokens; None: it was launched, and nobody waited for it."""
        self.num_read += num_tokens
        if seconds is not None:
            self.num_tokens += num_tokens
            self.seconds += seconds

    @property
    def reading(self) -> float:
        """Seconds of all passes, by the speed of the timed ones."""
        return self.num_read / self.per_second if self.num_tokens else 0.0

    def beside(self) -> dict[str, float]:
        """Seconds of what was no step of the student."""
        return {READ: self.reading, REPLAY: self.looking, WRITE: self.saving}
