"""The law for quantised checkpoints: drafts and how weights are held change nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from hunch import LLM, SamplingParams
from hunch.models import load
from published_files import FORMATS, quantised_copy
from tiny_models import write_llama

PROMPTS = ["the model and the guess", "fast token fast token fast token fast", "a"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, max_tokens=24, seed=3, ignore_eos=True),
]
FAST = ("awq", "fp8", "bitsandbytes nf4")
FORMS = [
    form if form in FAST else pytest.param(form, marks=pytest.mark.slow) for form in sorted(FORMATS)
]
GPU: dict[str, Any] = {"device": "cuda", "kv_bytes": 50_000_000}


def checkpoint(form: str, folder: Path) -> str:
    write_llama(folder, width=128)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    quantised_copy(folder, form, config, tensors)
    return str(folder)


def ids(model: str, **arguments: Any) -> list[list[int]]:
    with LLM(model, **arguments) as llm:
        found = [
            list(output.outputs[0].token_ids)
            for params in PARAMS
            for output in llm.generate(PROMPTS, params, use_tqdm=False)
        ]
        assert arguments["speculate"] == "off" or llm.stats()["accepted"] > 0
    return found


def drafted(model: str, dtype: str = "auto") -> str:
    """By the model itself, in as many bits or fewer."""
    return f"draft:{model}:num_nodes=3:adaptive=false:dtype={dtype}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_drafts_change_nothing(form: str, kernels: str, tmp_path: Path) -> None:
    model = checkpoint(form, tmp_path)
    plain = ids(model, speculate="off", max_num_seqs=1, kernels=kernels)
    assert ids(model, speculate=drafted(model), kernels=kernels) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_on_a_gpu_as_if_expanded(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "MIN_KEPT_WIDTH", 1)
    model = checkpoint(form, tmp_path)
    kept = ids(model, speculate="off", max_num_seqs=1, **GPU)
    if "order" not in form:  # whose sums have an order of their own
        assert kept == ids(model, speculate="off", dtype="bfloat16", **GPU)
    for dtype in ("auto", "int4"):
        assert ids(model, speculate=drafted(model, dtype), **GPU) == kept


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["int8", "int4", "fp8"])
def test_rounded_when_loaded(dtype: str, tmp_path: Path) -> None:
    model = str(write_llama(tmp_path, width=128))
    plain = ids(model, speculate="off", dtype=dtype, max_num_seqs=1, **GPU)
    assert ids(model, speculate=drafted(model), dtype=dtype, **GPU) == plain
    assert ids(model, speculate=drafted(model, "fp8"), quantization=dtype, **GPU) == plain


@pytest.mark.parametrize(
    "where",
    [
        {"kernels": "auto"},
        {"kernels": "torch"},
        pytest.param({"dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param(GPU, marks=pytest.mark.gpu),
    ],
    ids=["native", "torch", "native int8", "gpu"],
)
@pytest.mark.parametrize("held", ["fp8", "int8"])
def test_keys_and_values_in_8_bits(held: str, where: dict[str, Any], tmp_path: Path) -> None:
    model = str(write_llama(tmp_path, width=128))
    plain = ids(model, speculate="off", kv_cache_dtype=held, max_num_seqs=1, **where)
    for kv_dtype in ("auto", "int8"):
        draft = f"{drafted(model)}:kv_dtype={kv_dtype}"
        assert ids(model, speculate=draft, kv_cache_dtype=held, **where) == plain
