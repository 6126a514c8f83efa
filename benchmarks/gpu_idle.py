"""How long a GPU waits while one request decodes: between steps, and between their kernels.

python benchmarks/gpu_idle.py --prompts spec_mix_48.jsonl [--targets small,7b] [--method off]

Two measurements of the same steady state. The device's own clock: what steps took on it (from the
first kernel's start to the last one's end, written with each result) against the time that passed
while their results came. And torch's profiler, which names the gaps but makes the host slower with
every kernel it records; what it finds is an upper bound.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gpu import build, load
from torch.profiler import ProfilerActivity, profile

import hunch.llm as front
from hunch import LLM, SamplingParams

STEPS, WARM = 200, 20  # steps looked at, and steps before them
LONG = 20.0  # microseconds: a gap worth naming


def by_clock(llm: LLM, prompt: list[int]) -> dict[str, float]:
    """Share of the time in which no step was under source, by the device's clock."""
    policy, seconds, moments = llm.engine.runner.captured.policy, [], []
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
        if event.device_type == torch.autograd.DeviceType.CUDA
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


def params(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--targets", default="small,7b")
    parser.add_argument("--method", default="off")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    tokenizer = front.load_text(front.config_from_vllm(model="smollm2-135m"))
    line = json.loads(args.prompts.read_text().splitlines()[0])
    prompt = tokenizer.render_chat([{"role": "user", "content": line["turns"][0]}])
    for target in args.targets.split(","):
        llm = load(build(target), target, args.method, 1)
        llm.generate(prompt, params(WARM))
        for _ in range(args.rounds):
            clock = by_clock(llm, prompt)
            print(
                f"{target:6} clock: a step takes {clock['step_us']:.1f} us, one came every "
                f"{clock['passed_us']:.1f}: idle {clock['idle']:.2%}",
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


if __name__ == "__main__":
    main()
