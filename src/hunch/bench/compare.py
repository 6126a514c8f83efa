"""Two reports side by side: what changed beyond noise, prompt by prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.table import Column, Table

from hunch.bench.analysis import describe_point, label, speedup, varied_axes
from hunch.bench.intervals import Interval
from hunch.bench.metrics import figures
from hunch.bench.records import Report
from hunch.errors import RequestError

MAX_NAME = 16  # columns of a method's name before it is folded
LEAST = 0.01  # a change smaller than this is not reported, however sure it is


@dataclass(frozen=True, slots=True)
class Change:
    """One method at one point, before and after."""

    method: str
    point: dict[str, Any]
    speedup: Interval  # time before over time after: above 1 is faster now
    tokens_per_pass: tuple[float | None, float | None]
    num_same_text: int
    num_answers: int

    @property
    def verdict(self) -> str:
        if self.speedup.is_above_one and self.speedup.value > 1 + LEAST:
            return "faster"
        if self.speedup.is_below_one and self.speedup.value < 1 - LEAST:
            return "slower"
        return "same"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def other_subjects(before: Report, after: Report) -> list[str]:
    """How two reports differ in what they measured, to be said before their figures are
    compared."""
    lines = []
    for name in ("model", "enlarged_to", "dtype", "activation_bits", "device", "gpu", "cpu"):
        was, now = before.environment.get(name), after.environment.get(name)
        if was != now:
            lines.append(
                f"the reports differ in {name}: {was or 'none'} before, {now or 'none'} after"
            )
    return lines


def compare(before: Report, after: Report) -> list[Change]:
    """Every method and point that both have, over the prompts that both have."""
    changes = []
    for new in after.runs:
        old = before.find(new.method, new.point)
        interval = speedup(old, new) if old is not None else None
        if old is None or interval is None:
            continue
        texts = {answer.id: answer.digest for answer in old.answers()}
        both = {a.id: a.digest for a in new.answers() if a.id in texts}
        changes.append(
            Change(
                new.method,
                new.point,
                interval,
                (figures(old)["tokens_per_pass"], figures(new)["tokens_per_pass"]),
                sum(digest == texts[name] for name, digest in both.items()),
                len(both),
            )
        )
    if not changes:
        raise RequestError(
            "the two reports have no method, point and prompt in common: "
            f"{', '.join(before.methods()) or 'nothing'} and "
            f"{', '.join(after.methods()) or 'nothing'}"
        )
    return changes


def as_table(changes: Sequence[Change]) -> Table:
    longest = max((len(label(change.method)) for change in changes), default=0)
    names = ("speed-up", "tokens\nper pass", "same\ntext", "verdict")
    table = Table(
        Column("method", overflow="fold", min_width=min(longest, MAX_NAME)),
        Column("point", overflow="fold"),
        *(Column(name, no_wrap=True) for name in names),
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    axes = varied_axes(change.point for change in changes)
    for change in changes:
        one = change.speedup
        passes = " -> ".join("-" if x is None else f"{x:.2f}" for x in change.tokens_per_pass)
        table.add_row(
            label(change.method),
            describe_point(change.point, axes),
            f"{one.value:.2f}x [{one.low:.2f}, {one.high:.2f}]",
            passes,
            f"{change.num_same_text} of {change.num_answers}",
            change.verdict,
        )
    return table


def findings(changes: Sequence[Change]) -> list[str]:
    """What became slower or faster, or wrote another text, and where."""
    found = {
        f"{word} beyond noise": [change for change in changes if change.verdict == word]
        for word in ("slower", "faster")
    }
    found["other texts than before"] = [c for c in changes if c.num_same_text < c.num_answers]
    axes, lines = varied_axes(change.point for change in changes), []
    for word, some in found.items():
        by_method: dict[str, list[str]] = {}
        for change in some:
            by_method.setdefault(label(change.method), []).append(
                describe_point(change.point, axes)
            )
        named = [
            name + (f" ({'; '.join(where)})" if axes else "") for name, where in by_method.items()
        ]
        if named:
            lines.append(f"{word}: {', '.join(named)}")
    return lines or ["nothing changed beyond noise"]
