"""hunch on a GPU: two targets, every method, one to hundreds of requests, checked and timed.

python benchmarks/gpu.py --prompts spec_mix_48.jsonl [--targets small,7b] [--methods off,ngram,auto]
                         [--concurrency 1,8,64,256] [--drafter draft] [--in-turn] [--vllm]
                         [--json FILE]

The targets are the default model, and the same model enlarged to a 7B model's cost (its text is the
same up to rounding). The price of exact products is printed first. Greedy, 128 new tokens, end of
text ignored, prefix cache and stores shared by requests off. One request: prompts one by one. N
requests: the first N of the prompts, repeated, submitted at once, reading the prompts included.
Each figure is the best of the rounds (one by one: of one round), after a short one that is not
counted; token ids are compared with the first seen of each prompt, plain decoding's of one request
at a time. "x" is the first method's median time over this one's; with --in-turn the methods take
turns in every round, so that a machine that changes its pace changes it for all (they must fit the
memory together).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from exactness import price
from gpu_vllm import METHODS, beside, is_installed

import hunch.llm as front
from hunch import LLM, SamplingParams
from hunch.bench.device.enlarged import SEVEN_BILLION, EnlargedWeights
from hunch.hub import resolve
from hunch.models.cuda import CudaDecoder
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights

WALL = 4.45e12  # bytes per second an H200 was measured to read
WARM_TOKENS = 24  # of the round that is not counted
KV_BYTES = {"small": 8 * 2**30, "7b": 24 * 2**30}


def weights_of(target: str) -> Any:
    weights = open_weights(resolve("smollm2-135m"))
    return EnlargedWeights(weights, SEVEN_BILLION, "cuda") if target == "7b" else weights


def build(target: str) -> CudaDecoder:
    return CudaDecoder(load_decoder(weights_of(target), dtype="bfloat16", device="cuda"))


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
    plain = Plain()
    groups = [args.methods] if args.in_turn else [[method] for method in args.methods]
    for group in groups + [[method] for method in args.drafter]:
        torch.cuda.synchronize()
        llms = {method: load(decoder, target, method, max(args.concurrency)) for method in group}
        is_further = group[0] in args.drafter
        for concurrency in args.drafter_concurrency if is_further else args.concurrency:
            few = prompts if concurrency > 1 else prompts[:: len(prompts) // 2]
            for llm in llms.values():
                run(llm, few, concurrency, WARM_TOKENS)
            runs: dict[str, list[dict[str, Any]]] = {method: [] for method in group}
            rounds = args.rounds if concurrency > 1 else 1  # one by one, they are rounds themselves
            for _ in range(rounds):
                for method, llm in llms.items():
                    runs[method].append(run(llm, prompts, concurrency, args.tokens))
            for method in group:
                row = {"target": target, "method": method, "concurrency": concurrency}
                row |= figures(runs[method], plain, concurrency, kinds, decoder.weight_bytes)
                rows.append(row)
                show(row)
        for llm in llms.values():
            llm.close()
        del llm, llms
        gc.collect()
        torch.cuda.empty_cache()
    for method in METHODS if args.vllm else ():
        job = {"tokens": args.tokens, "rounds": args.rounds, "warm_tokens": WARM_TOKENS}
        found = beside(weights_of(target), method, prompts, args.concurrency, **job)
        for concurrency, some in found.items():
            row = {"target": target, "method": method, "concurrency": concurrency}
            rows.append(row | figures(some, plain, concurrency, kinds, decoder.weight_bytes))
            show(rows[-1])
    return rows


@dataclass(slots=True)
class Plain:
    """What others are compared with: the first answer to each prompt, the first method's times."""

    answers: dict[int, list[int]] = field(default_factory=dict)
    by_kind: dict[str, float] | None = None
    median: dict[int, float] = field(default_factory=dict)  # by concurrency


def figures(
    runs: list[dict[str, Any]], plain: Plain, concurrency: int, kinds: list[str], weight_bytes: int
) -> dict[str, Any]:
    best = min(runs, key=lambda r: r["seconds"])
    is_equal = all(
        answer == plain.answers.setdefault(i % len(kinds), answer)
        for each in runs
        for i, answer in enumerate(each["answers"])
    )
    num_tokens = sum(map(len, best["answers"]))
    median = statistics.median(r["seconds"] for r in runs)
    row = {
        "tok_s": num_tokens / best["seconds"],
        "tokens_per_pass": None,
        "equal": is_equal,
        "num_prompts": len(best["answers"]),
        "ratio": plain.median.setdefault(concurrency, median) / median,
        "tb_s": None,
        "wall_share": None,
    }
    if best["steps"] is not None:  # another engine does not tell
        row["tokens_per_pass"] = num_tokens / max(best["steps"], 1)
        # Bytes of weights per pass of all rows, at the speed the passes came.
        row["tb_s"] = best["steps"] / concurrency * weight_bytes / best["seconds"] / 1e12
        row["wall_share"] = row["tb_s"] * 1e12 / WALL
    if concurrency == 1:
        by_kind: dict[str, float] = defaultdict(float)
        for kind, seconds in zip(kinds, best["each"], strict=True):
            by_kind[kind] += seconds
        plain.by_kind = plain.by_kind or by_kind
        row["by_category"] = {k: plain.by_kind[k] / v for k, v in by_kind.items()}
    return row


def show(row: dict[str, Any]) -> None:
    kinds = row.get("by_category", {})
    more = " ".join(f"{kind} {ratio:.2f}" for kind, ratio in kinds.items())
    passes = ""
    if row["tokens_per_pass"] is not None:
        passes = f"{row['tokens_per_pass']:.2f} per pass  wall {row['wall_share']:.0%}  "
    print(
        f"{row['target']:6} {row['method']:28} c{row['concurrency']:<5} {row['tok_s']:9.0f} tok/s  "
        f"x {row['ratio']:.3f}  {passes}equal {'yes' if row['equal'] else 'NO'}  {more}",
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
    parser.add_argument("--in-turn", action="store_true", help="methods take turns in a round")
    parser.add_argument(
        "--vllm", action="store_true", help="vLLM beside it, plain and with n-grams"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.vllm and not is_installed():
        parser.error("vLLM is not installed here: pip install vllm, or leave out --vllm")
    of_drafters = args.drafter_concurrency or args.concurrency
    args.drafter_concurrency = [int(c) for c in of_drafters.split(",")]
    args.concurrency = [int(c) for c in args.concurrency.split(",")]
    args.methods = args.methods.split(",")
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
