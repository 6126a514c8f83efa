"""The cost of serving: the same requests to an engine in this process and to a server, in turn."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

from hunch import LLM
from hunch.bench.loads import Load
from hunch.bench.measure import make_jobs
from hunch.bench.offline import EngineSubject
from hunch.bench.remote import UrlSubject
from hunch.bench.workloads import Prompt

PROMPT = "Once upon a time, in a small town by the sea, there lived an old clockmaker who"


def cost(
    model: str,
    speculate: str,
    url: str,
    streams: Sequence[int],
    max_tokens: int,
    num_rounds: int,
    threads: int | None = None,
) -> list[dict[str, Any]]:
    """For each number of streams: tokens per second of both, and the cost of serving."""
    params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, "seed": 0}
    there = UrlSubject("served", url)
    found = []
    with LLM(
        model, speculate=speculate, max_model_len=max_tokens + 128, max_num_seqs=max(streams),
        threads=threads,
    ) as llm:  # fmt: skip
        here = EngineSubject("offline", llm)
        for count in streams:
            prompts = [Prompt(f"story-{number}", "all", text=PROMPT) for number in range(count)]
            jobs = make_jobs(prompts, lambda prompt: llm.tokenizer.encode(prompt.text), params)
            load = Load(concurrency=count)
            here.warm(jobs, load)
            there.warm(jobs, load)
            turns = [one for _ in range(num_rounds) for one in (here, there)]
            speeds = [one.drive(jobs, load).tokens_per_second for one in turns]
            offline, served = speeds[::2], speeds[1::2]
            costs = sorted(1 - two / one for one, two in zip(offline, served, strict=True))
            found.append(
                {
                    "streams": count,
                    "offline": median(offline),
                    "served": median(served),
                    "cost": median(costs),
                    "low": costs[0],
                    "high": costs[-1],
                }
            )
    return found
