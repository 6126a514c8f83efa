"""Measures methods and plain decoding in the serving engine, in turn, one request at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from hunch.train.clock import CAPTURE, Clock
from hunch.train.regenerate import for_answers

if TYPE_CHECKING:
    from hunch import LLM

PLAIN = "plain"
_ANSWERING = 8.0  # seconds that are left for answers, however long the engines took to build
_LEAST = 12  # tokens that an answer must have for its speed to be measured
# An answer is repeated if its steps took this many times the median of its method: a kernel was
# compiled meanwhile, or the machine was busy. Times that a method always takes still count.
_ODD = 1.3
_GPU_KV = 2**31  # bytes of KV that each of the engines gets on a GPU


@dataclass(slots=True)
class Speed:
    """Tokens, steps and seconds of one answer, or of several."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0  # after the first token of each answer

    @classmethod
    def of(cls, some: Sequence[Speed]) -> Speed:
        """The sum of several."""
        return cls(
            sum(one.tokens for one in some),
            sum(one.steps for one in some),
            sum(one.seconds for one in some),
        )

    @property
    def per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / max(self.steps, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Speeds:
    """Every method beside plain decoding, on the same prompts."""

    num_prompts: int
    num_tokens: int
    plain: float  # tokens per second
    speedup: dict[str, float]
    tokens_per_pass: dict[str, float]
    per_position: dict[str, list[float]]
    acceptance_rate: dict[str, float]
    node_cost: dict[str, float]  # of a drafted node, in passes of the target
    captured: dict[str, Any] = field(default_factory=dict)  # counts of each method's captured steps
    # Of each method, tokens per pass by what prompts ask for.
    by_category: dict[str, dict[str, float]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def engine_for_one(target: str, engine: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Arguments of an engine that answers one request at a time, with room for others beside it."""
    found = for_answers(target, dict(engine), context, 1)
    if torch.cuda.is_available() and found.get("device") != "cpu":
        found = {"kv_bytes": _GPU_KV, **found}
    return found


def compare_speeds(
    llm: LLM,
    methods: Mapping[str, str],
    prompts: Sequence[list[int]],
    *,
    seconds: float,
    max_tokens: int = 64,
    categories: Sequence[str] = (),
    clock: Clock | None = None,
) -> Speeds:
    """Compare methods with plain decoding. Their engines share the weights of `llm`.

    `llm` decodes plainly; `methods` are names with their `speculate=` texts. Prompts are answered
    until they or the seconds are used up, but at least two; if time is short, answers have fewer
    tokens. Building the engines counts toward the seconds, but some are always left for answers, as
    kernels are compiled only once per machine. `categories` has the category of each prompt.
    """
    ends = perf_counter() + seconds
    with _engines_over(llm) as engines:
        with (clock or Clock()).part(CAPTURE):
            engines |= {name: llm.sibling(text) for name, text in methods.items()}
            # Compiles kernels, and gives policies a first text.
            first = {name: _answer(engine, prompts[0], 16) for name, engine in engines.items()}
        ends = max(ends, perf_counter() + min(seconds, _ANSWERING))
        most = int((ends - perf_counter()) * first[PLAIN].per_second / (2 * len(engines)))
        found = _answers(engines, prompts, min(max(most, _LEAST), max_tokens), ends)
        stats = {name: engine.stats() for name, engine in engines.items() if name != PLAIN}
        captured = {name: _captured(engine) for name, engine in engines.items()}
    answered = found.pop(PLAIN)
    plain = Speed.of(answered)
    whole_of = {name: Speed.of(some) for name, some in found.items()}
    return Speeds(
        num_prompts=len(answered),
        num_tokens=plain.tokens,
        plain=plain.per_second,
        speedup={name: one.per_second / plain.per_second for name, one in whole_of.items()},
        tokens_per_pass={name: one.tokens_per_pass for name, one in whole_of.items()},
        per_position={name: list(one["per_position"]) for name, one in stats.items()},
        acceptance_rate={name: float(one["acceptance_rate"]) for name, one in stats.items()},
        node_cost={name: _node_cost(one) for name, one in stats.items()},
        captured={name: did for name, did in captured.items() if did},
        by_category={
            name: _by_category(some, categories) for name, some in found.items() if categories
        },
    )


@contextmanager
def _engines_over(llm: LLM) -> Iterator[dict[str, LLM]]:
    """A dict with `llm`, for greedy requests alone; engines added to it are closed at the end."""
    whole, engines = llm.config, {PLAIN: llm}
    llm.config = replace(whole, is_greedy=True)
    try:
        yield engines
    finally:
        llm.config = whole
        for name, engine in engines.items():
            if name != PLAIN:
                engine.close()


def _answers(
    engines: Mapping[str, LLM], prompts: Sequence[list[int]], max_tokens: int, ends: float
) -> dict[str, list[Speed]]:
    """Answers to as many prompts as there is time for, two at least, by each engine in turn. Those
    that took far longer than the engine's others are asked for again."""
    found: dict[str, list[Speed]] = {name: [] for name in engines}
    for number, prompt in enumerate(prompts):
        if number >= 2 and perf_counter() > ends:
            break
        for name, engine in engines.items():
            found[name].append(_answer(engine, prompt, max_tokens))
    for name, engine in engines.items():
        for number in odd_ones(found[name]):
            again = _answer(engine, prompts[number], max_tokens)
            found[name][number] = min(found[name][number], again, key=_step_seconds)
    return found


def _captured(llm: LLM) -> dict[str, Any]:
    """Steps, tokens and seconds by shape, where an engine has captured steps."""
    captured = getattr(llm.engine.runner, "captured", None)
    return {} if captured is None else captured.policy.counts.report()["shapes"]


def _by_category(some: Sequence[Speed], categories: Sequence[str]) -> dict[str, float]:
    """Tokens per pass by category of the prompts."""
    found = defaultdict[str, list[Speed]](list)
    for one, category in zip(some, categories, strict=False):
        found[category].append(one)
    return {name: Speed.of(ones).tokens_per_pass for name, ones in sorted(found.items())}


def odd_ones(some: Sequence[Speed]) -> list[int]:
    """The numbers of answers whose steps took far longer than those of the method's others."""
    usual = median(map(_step_seconds, some))
    return [number for number, one in enumerate(some) if _step_seconds(one) > _ODD * usual]


def _step_seconds(one: Speed) -> float:
    return one.seconds / max(one.steps, 1)


def _answer(llm: LLM, prompt: list[int], max_tokens: int) -> Speed:
    """Generate one answer; returns its tokens, steps and seconds after the first token."""
    from hunch import SamplingParams

    began = perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    seconds, stats = perf_counter() - began, output.outputs[0].stats
    first = stats["first_token_seconds"] or 0.0
    num_tokens = len(output.outputs[0].token_ids) - 1  # the first came with the prompt
    return Speed(num_tokens, stats["steps"] - 1, max(seconds - first, 0.0))


def _node_cost(stats: Mapping[str, Any]) -> float:
    nodes = float(stats["drafted"]) / max(stats["steps"], 1)
    return float(stats["draft_overhead"]) / nodes if nodes else 0.0
