"""How much of a sampling drafter's draft each verifier keeps: means and 95% intervals.

Same prompts, same seeds, the same drafter. `greedy draft` is `exact` with a drafter that always
proposes its likeliest token. Tokens per pass is what a pass of the target yields on average; the
interval is a bootstrap over answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from hunch import LLM, SamplingParams
from hunch.bench.intervals import Interval, bootstrap
from hunch.bench.workloads import Prompt

SETTINGS = {
    "exact": ("exact", ""),
    "rejection": ("rejection", ""),
    "block": ("block", ""),
    "greedy draft": ("exact", ":draft_temperature=0.001"),
}
Counts = tuple[int, int, int]  # of an answer: its tokens, its passes, its accepted nodes


def measure_setting(
    setting: str,
    model: str,
    speculate: str,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    **arguments: Any,
) -> tuple[Interval, Interval]:
    """Tokens per pass, and accepted nodes per pass."""
    verifier, more = SETTINGS[setting]
    with LLM(
        model, speculate=speculate + more, verifier=verifier, always_draft=True, **arguments
    ) as llm:
        outputs = llm.generate([prompt.encode(llm) for prompt in prompts], params)
    rows = [
        (len(answer.token_ids), answer.stats["steps"], answer.stats["accepted"])
        for output in outputs
        for answer in output.outputs
    ]
    tokens, accepted = (bootstrap(rows, partial(_per_pass, place)) for place in (0, 2))
    return tokens, accepted


def _per_pass(place: int, rows: Sequence[Counts]) -> float:
    return sum(row[place] for row in rows) / max(sum(row[1] for row in rows), 1)
