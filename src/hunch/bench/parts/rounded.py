"""The speed from weights in few bits on a GPU: a target of 7B's cost, rounded when loaded.

Plain decoding, or what --speculate says, greedy, 64 new tokens, the better of two rounds after one
that is not counted; the first answer must be the same at every number of requests. Then four
prompts of 1,500 tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hunch import LLM, SamplingParams
from hunch.bench.device.enlarged import enlarged
from hunch.bench.parts import PartOptions

TEXT = "Write a short story about a fox who learns to read maps and gets lost anyway."
PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def rate(llm: LLM, num_requests: int) -> tuple[float, list[int]]:
    """Tokens per second, and the first answer."""
    prompts = [f"{TEXT} {number}" for number in range(num_requests)]
    rates, answer = [], []
    for _ in range(3):
        began = time.perf_counter()
        outputs = llm.generate(prompts, PARAMS)
        seconds = time.perf_counter() - began
        rates.append(sum(len(out.outputs[0].token_ids) for out in outputs) / seconds)
        answer = list(outputs[0].outputs[0].token_ids)
    return max(rates[1:]), answer


def prompt_rate(llm: LLM) -> float:
    prompts = [{"prompt_token_ids": list(range(100 + n, 1600 + n))} for n in range(4)]
    once = SamplingParams(temperature=0, max_tokens=1)
    llm.generate(prompts, once)
    llm.reset_cache()
    began = time.perf_counter()
    llm.generate(prompts, once)
    return 4 * 1500 / (time.perf_counter() - began)


def main(words: Sequence[str] = ()) -> None:
    options = PartOptions("rounded", __doc__)
    options.add_argument("--dtypes", default="bfloat16,fp8,int4")
    options.add_argument("--concurrency", default="1,8,64")
    options.add_argument("--speculate", default="off", help="a method")
    given = options.parse_args(words)
    counts = [int(count) for count in given.concurrency.split(",")]
    for dtype in given.dtypes.split(","):
        weights = enlarged("smollm2-135m", "7b", "auto")
        with LLM(
            "smollm2-135m",
            weights=weights,
            speculate=given.speculate,
            dtype=dtype,
            max_model_len=2048,
            max_num_seqs=max(counts),
        ) as llm:
            found = {count: rate(llm, count) for count in counts}
            answers = [answer for _, answer in found.values()]
            assert all(answer == answers[0] for answer in answers), f"{dtype}: another text"
            rates = ", ".join(f"{count}: {each:,.0f}" for count, (each, _) in found.items())
            size = llm.engine.runner.target.weight_bytes / 1e9  # type: ignore[attr-defined]
            prompts = prompt_rate(llm)
            print(f"{dtype}: {size:.2f} GB; tok/s by requests {rates}; prompts {prompts:,.0f}")
