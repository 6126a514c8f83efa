"""Merged drafts against each part alone: tokens per pass on six kinds of prompt, on a CPU.

Without options, the default model with the draft that comes with hunch. Every method drafts all it
can, so that figures are the same in every run. Texts are compared token for token.
"""

from __future__ import annotations

from collections.abc import Sequence

from hunch import LLM, SamplingParams
from hunch.bench.parts import PartOptions
from hunch.bench.readers import read_workloads
from hunch.config import DEFAULT_MODEL

CATEGORIES = ("chat", "math", "summary", "code", "rewrite", "retrieval")
METHODS = "suffix:adaptive=false,draft,suffix+draft"


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("merged", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--each", type=int, default=3, help="prompts of a kind")
    given = parser.parse_args(words)
    methods = given.methods.split(",")
    prompts = {
        category: [p for p in read_workloads("mixed", None) if p.category == category][: given.each]
        for category in CATEGORIES
    }
    params = SamplingParams(temperature=0, max_tokens=given.tokens, ignore_eos=True)
    found: dict[str, dict[str, float]] = {}
    texts: dict[str, list[list[int]]] = {}
    first = LLM(given.model, speculate=methods[0], max_num_seqs=1, always_draft=True)
    for method in methods:
        llm = first if method == methods[0] else first.sibling(method, always_draft=True)
        for category, some in prompts.items():
            outputs = llm.generate([p.encode(llm) for p in some], params, use_tqdm=False)
            answers = [output.outputs[0] for output in outputs]
            steps = sum(answer.stats["steps"] for answer in answers)
            num_tokens = sum(len(answer.token_ids) for answer in answers)
            found.setdefault(category, {})[method] = num_tokens / steps
            texts.setdefault(method, []).extend(answer.token_ids for answer in answers)
    assert all(text == texts[methods[0]] for text in texts.values()), "texts differ"
    print("| category | " + " | ".join(methods) + " |\n|---|" + "---|" * len(methods))
    for category, rates in found.items():
        print(f"| {category} | " + " | ".join(f"{rates[m]:.2f}" for m in methods) + " |")
    means = [sum(rates[m] for rates in found.values()) / len(found) for m in methods]
    print("| mean | " + " | ".join(f"{mean:.2f}" for mean in means) + " |")
