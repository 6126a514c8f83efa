"""How likely a text is to a model: the exponential of the mean surprise of its tokens.

By the kernels as served (activations of 8 and of 14 bits), in float32 and, on request, by
transformers in float32, on the same file and tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

from hunch import LLM, SamplingParams
from hunch.bench.parts import PartOptions
from hunch.bench.parts.answers import PRECISIONS


def perplexity(llm: LLM, ids: list[int]) -> float:
    """The perplexity of every token but the first."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    scores = llm.generate([ids], params, use_tqdm=False)[0].prompt_logprobs
    assert scores is not None
    found = [some[token].logprob for token, some in zip(ids, scores, strict=True) if some]
    return math.exp(-sum(found) / len(found))


def of_transformers(path: Path, ids: list[int]) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    where, name = (path.parent, path.name) if path.is_file() else (path, None)
    model = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    ids_1T = torch.tensor([ids])
    with torch.inference_mode():
        scores_TV = model(ids_1T).logits[0, :-1].float().log_softmax(-1)
    return float(torch.exp(-scores_TV.gather(1, ids_1T[0, 1:, None]).mean()))


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("perplexity", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True, help="a file of text")
    parser.add_argument("--limit", type=int, default=900, help="tokens that are read")
    parser.add_argument("--transformers", action="store_true", help="beside transformers")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args(words)
    text, report, ids = args.text.read_text(encoding="utf-8"), {}, [0]
    for name, options in PRECISIONS.items():
        with LLM(args.model, speculate="off", max_num_seqs=1, max_model_len=2048, **options) as llm:
            ids = llm.tokenizer.encode(text)[: min(args.limit, 2047)]
            report[name] = perplexity(llm, ids)
        if not args.json:
            print(f"{name:12} {report[name]:8.3f} over {len(ids)} tokens", flush=True)
    if args.transformers:
        report["transformers"] = of_transformers(Path(args.model), ids)
        if not args.json:
            print(f"transformers {report['transformers']:8.3f}")
    if args.json:
        print(json.dumps({"tokens": len(ids), **report}))
