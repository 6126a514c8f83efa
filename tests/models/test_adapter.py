"""LoRA adapters against PEFT's own: the same text, whatever the base's format and the drafter."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from hunch import LLM, SamplingParams
from hunch.errors import ModelError
from hunch.models.weights import open_weights
from hunch.models.weights.adapter import AdaptedWeights
from server.live_server import api_server
from tiny_gguf import random_tensors, write_gguf
from tiny_models import write_llama

peft = pytest.importorskip("peft")

PROMPTS = ["the fast model of guessing", "in to the token and", "a model"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KINDS: dict[str, dict[str, Any]] = {
    "all matrices": {"r": 4, "lora_alpha": 12, "target_modules": "all-linear"},
    "some, each in its way": {
        "r": 2,
        "lora_alpha": 6,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "use_rslora": True,
        "rank_pattern": {"v_proj": 3},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 9},
    },
}


def write_adapter(base: Path, path: Path, seed: int = 0, **fields: Any) -> Any:
    """An adapter that changes the text, as PEFT writes it; returns PEFT's model."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **fields)
    adapted = peft.get_peft_model(model, config).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(path)
    return adapted


def texts(path: Path, **arguments: Any) -> list[list[int]]:
    with LLM(str(path), dtype="float32", **arguments) as llm:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("kind", KINDS)
def test_text_is_pefts(tmp_path: Path, kind: str) -> None:
    base = write_llama(tmp_path / "base")
    theirs = write_adapter(base, tmp_path / "adapter", **KINDS[kind])
    with LLM(str(base), dtype="float32", lora=str(tmp_path / "adapter")) as llm:
        outputs = llm.generate(PROMPTS, GREEDY)
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids + output.outputs[0].token_ids])
        with torch.inference_mode():
            best = theirs(ids).logits[0].argmax(-1).tolist()
        assert best[len(output.prompt_token_ids) - 1 : -1] == output.outputs[0].token_ids
    assert texts(base) != [output.outputs[0].token_ids for output in outputs]


def write_parts(path: Path, parts: dict[str, tuple[Any, Any]], **fields: Any) -> Path:
    """An adapter of these modules' A and B."""
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **fields}))
    tensors = {
        f"base_model.model.{module}.lora_{name}.weight": tensor.contiguous()
        for module, pair in parts.items()
        for name, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def test_a_quantised_file_is_merged_in_its_own_numbers(tmp_path: Path) -> None:
    """Rows of q stand in another order in such a file than an adapter has them."""
    tensors = random_tensors()
    weights = open_weights(write_gguf(tmp_path / "model.gguf", tensors, block_format="Q8_0"))
    generator = torch.Generator().manual_seed(1)
    modules = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.1.mlp.up_proj": (96, 64)}
    parts = {
        module: (
            torch.randn(2, num_in, generator=generator),
            torch.randn(num_out, 2, generator=generator),
        )
        for module, (num_out, num_in) in modules.items()
    }
    adapted = AdaptedWeights(weights, write_parts(tmp_path / "adapter", parts, lora_alpha=8, r=2))
    for module, (a_RK, b_NR) in parts.items():
        name = f"{module}.weight"
        wanted = weights.tensor(name) + 4 * b_NR @ a_RK
        torch.testing.assert_close(
            wanted - 4 * b_NR @ a_RK, torch.tensor(tensors[name]), atol=0.1, rtol=0
        )
        torch.testing.assert_close(adapted.tensor(name), wanted)
        packed = adapted.packed(name)
        assert packed is not None
        torch.testing.assert_close(packed.numbers(3, 40), wanted[3:40])
        order = torch.tensor([5, 0, 63])
        torch.testing.assert_close(packed.take(order).numbers(0, 3), wanted[order])
        assert packed.codes() is None
    untouched = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(adapted.tensor(untouched), weights.tensor(untouched))


WRONG = {
    "no directory": (None, {}, "as PEFT writes it"),
    "another method": ("q_proj", {"use_dora": True}, "use_dora=True is not supported"),
    "whole modules": ("q_proj", {"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "no such module": ("c_attn", {}, "does not have"),
    "another size": ("k_proj", {}, r"for a matrix of \(64, 64\)"),
    "a pattern": ("q_proj", {"alpha_pattern": {"(": 1}}, "alpha_pattern"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path: Path, case: str) -> None:
    base = write_llama(tmp_path / "base")
    module, fields, word = WRONG[case]
    adapter = tmp_path / "adapter"
    if module is not None:
        pair = torch.zeros(2, 64), torch.zeros(128, 2)
        write_parts(adapter, {f"model.layers.0.self_attn.{module}": pair}, **fields)
    with pytest.raises(ModelError, match=word):
        LLM(str(base), lora=str(adapter))


@pytest.mark.slow
def test_served_beside_others_the_text_is_its_own(tmp_path: Path) -> None:
    """Base and adapters at once, drafted, streamed by several clients: each as offline, alone."""
    base = write_llama(tmp_path / "base")
    names = {"base": {}, "one": {"seed": 1}, "two": {"seed": 2}}
    wanted = {}
    for name, fields in names.items():
        more = {}
        if fields:
            write_adapter(base, tmp_path / name, **fields, **KINDS["all matrices"])
            more["lora"] = str(tmp_path / name)
        wanted[name] = texts(base, speculate="off", **more)
    assert len({str(found) for found in wanted.values()}) == 3
    modules = [f"{name}={tmp_path / name}" for name in names if name != "base"]
    words = ["--model", str(base), "--dtype", "float32", "--served-model-name", "base"]
    words += ["--enable-lora", "--lora-modules", *modules, "--speculate", "ngram"]
    with (
        api_server(words, tmp_path / "log") as url,
        openai.OpenAI(base_url=url, api_key="none", timeout=120) as client,
        ThreadPoolExecutor(12) as pool,
    ):

        def ask(job: tuple[str, str]) -> list[int]:
            answer = client.completions.create(
                model=job[0],
                prompt=job[1],
                max_tokens=24,
                temperature=0,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            return answer.choices[0].token_ids  # type: ignore[attr-defined, no-any-return]

        jobs = [(name, prompt) for _ in range(3) for prompt in PROMPTS for name in names]
        for job, found in zip(jobs, pool.map(ask, jobs), strict=True):
            assert found == wanted[job[0]][PROMPTS.index(job[1])]
        listed = {model.id: model.parent for model in client.models.list()}  # type: ignore[attr-defined]
    assert listed == {"base": None, "one": "base", "two": "base"}
