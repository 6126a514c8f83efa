"""Each fault the doctor knows is planted, and named by it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_setup import ENGINE, new_job

from head_files import make_draft, write
from hunch.train.diagnose import Doctor, Report, Seen
from hunch.train.job import run_job
from hunch.train.progress import Progress


def texts_of(prompts: Path, key: str = "turns") -> list[str]:
    records = [json.loads(line) for line in prompts.read_text().splitlines()]
    found = [record[key] for record in records if key in record]
    return [text[0] if isinstance(text, list) else text for text in found][:12]


def examine(target: Path, folder: Path, texts: list[str], max_tokens: int = 20) -> Report:
    return Doctor(str(target), folder, texts, dict(ENGINE), max_tokens).run()


def copy(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("work"))
    return to


def faults(report: Report) -> list[str]:
    return [finding.fault for finding in report.findings]


def test_a_perfect_drafter_is_well(target: Path, prompts: Path, tmp_path: Path) -> None:
    report = examine(target, make_draft(target, tmp_path / "draft"), texts_of(prompts))
    assert faults(report) == []
    assert report.tokens_per_pass > 4


@pytest.mark.parametrize("shift", [pytest.param(1, marks=pytest.mark.slow), 5000])
def test_a_map_that_is_off_or_leads_nowhere(
    target: Path, prompts: Path, tmp_path: Path, train: Callable[..., Any], shift: int
) -> None:
    job, _ = train("draft", layers="0,1,3", draft_vocab=160)
    bad = copy(job.out, tmp_path / "bad")
    tensors = load_file(bad / "model.safetensors")
    tensors["d2t"] += shift
    save_file(tensors, bad / "model.safetensors")
    found = faults(examine(target, bad, texts_of(prompts)))
    if shift == 1:
        assert "vocab_map" in found
        assert "vocab_map" not in faults(examine(target, job.out, texts_of(prompts)))
    else:
        assert found == ["vocab_map"]


def test_feature_layers_that_are_off_by_one(
    target: Path, prompts: Path, tmp_path: Path, train: Callable[..., Any]
) -> None:
    job, _ = train("eagle3", features="1,2,3", unroll=2, lr=0.02, steps=50)
    bad = copy(job.out, tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text())
    config["eagle_aux_hidden_state_layer_ids"] = [2, 3, 4]
    (bad / "config.json").write_text(json.dumps(config))
    report = examine(target, bad, texts_of(prompts))
    assert "feature_layers" in faults(report)
    assert any("[1, 2, 3]" in finding.words for finding in report.findings)


def test_targets_shifted_by_one(target: Path, prompts: Path, tmp_path: Path) -> None:
    """A head that says token t + 1, which the target has said already, and not t + 2."""
    head_VD = load_file(target / "model.safetensors")["lm_head.weight"]
    size, width = head_VD.shape
    tensors = {"blocks.0.layers.0.weight": torch.zeros(width, width), "lm_head.weight": head_VD}
    config = {"model_type": "medusa", "hidden_size": width, "vocab_size": size, "num_heads": 1}
    report = examine(target, write(tmp_path / "bad", config, tensors), texts_of(prompts))
    assert "shifted" in faults(report)
    assert any("one place before" in finding.words for finding in report.findings)


def test_a_rope_that_drifts_with_the_text(target: Path, prompts: Path, tmp_path: Path) -> None:
    bad = make_draft(target, tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": 1.06}
    (bad / "config.json").write_text(json.dumps(config))
    assert "context" in faults(examine(target, bad, texts_of(prompts), max_tokens=84))


@pytest.mark.slow
def test_another_chat_template(target: Path, tmp_path: Path, prompts: Path) -> None:
    """Trained on raw prompts, served with the template."""
    raw = tmp_path / "raw.jsonl"
    texts = [*texts_of(prompts), *texts_of(prompts, "prompt")]
    raw.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    job = new_job(target, raw, tmp_path / "out", layers="0,3", steps=60, held_out=2)
    run_job(job, Progress(is_quiet=True))
    report = examine(target, job.out, texts)
    assert "chat_template" in faults(report)


def test_too_little_training(target: Path, prompts: Path, train: Callable[..., Any]) -> None:
    job, _ = train("mlp", stages=2, inner=32, steps=2)
    report = examine(target, job.out, texts_of(prompts))
    assert faults(report) == ["training"]
    assert "too little" in report.findings[0].words


def test_precision_is_tried_last(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No small model loses enough by rounding, so what is seen in each precision is planted."""
    rounded, exact = Seen(num_tokens=120, num_passes=100), Seen(num_tokens=300, num_passes=100)
    monkeypatch.setattr(
        Doctor, "look", lambda self, folder, options="", **_: exact if options else rounded
    )
    report = examine(target, make_draft(target, tmp_path / "draft"), texts_of(prompts))
    assert faults(report) == ["precision"]
