"""Targets of every kind: training reads their texts as they do, and a block drafter fits them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from train_setup import ENGINE, new_job, write_prompts

import hunch.train.costs
import recurrent_models
from builders import plain_logits, tiny_config, tiny_weights
from hunch import LLM, SamplingParams
from hunch.config import ModelConfig
from hunch.errors import UnsupportedModelError
from hunch.models.load import load_decoder
from hunch.models.load_target import load_target
from hunch.train.job import run_job
from hunch.train.packs import Laid
from hunch.train.progress import Progress
from hunch.train.states import opinions_of, read_pack
from hunch.train.texts import Texts
from hunch.train.vocab import count_columns
from tiny_families import FAMILIES, write_family
from tiny_models import write_tokenizer


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_are_read_as_the_target_reads_them(name: str) -> None:
    architecture, changes = FAMILIES[name]
    target = load_decoder(tiny_weights(tiny_config(architecture, **changes), scale=2.0))
    ids, offset = np.random.default_rng(0).integers(0, 96, 82), np.array([0, 40, 52, 82])
    columns = count_columns(np.ones(96, dtype=np.int64), None)
    laid = Laid(Texts(ids, offset, np.ones(3, dtype=np.int64)), columns.column_V, 40)
    inputs = laid.pack(np.arange(3)).inputs(target.device)
    p_MC = opinions_of(target, columns, inputs, read_pack(target, inputs))
    # It rounds what goes into its products to 8 bits: sums in another order may round to another.
    near = {"rtol": 0.1, "atol": 0.01} if name == "bitnet" else {"rtol": 1e-3, "atol": 1e-4}
    for text, found in zip(np.split(ids, offset[1:-1]), p_MC.split([39, 11, 29]), strict=True):
        expected = plain_logits(target, text.tolist()).softmax(-1)[:-1]
        torch.testing.assert_close(found[:, columns.column_V], expected, **near)


@pytest.mark.parametrize("name", FAMILIES)
def test_drafting_is_timed_beside_any_target(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts cut from it, where they can be: whatever its config calls its sizes."""
    monkeypatch.setattr(hunch.train.costs, "_products", lambda *_: 1e9)
    monkeypatch.setattr(hunch.train.costs, "_ROUNDS", 1)
    architecture, changes = FAMILIES[name]
    weights = tiny_weights(tiny_config(architecture, **changes))
    target = load_target(ModelConfig(), weights, torch.device("cpu"))
    costs = hunch.train.costs.measure_costs(target, weights, seconds=0.0)
    assert costs.of_node(2, 64) > costs.of_node(1, 32) > 0


OTHERS = ["deepseek v3", "qwen3.5"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["gpt-2", "gemma 2", "phi-3", "gpt-oss", "qwen3-moe", "granite", *OTHERS]
)
def test_a_block_drafter_for_any_target(name: str, tmp_path: Path) -> None:
    target = _write(tmp_path / "target", name)
    words = {"layers": 1, "block": 3, "rank": 8, "lr": 0.02, "draft_vocab": 160}
    _train_and_draft(target, tmp_path, "block", "dspark", words)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["medusa", "mlp"])
@pytest.mark.parametrize("name", OTHERS)
def test_heads_for_latent_attention_and_recurrent_layers(
    name: str, method: str, tmp_path: Path
) -> None:
    target = _write(tmp_path / "target", name)
    _train_and_draft(target, tmp_path, method, method, {"lr": 0.02})


@pytest.mark.parametrize("method", ["draft", "eagle3"])
@pytest.mark.parametrize(("name", "why"), [("deepseek v3", "latent"), ("qwen3.5", "recurrent")])
def test_layers_that_cannot_be_cut_are_named(
    name: str, why: str, method: str, tmp_path: Path
) -> None:
    target = _write(tmp_path / "target", name)
    job = new_job(target, write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out", method)
    with pytest.raises(UnsupportedModelError, match=f"{why}.*train block"):
        run_job(job, Progress(is_quiet=True))


def _write(path: Path, name: str) -> Path:
    if name in FAMILIES:
        return write_family(path, name)
    path.mkdir()
    recurrent_models.make(name, path, vocab_size=write_tokenizer(path))
    return path


def _train_and_draft(
    target: Path, folder: Path, method: str, drafter: str, words: dict[str, Any]
) -> None:
    prompts = write_prompts(folder / "prompts.jsonl")
    job = new_job(target, prompts, folder / "out", method, **words)
    measured = run_job(job, Progress(is_quiet=True))
    assert measured.tokens_per_pass > 1.0
    found = []
    for way in ("off", f"{drafter}:{job.out}"):
        with LLM(str(target), speculate=way, **ENGINE) as llm:
            output = llm.generate("the model in", SamplingParams(temperature=0, max_tokens=24))
            found.append(output[0].outputs[0].token_ids)
    assert found[0] == found[1]
