"""The records of a measurement: answers, rounds, runs and the report that holds them.

A *run* is one method at one point (concurrency or rate, temperature, ...). It is measured in
*rounds*, in each of which all methods take their turn. A round holds one `Answer` per request.
All times are in seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hunch.errors import RequestError

FORMAT = "hunch-bench/1"


@dataclass(slots=True)
class Answer:
    """One request as its client saw it."""

    id: str = ""
    category: str = ""
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    start: float = 0.0  # when the load wanted it sent, after the round's start
    first_token: float | None = None  # from then to its first token
    end_to_end: float = 0.0  # from then to its last token
    digest: str = ""  # of its token ids, or of its text if ids are unknown
    gaps: list[float] = field(default_factory=list)  # between deliveries; []: unknown
    num_passes: int | None = None  # None: unknown
    drafted: int | None = None
    accepted: int | None = None
    is_warmup: bool = False  # part of the load, not of the figures
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first (TPOT)."""
        if self.first_token is None or self.num_tokens < 2:
            return None
        return (self.end_to_end - self.first_token) / (self.num_tokens - 1)

    @property
    def longest_gap(self) -> float | None:
        """The longest time between two deliveries (ITL), as a client saw them; None: it saw
        none."""
        return max(self.gaps, default=None)


@dataclass(slots=True)
class Round:
    """One turn of one method: how long it took, its answers, and what its engine counted."""

    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    counts: dict[str, Any] = field(default_factory=dict)  # differences of LLM.stats()
    joules: float | None = None

    @property
    def counted(self) -> list[Answer]:
        """The answers that are not for warm-up."""
        return [a for a in self.answers if not a.is_warmup and a.error is None]

    @property
    def tokens_per_second(self) -> float:
        """Of all its answers."""
        return sum(a.num_tokens for a in self.answers) / self.seconds if self.seconds else 0.0

    def add(self, other: Round) -> None:
        """Add another part of the same turn."""
        self.seconds += other.seconds
        self.answers += other.answers
        self.counts = add_counts(self.counts, other.counts)
        if other.joules is not None:
            self.joules = (self.joules or 0.0) + other.joules


Point = Mapping[str, float | str]  # axis -> value, say {"rate": 4.0, "temperature": 0.0}


@dataclass(slots=True)
class Run:
    """One method at one point."""

    method: str
    point: dict[str, Any]
    rounds: list[Round] = field(default_factory=list)

    def answers(self) -> list[Answer]:
        """The answers of all rounds that are not for warm-up."""
        return [answer for one in self.rounds for answer in one.counted]

    def errors(self) -> list[Answer]:
        return [a for r in self.rounds for a in r.answers if a.error is not None]

    def counts(self) -> dict[str, Any]:
        total: dict[str, Any] = {}
        for one in self.rounds:
            total = add_counts(total, one.counts)
        return total


@dataclass(slots=True)
class Report:
    """A whole measurement, as written to a file."""

    command: str  # "bench" or "sweep"; "kind" in the file
    settings: dict[str, Any]
    environment: dict[str, Any]
    runs: list[Run] = field(default_factory=list)

    def methods(self) -> list[str]:
        return list(dict.fromkeys(run.method for run in self.runs))

    def points(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for run in self.runs:
            if run.point not in found:
                found.append(run.point)
        return found

    def find(self, method: str, point: Point) -> Run | None:
        alike = (run for run in self.runs if run.method == method and run.point == point)
        return next(alike, None)

    def to_json(self) -> dict[str, Any]:
        runs = [asdict(run) for run in self.runs]
        for run in runs:
            for one in run["rounds"]:
                one["answers"] = [_small(answer) for answer in one["answers"]]
        return {
            "format": FORMAT,
            "kind": self.command,
            "settings": self.settings,
            "environment": self.environment,
            "runs": runs,
        }

    def save(self, path: Path) -> None:
        """Replace the file at once, so that it is whole even if the program is stopped."""
        new = path.with_name(path.name + ".new")
        new.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")
        new.replace(path)


def _small(answer: dict[str, Any]) -> dict[str, Any]:
    """The record without unknown values, and with times to the microsecond."""
    kept = {name: value for name, value in answer.items() if value not in (None, [], "", False)}
    for name in ("start", "first_token", "end_to_end"):
        if isinstance(kept.get(name), float):
            kept[name] = round(kept[name], 6)
    if "gaps" in kept:
        kept["gaps"] = [round(gap, 6) for gap in kept["gaps"]]
    return kept


def load_report(path: Path) -> Report:
    """A report from its file; errors in the file are reported in one line."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RequestError(f"{path}: no such file") from None
    except (json.JSONDecodeError, UnicodeDecodeError, OSError) as error:
        raise RequestError(f"{path}: not a report of hunch bench ({error})") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise RequestError(f"{path}: not a report of hunch bench (no format {FORMAT!r} in it)")
    try:
        return Report(
            command=found["kind"],
            settings=found["settings"],
            environment=found["environment"],
            runs=[_run(run) for run in found["runs"]],
        )
    except (KeyError, TypeError) as error:
        raise RequestError(f"{path}: the report is damaged ({error})") from None


def _run(found: dict[str, Any]) -> Run:
    rounds = [
        Round(**{**one, "answers": [Answer(**answer) for answer in one["answers"]]})
        for one in found["rounds"]
    ]
    return Run(method=found["method"], point=found["point"], rounds=rounds)


# The counts of LLM.stats(), and of captured steps, that add up over rounds.
COUNTED = (
    "steps", "drafted", "accepted", "draft_seconds", "target_seconds", "generation_tokens",
    "prompt_tokens", "num_steps", "num_drafts", "busy_seconds", "time_saved_seconds",
    "num_preemptions", "guessed_per_position", "accepted_per_position", "drafters",
    "captured",
)  # fmt: skip


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The difference between two stats of an engine."""
    return {name: _minus(after[name], before.get(name)) for name in COUNTED if name in after}


def add_counts(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two such differences added up."""
    names = dict.fromkeys([*one, *other])
    return {name: _plus(one.get(name), other.get(name)) for name in names}


def _minus(after: Any, before: Any) -> Any:
    if isinstance(after, Mapping):
        before = before or {}
        return {name: _minus(value, before.get(name)) for name, value in after.items()}
    if isinstance(after, Sequence):
        before = list(before or ())
        before += [0] * (len(after) - len(before))
        return [a - b for a, b in zip(after, before, strict=True)]
    return after - (before or 0)


def _plus(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, Mapping):
        return add_counts(one, other)
    if isinstance(one, Sequence):
        size = max(len(one), len(other))
        first, second = ([*some, *[0] * (size - len(some))] for some in (one, other))
        return [a + b for a, b in zip(first, second, strict=True)]
    return one + other
