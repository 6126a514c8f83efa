"""A hundred simple questions: how often quantised kernels answer as float32 does, and how fast.

Greedy. A model without a chat template is asked "Question: ... Answer:". `identical` counts answers
equal to float32's token for token, `begins alike` those whose first eight tokens are. Speeds are of
one request at a time, medians of interleaved runs.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hunch import LLM, SamplingParams
from hunch.bench.parts import PartOptions

QUESTIONS = Path(__file__).with_name("simple_questions.jsonl")
PRECISIONS: dict[str, dict[str, Any]] = {
    "8 bits": {"activation_bits": 8},
    "14 bits": {"activation_bits": 14},
    "float32": {"dtype": "float32"},
}


def answers(llm: LLM, questions: list[str], max_tokens: int) -> list[list[int]]:
    prompts: list[Any] = [f"Question: {text}\nAnswer:" for text in questions]
    if llm.has_chat_template:
        prompts = [llm.encode_turn(text) for text in questions]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    outputs = llm.generate(prompts, params)
    return [output.outputs[0].token_ids for output in outputs]


def speed(llm: LLM) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    started = time.perf_counter()
    llm.generate("The history of the sea is", params, use_tqdm=False)
    return 64 / (time.perf_counter() - started)


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("answers", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=100, help="questions to ask, of all kinds")
    parser.add_argument("--max-tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--repeats", type=int, default=7, help="speed runs of each way")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args(words)
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()
    lines = lines[:: max(len(lines) // max(args.limit, 1), 1)][: args.limit]
    questions = [json.loads(line)["turns"][0] for line in lines]
    llms = {
        name: LLM(args.model, speculate="off", max_num_seqs=8, max_model_len=512, **options)
        for name, options in PRECISIONS.items()
    }
    speeds: dict[str, list[float]] = {name: [] for name in llms}
    for _ in range(args.repeats):
        for name, llm in llms.items():
            speeds[name].append(speed(llm))
    replies = {name: answers(llm, questions, args.max_tokens) for name, llm in llms.items()}
    report = {}
    for name in llms:
        pairs = list(zip(replies[name], replies["float32"], strict=True))
        report[name] = {
            "identical": sum(own == exact for own, exact in pairs),
            "begins_alike": sum(own[:8] == exact[:8] for own, exact in pairs),
            "of": len(pairs),
            "tokens_per_second": round(statistics.median(speeds[name]), 1),
        }
    if args.json:
        print(json.dumps(report))
        return
    for name, row in report.items():
        print(
            f"{name:8} identical {row['identical']:3}/{row['of']}  begins alike "
            f"{row['begins_alike']:3}/{row['of']}  {row['tokens_per_second']:6.1f} tok/s"
        )
