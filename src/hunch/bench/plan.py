"""When does speculation pay? Speed-up, capacity and cost from sizes alone, by a roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from hunch.bench.metrics import expected_tokens
from hunch.bench.records import Report
from hunch.bench.roofline import Machine, Size
from hunch.errors import ConfigError

MAX_LENGTH = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FOR_EVER = 400  # requests to simulate; after half of them the load is taken to be steady
LONG = 20_000  # a load of so many requests counts as one that does not end
# Used if nothing is known: a draft of the same family on chat; lookups, which had 1.84 tokens per
# pass at one request on the 48 prompts of docs/benchmarks.md, about 1 / (1 - 0.45).
ACCEPTANCE, LOOKUP_ACCEPTANCE = 0.7, 0.45


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests: tokens of a prompt and of an answer, requests per second, and for how long."""

    prompt: int = 512
    answer: int = 256
    rate: float | None = None
    seconds: float | None = None  # that requests come; None: for ever

    @property
    def context(self) -> float:
        """Tokens a sequence has on average while it decodes."""
        return self.prompt + self.answer / 2


@dataclass(frozen=True, slots=True)
class Choice:
    """A draft length at a batch size, and its gain."""

    rows: int
    length: int  # 0: plain decoding
    tokens_per_pass: float
    pass_seconds: float
    plain_seconds: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_pass * self.plain_seconds / self.pass_seconds

    @property
    def tokens_per_second(self) -> float:
        return self.rows * self.tokens_per_pass / self.pass_seconds


