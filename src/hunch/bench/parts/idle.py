"""How long a GPU waits while one request decodes: between steps, and between their kernels.

Two measurements of the same steady state. The device's own clock: what steps took on it (from the
first kernel's start to the last one's end, written with each result) against the time that passed
while their results came. And torch's profiler, which names the gaps but makes the host slower with
every kernel it records; what it finds is an upper bound.

Then how long a request waits for its first token, by the length of its prompt, beside the time of
the pass over the prompt on the device. The rest is the host's work and the choice of the token. A
draft model adds nothing, as it reads the prompt while the first token is delivered.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hunch import LLM, SamplingParams
from hunch.bench.parts import PartOptions
from hunch.bench.parts.requests import load
from hunch.bench.readers import read_workloads
from hunch.step.capture import seconds_of

STEPS, WARM = 200, 20  # steps that are measured, and steps before them
LENGTHS, REQUESTS = (16, 64, 256, 1024), 20  # tokens of prompts, and requests of each length
AFTER_FIRST = 4  # tokens of their answers
LONG = 20.0  # microseconds from which on a gap is listed


def by_clock(llm: LLM, prompt: list[int]) -> dict[str, float]:
    """Share of the time in which no step was under way, by the device's clock."""
    runner: Any = llm.engine.runner
    policy = runner.captured.policy
    seconds: list[float] = []
    moments: list[float] = []
    timed = policy.timed

    def listen(graph: Any, took: float, *others: Any) -> Any:
        seconds.append(took)
        moments.append(time.perf_counter())
        return timed(graph, took, *others)

    policy.timed = listen
    llm.generate(prompt, params(STEPS + WARM))
    policy.timed = timed
    seconds, moments = seconds[-STEPS:], moments[-STEPS:]
    passed = moments[-1] - moments[0]
    return {
        "step_us": 1e6 * statistics.median(seconds),
        "passed_us": 1e6 * passed / (len(moments) - 1),
        "idle": 1.0 - sum(seconds[1:]) / passed,
    }


def by_profiler(llm: LLM, prompt: list[int]) -> dict[str, Any]:
    """The same by the gaps between kernels."""
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        llm.generate(prompt, params(STEPS + WARM))
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in found.events()
        if event.device_type.name == "CUDA"
    )
    firsts = [at for at, kernel in enumerate(kernels) if kernel[2].startswith("_pack_kernel")]
    firsts = firsts[-STEPS:]
    idle: list[float] = []
    gaps: dict[str, list[float]] = defaultdict(list)
    end, before = kernels[firsts[0]][1], ""
    for first, last in pairwise(firsts):
        idle.append(0.0)
        for start, stop, name in kernels[first + 1 : last + 1]:
            gap = max(start - end, 0.0)
            idle[-1] += gap
            if gap > LONG:
                gaps[f"{before} > {name}"].append(gap)
            end, before = max(end, stop), name
    span = kernels[firsts[-1]][0] - kernels[firsts[0]][0]
    return {
        "passed_us": span / len(idle),
        "idle": sum(idle) / span,
        "median_us": statistics.median(idle),
        "long": {name: (len(some), round(sum(some))) for name, some in gaps.items()},
    }


def first_tokens(llm: LLM, num_prompt: int, count: int) -> tuple[float, float]:
    """Seconds to the first token of a request alone, and of the pass over its prompt: medians."""
    engine: Any = llm.engine
    passes, num_ids = engine.runner.host.passes, engine.capacity.vocab_size
    device: torch.device = engine.runner.target.device
    waited: list[float] = []
    for number in range(count + 2):  # the first two compile and capture
        ids = [(number * 7919 + place * 31) % num_ids for place in range(num_prompt)]
        llm.reset_cache()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a drafter may clear its tables there
        began = time.perf_counter()
        engine.add(str(number), ids, params(AFTER_FIRST))
        while not any(out.outputs[0].token_ids for out in engine.step()):
            pass
        waited.append(time.perf_counter() - began)
        while engine.has_work():
            engine.step()
    graph = passes.graph(num_prompt)
    seconds = 0.0 if graph is None else seconds_of(graph, device)
    return statistics.median(waited[2:]), seconds


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("idle", __doc__)
    parser.add_argument("--prompts", default="chat", help="[FORM:]PATH or a workload")
    parser.add_argument("--targets", default="small,7b")
    parser.add_argument("--method", default="off")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(words)
    first = read_workloads(args.prompts, 1)[0]
    for target in args.targets.split(","):
        llm = load(target, args.method, 1)
        prompt = first.encode(llm)
        llm.generate(prompt, params(WARM))
        for _ in range(args.rounds):
            clock = by_clock(llm, prompt)
            print(
                f"{target:6} clock: a step takes {clock['step_us']:.1f} us, one came every "
                f"{clock['passed_us']:.1f}: idle {clock['idle']:.2%}",
                flush=True,
            )
        for length in LENGTHS:
            waited, seconds = first_tokens(llm, length, REQUESTS)
            print(
                f"{target:6} first token after {length:4} of a prompt: {1e6 * waited:.0f} us, the "
                f"pass {1e6 * seconds:.0f} of them",
                flush=True,
            )
        by_profiler(llm, prompt)  # its first round is slower than those that follow
        for _ in range(args.rounds):
            seen = by_profiler(llm, prompt)
            print(
                f"{target:6} profiler: a step every {seen['passed_us']:.1f} us, idle "
                f"{seen['idle']:.2%}, in the median step {seen['median_us']:.1f} us; long gaps "
                f"{seen['long']}",
                flush=True,
            )
        llm.close()
