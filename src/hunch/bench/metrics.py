"""The figures of the field, each one small function. docs/metrics.md says what they mean.

Functions take counts and seconds and know nothing of engines; `figures` puts a run's together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np

from hunch.bench.records import Answer, Run
from hunch.errors import ConfigError

PERCENTS = (50, 90, 95, 99)
LIMITS = {  # names that a goodput limit may use -> the figure that is compared
    "ttft": "first_token",
    "first_token": "first_token",
    "tpot": "per_token",
    "itl": "longest_gap",
    "gap": "longest_gap",
    "e2e": "end_to_end",
    "e2el": "end_to_end",
    "end_to_end": "end_to_end",
}


def acceptance_rate(accepted: int, drafted: int) -> float | None:
    """The share of checked nodes that the target agreed with."""
    return accepted / drafted if drafted else None


def tokens_per_pass(tokens: int, passes: int) -> float | None:
    """Tokens per pass of the target, its own included: block efficiency, mean accepted length."""
    return tokens / passes if passes else None


def per_position(guessed: Sequence[int], accepted: Sequence[int]) -> list[float]:
    """The share of drafts with a guess at a position whose guess there was accepted."""
    padded = [*accepted, *[0] * (len(guessed) - len(accepted))]
    return [part / whole for part, whole in zip(padded, guessed, strict=True) if whole]


def expected_tokens(acceptance: float, length: int) -> float:
    """Tokens per pass if every guess is right with the same chance, whatever came before it."""
    if acceptance >= 1.0:
        return float(length + 1)
    return (1 - acceptance ** (length + 1)) / (1 - acceptance)


def memory_bound_speedup(per_pass: float, overhead: float) -> float:
    """Speed-up where checking a draft costs what a plain pass costs: tau / (c * gamma + 1).

    c * gamma, the cost of a guess times the guesses of a pass, is the draft overhead.
    """
    return per_pass / (overhead + 1)


def token_rate_ratio(tokens_per_second: float, plain_tokens_per_second: float) -> float:
    """Tokens per second over those of plain decoding."""
    return tokens_per_second / plain_tokens_per_second


def draft_overhead(draft_seconds: float, target_seconds: float) -> float | None:
    """Seconds spent on drafting per second spent in the target's passes."""
    return draft_seconds / target_seconds if target_seconds else None


def energy_per_token(joules: float | None, tokens: int) -> float | None:
    return joules / tokens if joules is not None and tokens else None


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By linear interpolation between the two nearest values."""
    return float(np.percentile(values, percent)) if values else None


def percentiles(values: Sequence[float]) -> dict[str, float | None]:
    return {f"p{percent}": percentile(values, percent) for percent in PERCENTS}


def read_limits(text: str | None) -> dict[str, float]:
    """'ttft:200 tpot:30' -> seconds by figure; commas or spaces between, milliseconds meant."""
    limits: dict[str, float] = {}
    for part in (text or "").replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            limits[LIMITS[name]] = float(value) / 1000
        except (KeyError, ValueError):
            raise ConfigError(
                f"--goodput {part!r} must be NAME:MILLISECONDS with NAME one of ttft, tpot, itl, "
                "e2e, say ttft:200,tpot:30"
            ) from None
    return limits


def is_good(answer: Answer, limits: Mapping[str, float]) -> bool:
    """Whether an answer keeps every limit. Figures that it does not have are ignored."""
    for name, limit in limits.items():
        value = getattr(answer, name)
        if value is not None and value > limit:
            return False
    return True


def figures(run: Run, limits: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Every figure of a run that can be computed from its results. Latencies are in seconds."""
    answers, counts = run.answers(), run.counts()
    tokens = sum(answer.num_tokens for answer in answers)
    found: dict[str, Any] = {
        "num_answers": len(answers),
        "num_errors": len(run.errors()),
        "num_tokens": tokens,
        "seconds": sum(one.seconds for one in run.rounds),
        "tokens_per_second": _median([one.tokens_per_second for one in run.rounds]),
        "requests_per_second": _median(
            [
                sum(a.error is None for a in one.answers) / one.seconds if one.seconds else 0.0
                for one in run.rounds
            ]
        ),
        "first_token": percentiles([a.first_token for a in answers if a.first_token is not None]),
        "per_token": percentiles([a.per_token for a in answers if a.per_token is not None]),
        "gap": percentiles([gap for a in answers for gap in a.gaps]),
        "end_to_end": percentiles([a.end_to_end for a in answers]),
        "mean_end_to_end": fmean(a.end_to_end for a in answers) if answers else None,
    }
    found |= _speculation(answers, counts)
    joules = [one.joules for one in run.rounds if one.joules is not None]
    all_tokens = sum(a.num_tokens for one in run.rounds for a in one.answers)
    found["energy_per_token"] = energy_per_token(sum(joules) if joules else None, all_tokens)
    if all_tokens and "cpu_seconds" in counts:  # of a server whose process is known
        found["cpu_per_token"] = counts["cpu_seconds"] / all_tokens
    if limits:
        share = sum(is_good(a, limits) for a in answers) / max(len(answers), 1)
        found["goodput_share"] = share
        found["goodput"] = (found["requests_per_second"] or 0.0) * share
    return found


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _speculation(answers: Sequence[Answer], counts: Mapping[str, Any]) -> dict[str, Any]:
    """Figures that an engine of hunch has; None for another engine."""
    passes = [a.num_passes for a in answers]
    if not answers or None in passes:
        return {"num_passes": None, "tokens_per_pass": None, "acceptance_rate": None}
    num_passes = sum(p or 0 for p in passes)
    drafted, accepted = (sum(getattr(a, n) or 0 for a in answers) for n in ("drafted", "accepted"))
    tau = tokens_per_pass(sum(a.num_tokens for a in answers), num_passes)
    overhead = draft_overhead(counts.get("draft_seconds", 0.0), counts.get("target_seconds", 0.0))
    drafters = {
        name: {**one, "acceptance_rate": acceptance_rate(one["accepted"], one["drafted"])}
        for name, one in counts.get("drafters", {}).items()
        if one["drafted"]
    }
    return {
        "num_passes": num_passes,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_pass": tau,
        "acceptance_rate": acceptance_rate(accepted, drafted),
        "per_position": per_position(
            counts.get("guessed_per_position", []), counts.get("accepted_per_position", [])
        ),
        "draft_overhead": overhead,
        "memory_bound_speedup": (
            None if tau is None or overhead is None else memory_bound_speedup(tau, overhead)
        ),
        "drafters": drafters,
        "time_saved_seconds": counts.get("time_saved_seconds"),
        "captured": counts.get("captured"),
    }