@dataclass(frozen=True, slots=True)
class Planner:
    """All inputs of a plan: the machine, the models, how often a guess is right."""

    machine: Machine
    target: Size
    draft: Size | None  # None: lookups, which cost nothing
    acceptance: float
    work: Workload

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance < 1:
            raise ConfigError(f"--acceptance {self.acceptance} must be from 0 to below 1")
        if not self.most_rows:
            raise ConfigError(
                f"{self.machine.name} has {self.machine.memory_bytes / 1e9:.0f} GB: too little for "
                f"{self.all_weights / 1e9:.0f} GB of weights and the KV cache; give more GPUs "
                "(--tp), a smaller --dtype or a smaller --draft"
            )

    @property
    def most_rows(self) -> int:
        together = replace(self.target, weight_bytes=self.all_weights)
        return self.machine.most_rows(together, self.work.context + self.work.answer / 2)

    @property
    def all_weights(self) -> float:
        """Bytes of the target's weights and the draft's."""
        return self.target.weight_bytes + (self.draft.weight_bytes if self.draft else 0.0)

    def plain_seconds(self, rows: float) -> float:
        return self.machine.step_seconds(self.target, rows, 1, self.work.context)

    def choice(self, rows: int, length: int) -> Choice:
        """The gain of drafts of this length with this many requests at once."""
        context = self.work.context
        seconds = self.machine.step_seconds(self.target, rows, length + 1, context)
        if self.draft is not None and length:
            seconds += length * self.machine.step_seconds(self.draft, rows, 1, context)
        per_pass = expected_tokens(self.acceptance, length)
        return Choice(rows, length, per_pass, seconds, self.plain_seconds(rows))

    def best(self, rows: int) -> Choice:
        """The length with the most tokens per second, zero among them."""
        return max(
            (self.choice(rows, length) for length in range(MAX_LENGTH + 1)),
            key=lambda choice: choice.tokens_per_second,
        )

    def inversion(self, length: int) -> int | None:
        """The fewest requests at once with which drafts of this length cost time."""
        for rows in range(1, max(self.most_rows, 1) + 1):
            if self.choice(rows, length).speedup < 1:
                return rows
        return None

    def capacity(self, is_plain: bool) -> float:
        """Requests per second one machine can serve, at the batch that serves the most."""
        sizes = [b for b in BATCHES if b <= self.most_rows] or [self.most_rows]
        choices = [self.choice(rows, 0) if is_plain else self.best(rows) for rows in sizes]
        decoding = min(self.work.answer / choice.tokens_per_second for choice in choices)
        return 1 / (decoding + self.machine.prefill_seconds(self.target, self.work.prompt))

    def least_gpu_hours(self, is_plain: bool) -> float:
        """GPU hours of a million tokens on fully used machines."""
        per_second = self.capacity(is_plain) * self.work.answer
        return self.machine.num_gpus * 1e6 / per_second / 3600

    def at_rate(self, is_plain: bool) -> Load:
        """Simulate, step by step, requests that come evenly at the given rate."""
        assert self.work.rate is not None
        limit = self.capacity(is_plain)
        machines = max(1, math.ceil(self.work.rate / (0.95 * limit)))
        rate = self.work.rate / machines

        @cache
        def choose(rows: int) -> Choice:
            return self.choice(rows, 0) if is_plain else self.best(rows)

        took = self.answers_at(rate, choose)
        if self.work.seconds is None:
            took = took[len(took) // 2 :]  # by then as many end as come
        seconds = sum(took) / len(took)
        rows = rate * seconds
        hours = machines * self.machine.num_gpus * 1e6 / (self.work.rate * self.work.answer) / 3600
        return Load(machines, rows, seconds, choose(self._rows(rows)), rate / limit, hours)

    def _rows(self, rows: float) -> int:
        return max(1, min(round(rows), self.most_rows))

    def answers_at(self, rate: float, choose: Callable[[int], Choice]) -> list[float]:
        """Seconds from the first token of each answer to its last, as requests come evenly.

        Prompts that came during a step are read in one pass before the next.
        """
        work, machine, target = self.work, self.machine, self.target
        count = FOR_EVER
        if work.seconds is not None and rate * work.seconds < LONG:
            count = max(round(rate * work.seconds), 1)
        came, now = 0, 0.0
        left: dict[int, float] = {}  # tokens, by request
        first: dict[int, float] = {}  # when its first token came
        took: dict[int, float] = {}
        while came < count or left:
            if not left:
                now = max(now, came / rate)
            new = range(came, min(count, max(int(now * rate + 1e-9) + 1, came)))
            came = new.stop
            if new:
                now += machine.reading_seconds(target, work.prompt * len(new))
                left |= dict.fromkeys(new, work.answer - 1.0)
                first |= dict.fromkeys(new, now)
            choice = choose(self._rows(len(left)))
            now += choice.pass_seconds
            for request in list(left):
                left[request] -= choice.tokens_per_pass
                if left[request] <= 0.0:
                    took[request] = now - first[request]
                    del left[request]
        return [took[request] for request in sorted(took)]


@dataclass(frozen=True, slots=True)
class Load:
    """How a rate is served."""

    machines: int
    rows: float  # requests under way on each
    seconds: float  # to answer a request, after its prompt
    choice: Choice
    busy: float  # share of what a machine could serve
    gpu_hours: float  # of all machines' GPUs while they make a million tokens


def size_of(report: Report) -> Size | None:
    """The model that a report measured; None: unknown, as in reports of servers and in older
    ones."""
    found = report.environment.get("size")
    return None if found is None else Size(**found)


def table(planner: Planner, batches: Sequence[int] = BATCHES) -> list[dict[str, Any]]:
    """By number of requests at once: plain, and the best draft length."""
    rows = []
    for count in batches:
        if count > planner.most_rows:
            break
        best = planner.best(count)
        plain = planner.choice(count, 0)
        rows.append(
            {
                "requests_at_once": count,
                "plain_tokens_per_second": plain.tokens_per_second,
                "tokens_per_second": best.tokens_per_second,
                "draft_length": best.length,
                "tokens_per_pass": best.tokens_per_pass,
                "speedup": best.speedup,
                "plain_ms_per_token": 1e3 * plain.pass_seconds,
                "ms_per_token": 1e3 * best.pass_seconds / best.tokens_per_pass,
            }
        )
    return rows
