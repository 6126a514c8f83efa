"""vLLM on a target of `benchmarks/gpu.py`: the same weights, prompts and rounds, another process.

`beside` writes the target as a checkpoint, starts this file as a program with one method, and reads
back what it did. The prompts go in as token ids, so both engines see the same.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

METHODS: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm:ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 4,
        }
    },
}


def is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def save(weights: Any, folder: Path) -> None:
    """A checkpoint in bfloat16 that any engine can read."""
    config = {**weights.config, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: weights.tensor(name, torch.bfloat16).cpu() for name in weights.names()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def beside(
    weights: Any, method: str, prompts: list[list[int]], concurrency: list[int], **job: Any
) -> dict[int, list[dict[str, Any]]]:
    """Rounds of vLLM by concurrency, as `gpu.run` describes them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(weights, folder)
        job |= {"method": method, "prompts": prompts, "concurrency": concurrency}
        (folder / "job.json").write_text(json.dumps(job))
        subprocess.run([sys.executable, __file__, name], check=True)
        found = json.loads((folder / "runs.json").read_text())
    return {int(number): runs for number, runs in found.items()}


def serve(folder: Path) -> None:
    """The other side: what the job in this folder asks for."""
    from vllm import LLM

    job = json.loads((folder / "job.json").read_text())
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        max_num_seqs=max(job["concurrency"]),
        enable_prefix_caching=False,
        gpu_memory_utilization=0.6,  # the process that asked holds the weights too
        **METHODS[job["method"]],
    )
    runs: dict[int, list[dict[str, Any]]] = {}
    for number in job["concurrency"]:
        few = prompts if number > 1 else prompts[:: len(prompts) // 2]
        one_round(llm, few, number, job["warm_tokens"])
        rounds = job["rounds"] if number > 1 else 1
        runs[number] = [one_round(llm, prompts, number, job["tokens"]) for _ in range(rounds)]
    (folder / "runs.json").write_text(json.dumps(runs))


def one_round(
    llm: Any, prompts: list[dict[str, Any]], concurrency: int, num_tokens: int
) -> dict[str, Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
    batches = [[prompts[i % len(prompts)] for i in range(concurrency)]]
    if concurrency == 1:
        batches = [[prompt] for prompt in prompts]
    answers: list[list[int]] = []
    each: list[float] = []
    for batch in batches:
        began = time.perf_counter()
        outputs = llm.generate(batch, params, use_tqdm=False)
        each.append(time.perf_counter() - began)
        answers += [list(output.outputs[0].token_ids) for output in outputs]
    return {"answers": answers, "seconds": sum(each), "each": each, "steps": None}


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
