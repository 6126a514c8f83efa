"""When does speculation pay? Speed-up, capacity and cost from sizes alone, by a roofline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

from hunch.bench.metrics import expected_tokens, figures
from hunch.bench.records import Report, Run
from hunch.bench.roofline import Machine, Size
from hunch.errors import ConfigError, RequestError

MAX_LENGTH = 16
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FOR_EVER = 400  # requests after half of which a load is taken to be steady
LONG = 20_000  # requests from which on a load that ends is as good as one that does not
# Where nothing is known: a draft of the same family on chat; lookups, which had 1.84 tokens per
# pass at one request on the 48 prompts of docs/benchmarks.md, as 1 / (1 - 0.45) has.
ACCEPTANCE, LOOKUP_ACCEPTANCE = 0.7, 0.45
LOOKUPS = frozenset({"ngram", "suffix", "prediction", "recycling"})
TOKEN_COSTS = [2 ** (n / 4) for n in range(-8, 57)]  # times the roofline's; a CPU's are large


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked for: tokens of a prompt and of an answer, requests per second, how long."""

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
    """A draft length at a batch size, and what it brings."""

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
    """Everything that decides: the machine, the models, how often a guess is right."""

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
        """What drafts of this length do for this many requests at once."""
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

    def second_of(self, rows: int, is_plain: bool) -> float:
        """Share of a second that a request takes at this batch, reading its prompt included."""
        choice = self.choice(rows, 0) if is_plain else self.best(rows)
        decode = self.work.answer / choice.tokens_per_second
        return decode + self.machine.prefill_seconds(self.target, self.work.prompt)

    def capacity(self, is_plain: bool) -> float:
        """Requests per second one machine can serve, at the batch that serves the most."""
        sizes = [b for b in BATCHES if b <= self.most_rows] or [self.most_rows]
        return max(1 / self.second_of(rows, is_plain) for rows in sizes)

    def least_gpu_hours(self, is_plain: bool) -> float:
        """GPU hours of a million tokens on machines that have as much to do as they can."""
        per_second = self.capacity(is_plain) * self.work.answer
        return self.machine.num_gpus * 1e6 / per_second / 3600

    def at_rate(self, is_plain: bool) -> Load:
        """Requests that come evenly at the rate asked for: what each takes, step by step."""
        assert self.work.rate is not None
        limit = self.capacity(is_plain)
        machines = max(1, math.ceil(self.work.rate / (0.95 * limit)))
        rate = self.work.rate / machines

        @cache
        def choose(rows: int) -> Choice:
            return self.choice(rows, 0) if is_plain else self.best(rows)

        took = self.answers_at(rate, choose)
        if self.work.seconds is None:
            took = took[len(took) // 2 :]  # by then as many come as go
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
    """What becomes of a rate."""

    machines: int
    rows: float  # requests under way on each
    seconds: float  # to answer a request, after its prompt
    choice: Choice
    busy: float  # share of what a machine could serve
    gpu_hours: float  # of all machines' GPUs while they make a million tokens


def calibrate(
    report: Report, machine: Machine, target: Size, *, has_draft: bool = False
) -> tuple[Machine, float | None]:
    """The machine as a report of hunch bench found it, and how often guesses were right.

    `target` is the model that was measured. The roofline is scaled so that plain decoding takes
    what it was measured to take; a further token costs what it cost in the passes that checked
    some, where the report has such. The acceptance is the one that gives the measured tokens per
    pass for the drafts that were made: by a network if `has_draft`, else by lookups, if there are
    any.
    """
    passes = [one for run in report.runs if "concurrency" in run.point for one in _passes(run)]
    if not any(one.tokens == 1 for one in passes):
        raise RequestError(
            "the report has no plain decoding (off) with a concurrency to calibrate by: run "
            "hunch bench --json, or hunch bench sweep --concurrency 1,8"
        )
    fitted = [_scaled(machine, target, passes, cost) for cost in TOKEN_COSTS]
    if all(one.tokens == 1 for one in passes):
        fitted = [_scaled(machine, target, passes, 1.0)]
    best = min(fitted, key=lambda one: _distance(one, target, passes))
    return best, _acceptance(report, has_draft)


@dataclass(frozen=True, slots=True)
class _Pass:
    """What a run measured of the target's passes."""

    rows: int
    tokens: float  # of each row
    context: float
    seconds: float


def _passes(run: Run) -> list[_Pass]:
    """One, or none where the run does not tell; without the time that drafting took."""
    found, counts, answers = figures(run), run.counts(), run.answers()
    seconds, is_plain = found["per_token"]["p50"], run.method == "off"
    if seconds is None or not (is_plain or counts.get("num_drafts")):
        return []
    context = median(answer.num_prompt_tokens + answer.num_tokens / 2 for answer in answers)
    rows = int(run.point["concurrency"])
    if is_plain:
        return [_Pass(rows, 1, context, seconds)]
    steps, per_pass = counts.get("steps"), found["tokens_per_pass"]
    if not steps or not per_pass:
        return []
    overhead = found.get("draft_overhead") or 0.0
    tokens = 1 + counts["drafted"] / steps
    return [_Pass(rows, tokens, context, seconds * per_pass / (1 + overhead))]


def _scaled(machine: Machine, target: Size, passes: Sequence[_Pass], cost: float) -> Machine:
    """With tokens that cost so many times the roofline's, and plain passes as they were."""
    machine = machine.calibrated(1.0, cost)
    plain = [one for one in passes if one.tokens == 1]
    return machine.calibrated(median(_ratio(machine, target, one) for one in plain), cost)


def _ratio(machine: Machine, target: Size, one: _Pass) -> float:
    return one.seconds / machine.step_seconds(target, one.rows, one.tokens, one.context)


def _distance(machine: Machine, target: Size, passes: Sequence[_Pass]) -> float:
    return sum(abs(math.log(_ratio(machine, target, one))) for one in passes)


def size_of(report: Report) -> Size | None:
    """The model that a report measured; None where it does not say: a server's, or an older one."""
    found = report.environment.get("size")
    return None if found is None else Size(**found)


def _acceptance(report: Report, has_draft: bool) -> float | None:
    """The chance that explains the tokens per pass of the method with the most drafts."""
    drafted = [run for run in report.runs if run.counts().get("num_drafts")]
    drafted = [run for run in drafted if _name(run) != "synthetic"]  # what was wished for
    if not drafted:
        return None
    alike = [run for run in drafted if (_name(run) not in LOOKUPS) == has_draft]
    most = [run.counts() for run in alike or drafted]
    counts = max(most, key=lambda counts: int(counts["num_drafts"]))
    num_drafts = counts["num_drafts"]
    length = round(counts["drafted"] / num_drafts)
    # Passes without a draft count too: what is planned drafts in every pass.
    wanted = 1 + counts["accepted"] / max(counts.get("steps", 0), num_drafts)
    low, high = 0.0, 0.999
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if expected_tokens(middle, max(length, 1)) < wanted else (low, middle)
        )
    return (low + high) / 2


def _name(run: Run) -> str:
    return run.method.partition(":")[0]


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
