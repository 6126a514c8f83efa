"""hunch on a GPU: two targets, every method, one to hundreds of requests, checked and timed.

python benchmarks/gpu.py --prompts spec_mix_48.jsonl [--targets small,7b] [--methods off,ngram,auto]
                         [--concurrency 1,8,64,256] [--drafter draft] [--json FILE]

The targets are the default model, and the same model enlarged to a 7B model's cost (its text is the
same up to rounding). The price of exact products is printed first. Greedy, 128 new tokens, end of
text ignored, prefix cache and stores shared by requests off. One request: prompts one by one. N
requests: the first N of the prompts, repeated, submitted at once, reading the prompts included.
Each figure is the best of the rounds (one by one: of one round), after a short one that is not
counted; token ids are compared with plain decoding of one request at a time.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from enlarged import SEVEN_BILLION, EnlargedWeights
from exactness import price

import hunch.llm as front
from hunch import LLM, SamplingParams
from hunch.hub import resolve
from hunch.models.cuda import CudaDecoder
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights

WALL = 4.45e12  # bytes per second an H200 was measured to read
WARM_TOKENS = 24  # of the round that is not counted
KV_BYTES = {"small": 8 * 2**30, "7b": 24 * 2**30}


def build(target: str) -> CudaDecoder:
    weights = open_weights(resolve("smollm2-135m"))
    if target == "7b":
        weights = EnlargedWeights(weights, SEVEN_BILLION, "cuda")
    return CudaDecoder(load_decoder(weights, dtype="bfloat16", device="cuda"))


def load(decoder: CudaDecoder, target: str, method: str, max_rows: int) -> LLM:
    front._load_target = lambda *_: decoder  # one copy of the weights serves every method
    return LLM(
        "smollm2-135m",
        speculate=method,
        device="cuda",
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=max_rows,
        max_num_batched_tokens=16384,
        kv_bytes=KV_BYTES[target],
        enable_prefix_caching=False,
    )


def run(llm: LLM, prompts: list[list[int]], concurrency: int, num_tokens: int) -> dict[str, Any]:
    """Token ids of every answer, and the seconds it took."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    before = llm.stats()
    answers: list[list[int]] = []
    each: list[float] = []
    began = time.perf_counter()
    if concurrency == 1:
        for prompt in prompts:
            start = time.perf_counter()
            answers.append(llm.generate(prompt, params)[0].outputs[0].token_ids)
            each.append(time.perf_counter() - start)
    else:
        many = [prompts[i % len(prompts)] for i in range(concurrency)]
        answers = [out.outputs[0].token_ids for out in llm.generate(many, params)]
    seconds = time.perf_counter() - began
    after = llm.stats()
    return {
        "answers": answers,
        "seconds": seconds,
        "each": each,
        "steps": after["steps"] - before["steps"],
    }


def sweep(
    args: argparse.Namespace, target: str, prompts: list[list[int]], kinds: list[str]
) -> list:
    decoder = build(target)
    for num_rows, (exact, free) in price(decoder).items():
        print(
            f"{target:6} products of {num_rows:3} rows: {1e3 * exact:.2f} ms in a fixed order, "
            f"{1e3 * free:.2f} in any: exactness costs {exact / max(free, 1e-9) - 1:+.0%}",
            flush=True,
        )
    rows: list[dict[str, Any]] = []
    plain: list[list[int]] | None = None
    plain_each: dict[str, float] = {}
    for method in args.methods:
        torch.cuda.synchronize()
        llm = load(decoder, target, method, max(args.concurrency))
        is_further = method in args.drafter
        for concurrency in args.drafter_concurrency if is_further else args.concurrency:
            few = prompts if concurrency > 1 else prompts[:: len(prompts) // 2]
            run(llm, few, concurrency, WARM_TOKENS)
            rounds = args.rounds if concurrency > 1 else 1  # one by one, they are rounds themselves
            runs = [run(llm, prompts, concurrency, args.tokens) for _ in range(rounds)]
            best = min(runs, key=lambda r: r["seconds"])
            if plain is None:
                plain = best["answers"]
            want = [plain[i % len(plain)] for i in range(len(best["answers"]))]
            is_equal = all(r["answers"] == want for r in runs)
            num_tokens = sum(map(len, best["answers"]))
            row = {
                "target": target,
                "method": method,
                "concurrency": concurrency,
                "tok_s": num_tokens / best["seconds"],
                "tokens_per_pass": num_tokens / max(best["steps"], 1),
                "equal": is_equal,
                "num_prompts": len(best["answers"]),
            }
            # Bytes of weights per pass of all rows, at the speed the passes came.
            passes = num_tokens / row["tokens_per_pass"] / concurrency
            row["tb_s"] = passes * decoder.weight_bytes / best["seconds"] / 1e12
            row["wall_share"] = row["tb_s"] * 1e12 / WALL
            if concurrency == 1:
                by_kind: dict[str, list[float]] = defaultdict(list)
                for kind, seconds in zip(kinds, best["each"], strict=True):
                    by_kind[kind].append(seconds)
                sums = {kind: sum(values) for kind, values in by_kind.items()}
                if method == "off":
                    plain_each = sums
                if plain_each:
                    row["by_category"] = {k: plain_each[k] / v for k, v in sums.items()}
            rows.append(row)
            show(row)
        llm.close()
        del llm
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def show(row: dict[str, Any]) -> None:
    kinds = row.get("by_category", {})
    more = " ".join(f"{kind} {ratio:.2f}" for kind, ratio in kinds.items())
    print(
        f"{row['target']:6} {row['method']:28} c{row['concurrency']:<5} {row['tok_s']:9.0f} tok/s  "
        f"{row['tokens_per_pass']:.2f} per pass  wall {row['wall_share']:.0%}  "
        f"equal {'yes' if row['equal'] else 'NO'}  {more}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--targets", default="small,7b")
    parser.add_argument("--methods", default="off,ngram,suffix,auto")
    parser.add_argument("--drafter", action="append", default=[], help="a further method to try")
    parser.add_argument("--concurrency", default="1,8,64,256")
    parser.add_argument("--drafter-concurrency", help="for them; as the others if not given")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--limit", type=int, help="only so many prompts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    of_drafters = args.drafter_concurrency or args.concurrency
    args.drafter_concurrency = [int(c) for c in of_drafters.split(",")]
    args.concurrency = [int(c) for c in args.concurrency.split(",")]
    args.methods = args.methods.split(",") + args.drafter
    tokenizer = front.load_text(front.config_from_vllm(model="smollm2-135m"))
    lines = [json.loads(line) for line in args.prompts.read_text().splitlines()][: args.limit]
    prompts = [
        tokenizer.render_chat([{"role": "user", "content": line["turns"][0]}]) for line in lines
    ]
    kinds = [line.get("category", "all") for line in lines]
    rows: list[dict[str, Any]] = []
    for target in args.targets.split(","):
        rows += sweep(args, target, prompts, kinds)
        gc.collect()
        torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
