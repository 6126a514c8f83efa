"""Examples of other engines' documentation, with only imports and model paths changed."""

from __future__ import annotations

from pathlib import Path

import pytest

import head_files
from hunch import LLM, SamplingParams
from hunch.sglang import Engine
from tiny_models import write_llama

SMALL = {"always_draft": True, "max_model_len": 256, "kv_bytes": 8_000_000, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("models") / "target", width=32)


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return head_files.make_draft(target, tmp_path_factory.mktemp("models") / "draft", noise=0.05)


def check(llm: LLM, target: Path) -> None:
    prompts = ["The future of AI is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
    outputs = llm.generate(prompts, sampling_params)
    plain = LLM(str(target), speculate="off", **SMALL).generate(prompts, sampling_params)
    for output in outputs:
        assert output.prompt == "The future of AI is"
        assert output.outputs[0].text == plain[0].outputs[0].text
        assert output.outputs[0].stats["drafted"] > 0


def test_vllm_with_a_draft_model(target: Path, draft: Path) -> None:
    llm = LLM(
        model=str(target),
        tensor_parallel_size=1,
        speculative_model=str(draft),
        num_speculative_tokens=5,
        **SMALL,
    )
    check(llm, target)


def test_vllm_with_a_draft_model_in_a_dict(target: Path, draft: Path) -> None:
    llm = LLM(
        model=str(target),
        tensor_parallel_size=1,
        speculative_config={"model": str(draft), "num_speculative_tokens": 5},
        **SMALL,
    )
    check(llm, target)


def test_vllm_with_an_mlp_speculator(target: Path, tmp_path: Path) -> None:
    head_files.make_mlp(head_files.study(target, num_texts=2, length=12), tmp_path, num_steps=5)
    llm = LLM(
        model=str(target),
        tensor_parallel_size=1,
        speculative_model=str(tmp_path),
        speculative_draft_tensor_parallel_size=1,
        **SMALL,
    )
    check(llm, target)


def test_sglang_with_a_draft_model(target: Path, draft: Path) -> None:
    llm = Engine(
        model_path=str(target),
        speculative_draft_model_path=str(draft),
        speculative_num_draft_tokens=5,
    )
    outputs = llm.generate(["The future of AI is"], {"temperature": 0, "max_new_tokens": 30})
    plain = LLM(str(target), speculate="off", **SMALL).generate(
        "The future of AI is", SamplingParams(temperature=0, max_tokens=30)
    )
    assert outputs[0]["text"] == plain[0].outputs[0].text
    llm.shutdown()
