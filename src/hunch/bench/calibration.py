"""What the planner learns from a report of hunch bench: how fast its machine is, and how often
guesses are right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from hunch.bench.metrics import expected_tokens, figures
from hunch.bench.records import Answer, Report, Run
from hunch.bench.roofline import Machine, Size
from hunch.errors import RequestError

LOOKUPS = frozenset({"ngram", "suffix", "prediction", "recycling"})
TOKEN_COSTS = [2 ** (n / 4) for n in range(-8, 57)]  # times the roofline's; a CPU's are large


def calibrate(
    report: Report, machine: Machine, target: Size, *, has_draft: bool = False
) -> tuple[Machine, float | None]:
    """The machine as a report of hunch bench found it, and how often guesses were right.

    `target` is the model that was measured. The roofline is scaled so that plain decoding takes
    what it was measured to take; a further token costs what it cost in the passes that checked
    some, where the report has such. The acceptance is the one that gives the measured tokens per
    pass for the drafts that were made: by a network if `has_draft`, else by lookups, if there are
    any. Of open loads the number of requests under way is used. A fixed number of requests at once
    is more exact, so if a report has both, only those are used.
    """
    passes = [one for run in report.runs if "concurrency" in run.point for one in _passes(run)]
    if not any(one.tokens == 1 for one in passes):
        passes = [one for run in report.runs if "rate" in run.point for one in _passes(run)]
    if not any(one.tokens == 1 for one in passes):
        raise RequestError(
            "the report has no plain decoding (off) with answers of two tokens or more to "
            "calibrate by: run hunch bench sweep --speculate off,auto --concurrency 1,8, which "
            "writes sweep.json"
        )
    fitted = [_scaled(machine, target, passes, cost) for cost in TOKEN_COSTS]
    if all(one.tokens == 1 for one in passes):
        fitted = [_scaled(machine, target, passes, 1.0)]

    def distance(one: Machine) -> float:
        return sum(abs(math.log(_ratio(one, target, some))) for some in passes)

    best = min(fitted, key=distance)
    return best, _acceptance(report, has_draft)


@dataclass(frozen=True, slots=True)
class _Pass:
    """A run's measurements of the target's passes."""

    rows: float
    tokens: float  # of each row
    context: float
    seconds: float
    # Prompts read between passes: their number per pass, and their tokens.
    num_reads: float = 0.0
    read_tokens: float = 0.0


def _passes(run: Run) -> list[_Pass]:
    """The run's passes, without the time for drafting; empty if the run does not have them."""
    found, counts, answers = figures(run), run.counts(), run.answers()
    is_plain = run.method == "off"
    if found["per_token"]["p50"] is None or not (is_plain or counts.get("num_drafts")):
        return []
    per_pass, tokens, overhead = 1.0, 1.0, 0.0
    if not is_plain:
        steps, per_pass = counts.get("steps"), found["tokens_per_pass"]
        if not steps or not per_pass:
            return []
        tokens, overhead = 1 + counts["drafted"] / steps, found.get("draft_overhead") or 0.0
    context = median(answer.num_prompt_tokens + answer.num_tokens / 2 for answer in answers)
    if "concurrency" in run.point:
        rows, seconds = float(run.point["concurrency"]), found["per_token"]["p50"]
        return [_Pass(rows, tokens, context, seconds * per_pass / (1 + overhead))]
    met = _met_with(run)
    seconds = met.seconds * per_pass / (1 + overhead)
    reads = met.num_reads * per_pass
    return [replace(met, tokens=tokens, context=context, seconds=seconds, num_reads=reads)]


def _met_with(run: Run) -> _Pass:
    """Means over the passes in which answers decoded, for all their tokens after the first."""
    counted = [
        (answer, span, [(one, _span(one)) for one in turn.answers if one.first_token is not None])
        for turn in run.rounds
        for answer in turn.counted
        if answer.per_token is not None
        for span in [_span(answer)]
    ]
    seconds = sum(last - first for _, (first, last), _ in counted)
    num_tokens = sum(answer.num_tokens - 1 for answer, _, _ in counted)
    shared, reads, prompts = 0.0, 0, 0
    for answer, (first, last), others in counted:
        shared += sum(max(min(last, end) - max(first, begin), 0.0) for _, (begin, end) in others)
        came = sorted((begin, one.num_prompt_tokens) for one, (begin, _) in others)
        came = [one for one in came if first < one[0] <= last]
        prompts += sum(num_prompt_tokens for _, num_prompt_tokens in came)
        before = first
        for begin, _ in came:  # prompts of one pass have their first tokens at the same time
            if begin - before > (answer.per_token or 0.0) / 2:
                reads, before = reads + 1, begin
    reading = reads / num_tokens, prompts / max(reads, 1)
    return _Pass(shared / seconds, 1.0, 0.0, seconds / num_tokens, *reading)


def _span(answer: Answer) -> tuple[float, float]:
    """The time from an answer's first token to its last."""
    return answer.start + (answer.first_token or 0.0), answer.start + answer.end_to_end


def _scaled(machine: Machine, target: Size, passes: Sequence[_Pass], cost: float) -> Machine:
    """The machine with tokens that cost so many times the roofline's, and plain passes as
    measured."""
    machine = replace(machine, scale=1.0, token_cost=cost)
    plain = [one for one in passes if one.tokens == 1]
    return replace(machine, scale=median(_ratio(machine, target, one) for one in plain))


def _ratio(machine: Machine, target: Size, one: _Pass) -> float:
    seconds = machine.step_seconds(target, one.rows, one.tokens, one.context)
    if one.num_reads:
        seconds += one.num_reads * machine.reading_seconds(target, one.read_tokens)
    return one.seconds / seconds


def _acceptance(report: Report, has_draft: bool) -> float | None:
    """The chance that explains the tokens per pass of the method with the most drafts."""
    drafted = [run for run in report.runs if run.counts().get("num_drafts")]
    drafted = [run for run in drafted if _name(run) != "synthetic"]  # its acceptance was chosen
    if not drafted:
        return None
    alike = [run for run in drafted if (_name(run) not in LOOKUPS) == has_draft]
    most = [run.counts() for run in alike or drafted]
    counts = max(most, key=lambda counts: int(counts["num_drafts"]))
    num_drafts = counts["num_drafts"]
    length = round(counts["drafted"] / num_drafts)
    # Passes without a draft count too, as planned ones always draft.
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
