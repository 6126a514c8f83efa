"""The law for a target with experts: what a draft asks of them changes no token of the text."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from drafters import speculate_for
from hunch import LLM, SamplingParams
from published_files import random_mxfp4, write
from tiny_families import write_family
from tiny_models import write_llama, write_tokenizer

PROMPTS = ["the model and the guess", "fast token fast token fast token fast", "to be or not to be"]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=11),
}
SMALL = {"max_model_len": 256, "kv_bytes": 8_000_000, "threads": 1}
ENGINES: dict[str, dict[str, object]] = {
    "batch": {"always_draft": True},
    "small chunks": {"always_draft": True, "max_num_batched_tokens": 5, "max_num_seqs": 2},
    "torch": {"always_draft": True, "kernels": "torch"},
}
PAIRS = [
    pytest.param(speculate, engine, marks=[] if engine == "batch" else pytest.mark.slow)
    for speculate in ("suffix", "recycling", "draft", "auto")
    for engine in ENGINES
] + [("ngram", "small chunks"), ("recycling", "torch")]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("experts"), num_experts=6)


def texts(llm: LLM) -> list[list[int]]:
    return [
        output.outputs[0].token_ids
        for params in PARAMS.values()
        for output in llm.generate(PROMPTS, params)
    ]


@pytest.fixture(scope="module")
def plain(target: Path) -> dict[str, list[list[int]]]:
    found = {}
    for kernels in ("auto", "torch"):
        options = {"kernels": kernels, "max_num_seqs": 1, "dtype": "float32"}
        with LLM(str(target), speculate="off", **SMALL, **options) as llm:
            found[kernels] = texts(llm)
    return found


@pytest.mark.parametrize(("speculate", "engine"), PAIRS)
def test_text_does_not_depend_on_the_drafter(
    speculate: str,
    engine: str,
    target: Path,
    plain: dict[str, list[list[int]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    options = ENGINES[engine]
    spec = speculate_for(speculate, target, tmp_path_factory.mktemp("draft"))
    with LLM(str(target), speculate=spec, dtype="float32", **SMALL, **options) as llm:
        assert texts(llm) == plain[str(options.get("kernels", "auto"))]
        assert llm.stats()["drafted"] > 0


@pytest.fixture(scope="module")
def latent_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSeek V3 in small: latent attention, a dense layer, groups of experts."""
    folder = tmp_path_factory.mktemp("latent")
    config = transformers.DeepseekV3Config(
        vocab_size=write_tokenizer(folder), hidden_size=64, intermediate_size=96,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, n_routed_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=32, kv_lora_rank=32, q_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16, n_group=4, topk_group=2,
        first_k_dense_replace=1, max_position_embeddings=256, initializer_range=0.3,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("speculate", "kernels"),
    [
        pytest.param("suffix:adaptive=false", "native", marks=pytest.mark.slow),
        ("recycling", "native"),
        pytest.param("draft", "native", marks=pytest.mark.slow),
        pytest.param("recycling", "torch", marks=pytest.mark.slow),
    ],
)
def test_latent_attention_too(speculate: str, kernels: str, latent_target: Path) -> None:
    """Trees move one vector per token, not two; prompts come in chunks, texts share blocks."""
    if speculate == "draft":
        speculate = f"draft:{latent_target}"
    options = {"dtype": "float32", "kernels": "torch" if kernels == "torch" else "auto", **SMALL}
    with LLM(str(latent_target), speculate="off", max_num_seqs=1, **options) as llm:
        assert llm.engine.capacity.kernels == kernels
        expected = texts(llm)
    options |= {"always_draft": True, "max_num_batched_tokens": 17, "block_size": 8}
    with LLM(str(latent_target), speculate=speculate, **options) as llm:
        assert texts(llm) == expected
        assert texts(llm) == expected  # from the prefix cache
        assert llm.stats()["accepted"] > 0


@pytest.mark.parametrize("family", ["deepseek v3", "glm 4.5"])
def test_a_target_with_its_own_mtp_layer(family: str, latent_target: Path, tmp_path: Path) -> None:
    """As DeepSeek and GLM publish it: one more layer of the target's kind, after its last."""
    target = latent_target
    if family == "glm 4.5":
        target = write_family(tmp_path / "target", family)
    tensors = load_file(target / "model.safetensors")
    width = len(tensors["model.norm.weight"])
    layer, last = "model.layers.2.", "model.layers.1."
    found = {
        name.replace(last, layer): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    found[f"{layer}eh_proj.weight"] = torch.eye(width).repeat(1, 2) / 2
    for name in ("enorm", "hnorm", "shared_head.norm"):
        found[f"{layer}{name}.weight"] = torch.ones(width)
    save_file(found, tmp_path / "model.safetensors")
    shutil.copy(target / "config.json", tmp_path)
    options = {"dtype": "float32", **SMALL}
    with LLM(str(target), speculate="off", max_num_seqs=1, **options) as llm:
        expected = texts(llm)
    spec = f"mtp:{tmp_path}"
    with LLM(str(target), speculate=spec, always_draft=True, **options) as llm:
        assert texts(llm) == expected
        assert llm.stats()["drafted"] > 0


@pytest.mark.parametrize("speculate", ["suffix", "recycling"])
def test_experts_in_mxfp4_too(speculate: str, tmp_path: Path) -> None:
    model = write_family(tmp_path, "gpt-oss")
    stored = random_mxfp4(load_file(model / "model.safetensors"))
    config = json.loads((model / "config.json").read_text())
    write(model, {**config, "quantization_config": {"quant_method": "mxfp4"}}, stored)
    with LLM(str(model), speculate="off", max_num_seqs=1, **SMALL) as llm:
        expected = texts(llm)
    spec = speculate_for(speculate, model, tmp_path)
    with LLM(str(model), speculate=spec, always_draft=True, **SMALL) as llm:
        assert texts(llm) == expected
        assert llm.stats()["drafted"] > 0


def test_quantised_experts_too(target: Path) -> None:
    """In 8 bits, where activations are rounded by groups as well."""
    with LLM(str(target), speculate="off", dtype="int8", max_num_seqs=1, **SMALL) as llm:
        expected = texts(llm)
    with LLM(
        str(target), speculate="suffix:adaptive=false", dtype="int8", always_draft=True, **SMALL
    ) as llm:
        assert texts(llm) == expected
