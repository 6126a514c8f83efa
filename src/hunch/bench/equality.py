"""Is speculative text the plain text? Compares token ids, with the margin where they differ
first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hunch import LLM, RequestOutput, SamplingParams


@dataclass(slots=True)
class Difference:
    """Where two answers differ first. A margin near zero suggests numerics, not a fault."""

    id: str
    position: int
    plain: int | None
    speculative: int | None
    margin: float | None  # how much likelier the target finds the plain token, in nats


@dataclass(slots=True)
class Guesses:
    """How many guesses were made and accepted."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def add(self, stats: Mapping[str, Any]) -> None:
        self.drafted += stats["drafted"]
        self.accepted += stats["accepted"]
        self.steps += stats["steps"]


@dataclass(slots=True)
class MethodReport(Guesses):
    """One method against plain decoding."""

    num_prompts: int = 0
    num_different: int = 0
    first_difference: Difference | None = None

    @property
    def is_equal(self) -> bool:
        return self.num_different == 0


def compare(
    ids: Sequence[str],
    prompts: Sequence[list[int]],
    plain: Sequence[RequestOutput],
    speculative: Sequence[RequestOutput],
    plain_llm: LLM,
) -> MethodReport:
    """Every sample of every prompt, token by token."""
    report = MethodReport(num_prompts=len(ids))
    for name, prompt, first, second in zip(ids, prompts, plain, speculative, strict=True):
        is_different = False
        for one, other in zip(first.outputs, second.outputs, strict=True):
            report.add(other.stats)
            if one.token_ids == other.token_ids and one.text == other.text:
                continue
            is_different = True
            if report.first_difference is None:
                both = one.token_ids, other.token_ids
                report.first_difference = _locate(name, prompt, *both, plain_llm)
        report.num_different += is_different
    return report


def _locate(
    name: str, prompt: list[int], plain: list[int], speculative: list[int], plain_llm: LLM
) -> Difference:
    shared = 0
    while shared < min(len(plain), len(speculative)) and plain[shared] == speculative[shared]:
        shared += 1
    one = plain[shared] if shared < len(plain) else None
    other = speculative[shared] if shared < len(speculative) else None
    margin = None
    if one is not None and other is not None:
        probe = SamplingParams(temperature=0, max_tokens=1, logprobs=plain_llm.tokenizer.vocab_size)
        (output,) = plain_llm.generate([prompt + plain[:shared]], probe, use_tqdm=False)
        scores = (output.outputs[0].logprobs or [{}])[0]
        if one in scores and other in scores:
            margin = scores[one].logprob - scores[other].logprob
    return Difference(name, shared, one, other, margin)
