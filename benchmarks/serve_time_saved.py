"""Compare the engine's `time saved` with an A/B run: the same requests with drafts and without.

Each prompt is answered in turn with drafts and plainly, so that whatever else the machine does
falls on both alike. Saved, as the metric has it, is what plain decoding of the same tokens would
have cost on top; saved, as the clock has it, is the difference of the two runs.

    python benchmarks/serve_time_saved.py --speculate ngram --rounds 3
"""

from __future__ import annotations

import argparse
import json
import sys
import time

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


def run(llm: LLM, prompt: str, mode: str, num_tokens: int) -> tuple[float, list[int], float]:
    """Seconds by the clock, the tokens, and the seconds the engine says it saved."""
    params = SamplingParams(
        temperature=0,
        max_tokens=num_tokens,
        ignore_eos=True,
        speculation=Speculation(mode=mode),
    )
    before = llm.stats()["time_saved_seconds"]
    start = time.perf_counter()
    (output,) = llm.generate(prompt, params)
    seconds = time.perf_counter() - start
    return seconds, output.outputs[0].token_ids, llm.stats()["time_saved_seconds"] - before


def compare(llm: LLM, rounds: int, num_tokens: int) -> dict[str, float]:
    plain = drafted = claimed = 0.0
    for _ in range(rounds):
        for number, prompt in enumerate(PROMPTS):
            first = ("off", "default") if number % 2 else ("default", "off")
            results = {mode: run(llm, prompt, mode, num_tokens) for mode in first}
            (off, tokens, _), (on, same, saved) = results["off"], results["default"]
            assert tokens == same, "speculation changed the text"
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
    options = {"max_model_len": 1024, "max_num_seqs": 1, "enable_prefix_caching": False}
    with LLM(args.model, speculate=args.speculate, **options) as llm:
        compare(llm, 1, 16)  # warm
        report = compare(llm, args.rounds, args.tokens)
    print(json.dumps({name: round(value, 4) for name, value in report.items()}, indent=2))
    return 0 if abs(report["ratio"] - 1) <= 0.15 else 1


if __name__ == "__main__":
    sys.exit(main())
