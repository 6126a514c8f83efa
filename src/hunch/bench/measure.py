"""Time methods against each other: interleaved, repeated, medians."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from hunch import LLM, RequestOutput, SamplingParams


@dataclass(slots=True)
class Measured:
    """One method over a prompt set. `seconds` holds one entry per repeat."""

    seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    is_equal: bool = True
    outputs: list[RequestOutput] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / median(self.seconds)

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / max(self.steps, 1)


def measure(
    llms: dict[str, LLM],
    prompts: list[list[int]],
    params: SamplingParams,
    repeats: int = 3,
    on_answer: Callable[[int, str, RequestOutput], None] | None = None,
) -> dict[str, Measured]:
    """Each prompt by each method in turn, so that a busy moment of the machine hits all alike."""
    measured = {name: Measured(seconds=[0.0] * repeats) for name in llms}
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            for name, llm in llms.items():
                llm.reset_cache()
                began = perf_counter()
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                measured[name].seconds[repeat] += perf_counter() - began
                if repeat == 0:
                    _count(measured[name], output)
                    if on_answer is not None:
                        on_answer(index, name, output)
    first = next(iter(measured.values()))
    for one in measured.values():
        one.is_equal = [o.outputs[0].token_ids for o in one.outputs] == [
            o.outputs[0].token_ids for o in first.outputs
        ]
    return measured


def _count(measured: Measured, output: RequestOutput) -> None:
    for answer in output.outputs:
        measured.num_tokens += len(answer.token_ids)
        measured.steps += answer.stats["steps"]
        measured.drafted += answer.stats["drafted"]
        measured.accepted += answer.stats["accepted"]
    measured.outputs.append(output)
