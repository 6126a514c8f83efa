"""A target over two ranks on a GPU: prompts and steps are captured, with the host's text."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hunch import LLM, SamplingParams
from hunch.step.host_step import HostStep
from stand_in import lead_by_host
from tiny_models import write_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="each rank has a GPU of its own"),
]
GPU: dict[str, Any] = {
    "device": "cuda", "dtype": "bfloat16", "kv_bytes": 50_000_000, "max_num_seqs": 2,
    "tensor_parallel_size": 2,
}  # fmt: skip
PROMPTS = ["the model and the guess", "a token a token a token a", "fast token fast token fast"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.9, max_tokens=16, seed=5),
]


def texts(llm: LLM) -> list[list[int]]:
    outputs = [out for params in PARAMS for out in llm.generate(PROMPTS, params)]
    return [output.outputs[0].token_ids for output in outputs]


def test_the_host_only_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(write_llama(tmp_path / "model", width=64, layers=2))
    with LLM(model, speculate="off", **GPU) as llm:
        lead_by_host(llm.engine.runner)
        plain = texts(llm)
    monkeypatch.setattr(HostStep, "run", None)
    for chunk in (2048, 4):
        with LLM(model, speculate="suffix", max_num_batched_tokens=chunk, **GPU) as llm:
            assert texts(llm) == plain
