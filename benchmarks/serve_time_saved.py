"""Compare the metrics' `time saved` with an A/B run: the same requests with drafts and without.

Each prompt is answered in turn with drafts and plainly, so that whatever else the machine does
falls on both alike. Saved, as the metric has it, is what plain decoding of the same tokens would
have cost on top; saved, as the clock has it, is the difference of the two runs. Requests go to a
server, one at a time, and the metric is read from its /metrics.

    python benchmarks/serve_time_saved.py --speculate ngram --rounds 3
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from urllib.request import Request, urlopen

from serve_overhead import start

from hunch import LLM, SamplingParams, Speculation

PROMPTS = (
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self",
    "import math\n\ndef distance(x1, y1, x2, y2):\n    return math.sqrt(",
    "def is_prime(n):\n    if n < 2:\n        return False\n",
    "def binary_search(items, target):\n    low, high = 0, len(items) - 1\n",
    "def word_counts(text):\n    counts = {}\n    for word in text.split():\n",
    "SELECT name, price FROM products WHERE price > 10;\nSELECT name, price FROM products WHERE",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
)


# prompt, mode, number of tokens -> seconds by the clock, the answer, seconds said to be saved
Run = Callable[[str, str, int], tuple[float, Any, float]]


def run_offline(llm: LLM, prompt: str, mode: str, num_tokens: int) -> tuple[float, Any, float]:
    params = SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        speculation=Speculation(mode="default" if mode == "auto" else mode),
    )
    before = llm.stats()["time_saved_seconds"]
    start = time.perf_counter()
    (output,) = llm.generate(prompt, params)
    seconds = time.perf_counter() - start
    return seconds, output.outputs[0].token_ids, llm.stats()["time_saved_seconds"] - before


def run_served(url: str, prompt: str, mode: str, num_tokens: int) -> tuple[float, Any, float]:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}
    data = json.dumps({**body, "speculation": {"mode": mode}}).encode()
    before = _metric(url)
    request = Request(url + "/v1/completions", data, {"Content-Type": "application/json"})
    start = time.perf_counter()
    with urlopen(request, timeout=600) as answer:
        text = json.loads(answer.read())["choices"][0]["text"]
    seconds = time.perf_counter() - start
    time.sleep(0.05)  # the engine's report follows its last token
    return seconds, text, _metric(url) - before


def _metric(url: str) -> float:
    with urlopen(url + "/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.search(r"^hunch:spec_decode_time_saved_seconds\{.*\} (\S+)$", text, re.MULTILINE)
    assert found, "the metric is missing"
    return float(found.group(1))


def compare(run: Run, rounds: int, num_tokens: int) -> dict[str, float]:
    plain = drafted = claimed = 0.0
    for _ in range(rounds):
        for number, prompt in enumerate(PROMPTS):
            first = ("off", "auto") if number % 2 else ("auto", "off")
            results = {mode: run(prompt, mode, num_tokens) for mode in first}
            (off, answer, _), (on, same, saved) = results["off"], results["auto"]
            assert answer == same, "speculation changed the text"
            plain, drafted, claimed = plain + off, drafted + on, claimed + saved
    return {
        "plain_seconds": plain,
        "speculative_seconds": drafted,
        "saved_by_clock": plain - drafted,
        "saved_by_metric": claimed,
        "ratio": claimed / (plain - drafted),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculate", default="ngram")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    flags = ["--max-num-seqs", "1", "--no-enable-prefix-caching"]
    process, port = start(args.model, args.speculate, 1024, *flags)
    try:
        run = partial(run_served, f"http://127.0.0.1:{port}")
        compare(run, 1, 16)  # warm
        report = compare(run, args.rounds, args.tokens)
    finally:
        process.terminate()
        process.wait(30)
    print(json.dumps({name: round(value, 4) for name, value in report.items()}, indent=2))
    return 0 if abs(report["ratio"] - 1) <= 0.15 else 1


if __name__ == "__main__":
    sys.exit(main())
