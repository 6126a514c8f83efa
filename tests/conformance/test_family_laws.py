"""The law over families: text is decided by target and seed alone, on the kernels of its device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import head_files
from drafters import untrained
from hunch import LLM, SamplingParams
from hunch.registry import DRAFTERS, SYNTHETIC
from tiny_families import BY_TORCH, FAMILIES, write_family

IS_GPU = torch.cuda.is_available()
PROMPTS = [
    "the model and the guess",
    "fast token fast token fast token fast",
    "in the model of the guess in the model of the " * 2,
    "a",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, max_tokens=16, seed=7, repetition_penalty=1.1),
]
COMMON: dict[str, Any] = {
    "max_model_len": 200,
    "kv_bytes": 8_000_000,
    "dtype": "bfloat16" if IS_GPU else "int8",
    "threads": 1,
}
ENGINES: dict[str, dict[str, Any]] = {
    "suffix": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "recycling": {"num_blocks": 18, "block_size": 8, "max_num_seqs": 4},
    "draft": {"max_num_seqs": 3},
}


def texts(llm: LLM) -> list[list[int]]:
    return [
        output.outputs[0].token_ids
        for params in PARAMS
        for output in llm.generate(PROMPTS, params, use_tqdm=False)
    ]


# The other tests of this folder have Llama; what else is slow here differs little from a daily one.
SLOW = (
    "bitnet",
    "gemma 3n",
    "phi-moe",
    "granite",
    "starcoder 2",
    "phi",
    "smollm 3",
    "glm 4",
    "ministral 3",
    "stablelm",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma 2",
    "gemma 4, keys as values",
    "opt, norms after",
    "falcon",
    "nemotron",
    "minicpm",
    "olmo 2",
    "olmoe",
    "exaone 4",
    "gpt-bigcode",
    "mixtral",
    "qwen2-moe",
    "qwen3-moe",
    "granite-moe",
    "glm 4.5",
    "deepseek v2",
    "glm 4.7 flash",
    "olmo",
    "olmo, limits",
    "helium",
    "apertus",
    "hunyuan",
    "vaultgemma",
    "gpt-j",
    "gpt-neo",
    "dots1",
    "minimax m2",
    "ernie 4.5, experts",
    "granite, experts and more",
    "hunyuan, experts",
    "cohere, head norms",
    "persimmon",
    "bloom",
    "cohere 2, experts",
    "nanochat",
    "mpt",
)

CASES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else []) for name in FAMILIES]


@pytest.mark.parametrize("family", CASES)
def test_text_depends_on_the_target_and_the_seed_alone(family: str, tmp_path: Path) -> None:
    model = write_family(tmp_path / "target", family)
    draft = write_family(tmp_path / "draft", family, seed=1)
    with LLM(str(model), speculate="off", max_num_seqs=1, **COMMON) as llm:
        kernels = "triton" if IS_GPU else "native"
        assert llm.engine.capacity.kernels == ("torch" if family in BY_TORCH else kernels)
        expected = texts(llm)
    assert len({tuple(ids) for ids in expected}) > len(PROMPTS)
    for method, arguments in ENGINES.items():
        speculate = f"draft:{draft}" if method == "draft" else method
        options = {**COMMON, **arguments, "always_draft": True}
        with LLM(str(model), speculate=speculate, **options) as llm:
            assert texts(llm) == expected, method
            assert llm.stats()["drafted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_drafter_leaves_the_text_as_it_is(family: str, tmp_path: Path) -> None:
    """Each method of the registry, networks with small ones of the target's width."""
    model = write_family(tmp_path / "target", family)
    params = replace(PARAMS[1], prediction="the model of the guess in the model of the")
    with LLM(str(model), speculate="off", max_num_seqs=1, **COMMON) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, params, use_tqdm=False)]
    draft = head_files.make_draft(model, tmp_path / "draft", noise=0.05)
    study = head_files.study(model, prompts=PROMPTS[:2])
    for method in sorted(set(DRAFTERS) - {"off"} - SYNTHETIC):
        speculate = untrained(method, study, draft, tmp_path)
        with LLM(str(model), speculate=speculate, always_draft=True, **COMMON) as llm:
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected, method
            assert llm.stats()["drafted"] > 0, method


def test_rows_hold_no_more_blocks_than_their_windows_reach(tmp_path: Path) -> None:
    """Two texts of 13 blocks each run side by side in 14, and say what they say alone.

    So does one that is longer than all blocks together.
    """
    model = write_family(tmp_path, "mistral")
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    prompts = ["the model", "fast token"]
    answers = []
    for options in ({}, {"num_blocks": 14, "block_size": 8}):
        with LLM(str(model), speculate="recycling", **COMMON, **options) as llm:
            answers.append(
                [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
            )
            assert llm.stats()["num_preemptions"] == 0
            (long,) = llm.generate("the model of the guess " * 30, PARAMS[1], use_tqdm=False)
            assert len(long.prompt_token_ids) > 14 * 8
            answers[-1].append(long.outputs[0].token_ids)
    assert answers[0] == answers[1]
