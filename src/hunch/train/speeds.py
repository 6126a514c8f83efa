"""Methods against plain decoding in the serving engine: one request at a time, in turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from hunch.train.clock import CAPTURE, Clock
from hunch.train.regenerate import for_answers

if TYPE_CHECKING:
    from hunch import LLM

PLAIN = "plain"
_ANSWERING = 8.0  # seconds for answers, however long engines took to build
_LEAST = 12  # tokens of an answer that tell how fast it came
_GPU_KV = 2**31  # bytes of KV that each of the engines gets on a GPU


@dataclass(slots=True)
class Speed:
    """What one method did."""

    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0  # after the first token of each answer

    def add(self, other: Speed) -> None:
        self.tokens += other.tokens
        self.steps += other.steps
        self.seconds += other.seconds

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
    captured: dict[str, Any] = field(default_factory=dict)  # what each method's captured steps did
    by_category: dict[str, dict[str, float]] = field(
        default_factory=dict
    )  # tokens per pass, by method

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
    """`llm` decodes plainly; each method is a `speculate=` beside it, over the same weights.

    Goes on until the prompts or the seconds are used up, with two prompts at least: where these
    would take longer, by answers of fewer tokens. Building the engines is part of the seconds, but
    some are left for the answers whatever it took: kernels are compiled once per machine.
    `categories` says of each prompt what it asks for.
    """
    ends, whole = perf_counter() + seconds, llm.config
    llm.config = replace(whole, is_greedy=True)
    engines, first = {PLAIN: llm}, Speed()
    found = {name: Speed() for name in (PLAIN, *methods)}
    by_category = {name: defaultdict[str, Speed](Speed) for name in methods}
    try:
        with (clock or Clock()).part(CAPTURE):
            engines |= {name: llm.sibling(text) for name, text in methods.items()}
            for name, engine in engines.items():  # kernels compile, policies see a first text
                _answer(engine, prompts[0], 16, first if name == PLAIN else Speed())
        ends, num_done = max(ends, perf_counter() + min(seconds, _ANSWERING)), 0
        most = int((ends - perf_counter()) * first.per_second / (2 * len(engines)))
        max_tokens = min(max(most, _LEAST), max_tokens)
        for number, prompt in enumerate(prompts):
            if num_done >= 2 and perf_counter() > ends:
                break
            for name, engine in engines.items():
                one = _answer(engine, prompt, max_tokens, found[name])
                if name in by_category and number < len(categories):
                    by_category[name][categories[number]].add(one)
            num_done += 1
        stats = {name: engine.stats() for name, engine in engines.items() if name != PLAIN}
        captured = {name: _captured(engine) for name, engine in engines.items()}
    finally:
        llm.config = whole
        for name, engine in engines.items():
            if name != PLAIN:
                engine.close()
    plain = found.pop(PLAIN)
    return Speeds(
        num_prompts=num_done,
        num_tokens=plain.tokens,
        plain=plain.per_second,
        speedup={name: one.per_second / plain.per_second for name, one in found.items()},
        tokens_per_pass={name: one.tokens_per_pass for name, one in found.items()},
        per_position={name: list(one["per_position"]) for name, one in stats.items()},
        acceptance_rate={name: float(one["acceptance_rate"]) for name, one in stats.items()},
        node_cost={name: _node_cost(one) for name, one in stats.items()},
        captured={name: did for name, did in captured.items() if did},
        by_category={
            name: {category: one.tokens_per_pass for category, one in sorted(of_method.items())}
            for name, of_method in by_category.items()
            if of_method
        },
    )


def _captured(llm: LLM) -> dict[str, Any]:
    """Steps, tokens and seconds by shape, where an engine has captured steps."""
    captured = getattr(llm.engine.runner, "captured", None)
    return {} if captured is None else captured.policy.counts.report()["shapes"]


def _answer(llm: LLM, prompt: list[int], max_tokens: int, speed: Speed) -> Speed:
    """What one answer took; `speed` has it too."""
    from hunch import SamplingParams

    began = perf_counter()
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    seconds, stats = perf_counter() - began, output.outputs[0].stats
    first = stats["first_token_seconds"] or 0.0
    num_tokens = len(output.outputs[0].token_ids) - 1  # the first came with the prompt
    one = Speed(num_tokens, stats["steps"] - 1, max(seconds - first, 0.0))
    speed.add(one)
    return one


def _node_cost(stats: Mapping[str, Any]) -> float:
    nodes = float(stats["drafted"]) / max(stats["steps"], 1)
    return float(stats["draft_overhead"]) / nodes if nodes else 0.0
