"""Requests that ask for more than tokens, on a GPU: captured steps answer as the host does."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hunch import LLM
from hunch.errors import ModelFormatError
from hunch.step.host_step import HostStep
from stand_in import lead_by_host, lead_noted
from step.test_captured_requests import PARAMS, PROMPTS, asked_of_prompts, run, shown
from tiny_models import write_llama

pytestmark = pytest.mark.gpu
GPU: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "kv_bytes": 50_000_000}


@pytest.mark.parametrize("method", ["off", "suffix:adaptive=false:num_nodes=3", "draft"])
def test_as_by_the_host(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(write_llama(tmp_path / "model", width=64, layers=2))
    with LLM(model, speculate="off", max_num_seqs=1, **GPU) as llm:
        lead_by_host(llm.engine.runner)
        plain = shown(run(llm, *PARAMS))
    if method == "draft":
        method = f"draft:{model}:num_nodes=3:adaptive=false"
    with LLM(model, speculate=method, **GPU) as llm:
        by_host = lead_noted(monkeypatch)
        for name in PARAMS:
            place = len(PROMPTS) * list(PARAMS).index(name)
            assert shown(run(llm, name)) == plain[place : place + len(PROMPTS)], name
        assert shown(run(llm, *PARAMS)) == plain
        num_requests = 2 * len(plain)
        assert method == "off" or llm.stats()["accepted"] > 0
    assert sum(len(plan.work) for plan in by_host) == num_requests  # their prompts, nothing else


def test_what_is_asked_of_prompts_as_by_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores and states of prompts, and first tokens of grammars beside rows that read masks."""
    model = str(write_llama(tmp_path / "model", width=64, layers=2))
    with LLM(model, speculate="off", max_num_seqs=1, **GPU) as llm:
        lead_by_host(llm.engine.runner)
        plain, masked = asked_of_prompts(llm), shown(run(llm, "schema", "regex"))
    monkeypatch.setattr(HostStep, "run", None)
    for size in (160, 11):
        sizes = {"max_num_seqs": 3, "max_num_batched_tokens": size}
        with LLM(model, speculate="suffix:adaptive=false:num_nodes=3", **sizes, **GPU) as llm:
            assert asked_of_prompts(llm) == plain
            assert shown(run(llm, "schema", "regex")) == masked


def test_weights_that_are_no_numbers_are_refused_at_the_start(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", width=64, layers=2)
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFormatError, match=r"layers\.1\.mlp\.up_proj\.weight has NaN"):
        LLM(str(model), speculate="off", **GPU)
