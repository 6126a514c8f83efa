"""Faults of block drafters' files are planted, found by trying, and shown by position."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import head_files
from hunch.cli import app
from hunch.train.changes import turned_heads
from hunch.train.diagnose import Doctor, Report
from tiny_models import write_llama

ENGINE = {"max_model_len": 128, "kv_bytes": 4_000_000, "dtype": "float32", "threads": 1}
PROMPTS = ["the model and the guess", "fast token fast token", "in the model of"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("doctor") / "model", layers=3)


@pytest.fixture(scope="module")
def good(target: Path) -> Path:
    """A drafter that knows the answers to the prompts as they are served."""
    turns = [f"<|user|>{text}\n<|assistant|>" for text in PROMPTS]
    study = head_files.study(target, prompts=turns, length=28)
    head_files.make_dspark(study, target.parent / "dspark", num_steps=200)
    return target.parent / "dspark"


def examine(target: Path, folder: Path) -> Report:
    return Doctor(str(target), folder, PROMPTS, dict(ENGINE), max_tokens=12).run()


def copy(folder: Path, to: Path, **config: object) -> Path:
    shutil.copytree(folder, to)
    found = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**found, **config}))
    return to


def faults(report: Report) -> list[str]:
    return [finding.fault for finding in report.findings]


def test_one_that_is_well(target: Path, good: Path) -> None:
    report = examine(target, good)
    assert faults(report) == []
    assert report.trials[0].name == "as it is"
    assert report.trials[0].per_position == report.per_position
    assert len(report.trials) > 3
    assert all(trial.tokens_per_pass <= report.tokens_per_pass for trial in report.trials[1:])


def test_heads_laid_out_the_other_way(target: Path, good: Path, tmp_path: Path) -> None:
    bad = copy(good, tmp_path / "bad")
    # The other way of `turned_heads`: what it does to this gives the drafter back.
    tensors, size = load_file(bad / "model.safetensors"), 32
    back = torch.arange(size).view(2, -1).T.flatten()
    for name, tensor in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            tensors[name] = tensor.view(-1, size, tensor.shape[1])[:, back].flatten(0, 1)
        elif "q_norm" in name or "k_norm" in name:
            tensors[name] = tensor[back]
    save_file({k: t.contiguous() for k, t in tensors.items()}, bad / "model.safetensors")
    again = turned_heads(bad)
    assert again is not None
    for name, tensor in load_file(good / "model.safetensors").items():
        assert torch.equal(again[name], tensor), name
    assert "rope_layout" in faults(examine(target, bad))


def test_places_and_layers_that_are_off_by_one(target: Path, good: Path, tmp_path: Path) -> None:
    bad = copy(good, tmp_path / "places", sample_from_anchor=False)
    assert "places" in faults(examine(target, bad))
    layers = json.loads((good / "config.json").read_text())["target_layer_ids"]
    assert layers == [0, 1, 2]
    bad = copy(good, tmp_path / "layers", target_layer_ids=[-1, 0, 1])
    report = examine(target, bad)
    (right,) = [trial for trial in report.trials if "[0, 1, 2]" in trial.name]
    assert right.tokens_per_pass >= report.tokens_per_pass  # so small a target forgives it


def test_tensors_that_nobody_reads(target: Path, good: Path, tmp_path: Path) -> None:
    bad = copy(good, tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    save_file({**tensors, "layers.0.gate.weight": torch.zeros(2)}, bad / "model.safetensors")
    report = examine(target, bad)
    assert "tensors" in faults(report)
    assert "layers.0.gate.weight" in report.findings[0].words


@pytest.mark.slow
def test_the_command_names_model_and_drafter(target: Path, good: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"turns": [text]}) for text in PROMPTS))
    words = ["doctor", str(target), "--speculate", f"dspark:{good}", "--prompts", str(prompts)]
    result = CliRunner().invoke(app, [*words, "--dtype", "float32", "--threads", "1"])
    assert "as it is" in result.output
    assert "sample_from_anchor" in result.output
