"""How much of a sampling drafter's draft each verifier keeps at T = 1: means and 95% intervals.

    python benchmarks/verifiers.py --prompts FILE.jsonl --speculate draft:num_nodes=5 --samples 4

Same prompts, same seeds, the same drafter. `greedy draft` is `exact` with a drafter that always
proposes its likeliest token. Tokens per pass is what a pass of the target yields on average; the
interval is a bootstrap over requests.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import mean

from hunch import LLM, SamplingParams
from hunch.cli.options import prompt_ids, read_prompts

WAYS = {
    "exact": ("exact", ""),
    "rejection": ("rejection", ""),
    "block": ("block", ""),
    "greedy draft": ("exact", ":draft_temperature=0.001"),
}


def measure(args: argparse.Namespace, verifier: str, more: str) -> list[tuple[int, int, int]]:
    """Per answer: its tokens, its passes, its accepted nodes."""
    with LLM(
        args.model,
        speculate=args.speculate + more,
        verifier=verifier,
        always_draft=True,
        max_num_seqs=args.batch,
        max_model_len=2048,
        threads=args.threads,
    ) as llm:
        prompts = [prompt_ids(llm, record) for record in read_prompts(args.prompts, args.limit)]
        params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, n=args.samples, seed=1
        )
        outputs = llm.generate(prompts, params)
    return [
        (len(answer.token_ids), answer.stats["steps"], answer.stats["accepted"])
        for output in outputs
        for answer in output.outputs
    ]


def interval(rows: list[tuple[int, int, int]], place: int) -> tuple[float, float, float]:
    """Column `place` over passes: the value, and 95% of its bootstrap."""
    rng = random.Random(0)

    def value(some: list[tuple[int, int, int]]) -> float:
        return mean(row[place] for row in some) / mean(row[1] for row in some)

    draws = sorted(value(rng.choices(rows, k=len(rows))) for _ in range(1000))
    return value(rows), draws[25], draws[974]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompts", required=True, type=Path)
    parser.add_argument("--speculate", default="draft:num_nodes=5")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", choices=list(WAYS), help="one way alone")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = {}
    for name, (verifier, more) in WAYS.items():
        if args.only not in (None, name):
            continue
        rows = measure(args, verifier, more)
        tokens, accepted = interval(rows, 0), interval(rows, 2)
        report[name] = {"num_answers": len(rows), "tokens_per_pass": tokens, "accepted": accepted}
        if not args.json:
            print(
                f"{name:13} tokens per pass {tokens[0]:.3f} [{tokens[1]:.3f}, {tokens[2]:.3f}]"
                f"   accepted per pass {accepted[0]:.3f} [{accepted[1]:.3f}, {accepted[2]:.3f}]",
                flush=True,
            )
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
