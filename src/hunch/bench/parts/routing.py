"""Requests that begin alike, over three engines: by their beginnings, or to each in turn.

Each engine has KV memory for about six of the prompts. There is one request at a time, so times are
those of reading what the prefix cache lacks.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence

from hunch import LLM, SamplingParams
from hunch.bench.parts import PartOptions
from hunch.server.routing import Router

NUM_ENGINES, NUM_BEGINNINGS, NUM_REQUESTS, NUM_BLOCKS = 3, 6, 36, 64
WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def prefix_counts(engines: list[LLM]) -> tuple[int, int]:
    reports = [engine.stats() for engine in engines]
    hits, queries = (sum(r[key] for r in reports) for key in ("prefix_hits", "prefix_queries"))
    return hits, queries


def main(words: Sequence[str] = ()) -> None:
    PartOptions("routing", __doc__).parse_args(words)
    first = LLM(speculate="off", max_model_len=512, num_blocks=NUM_BLOCKS, threads=1)
    engines = [first, *(first.sibling("off") for _ in range(NUM_ENGINES - 1))]
    rng = random.Random(1)
    beginnings = [" ".join(rng.choice(WORDS) for _ in range(110)) for _ in range(NUM_BEGINNINGS)]
    texts = [f"{rng.choice(beginnings)} Question {i}: why?" for i in range(NUM_REQUESTS)]
    prompts = [first.tokenizer.encode(text) for text in texts]
    params = SamplingParams(temperature=0, max_tokens=1)
    for how in ("in turn", "by beginnings"):
        for engine in engines:
            engine.reset_cache()
        before, times = prefix_counts(engines), []
        router = Router(NUM_ENGINES, NUM_BLOCKS * 16)
        for number, ids in enumerate(prompts):
            by_beginning = router.choose(ids, "", [0] * NUM_ENGINES)
            engine = engines[number % NUM_ENGINES if how == "in turn" else by_beginning]
            began = time.perf_counter()
            engine.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
            times.append(time.perf_counter() - began)
        hits, queries = (b - a for a, b in zip(before, prefix_counts(engines), strict=True))
        print(
            f"{how}: hit rate {hits / queries:.2f}, first token after "
            f"{1e3 * statistics.median(times):.0f} ms (median), "
            f"{1e3 * statistics.mean(times):.0f} ms (mean)"
        )
