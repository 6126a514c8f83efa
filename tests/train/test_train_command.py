"""hunch train and hunch doctor --drafter from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from train_setup import OPTIONS, write_prompts

from hunch.cli import main

SMALL = [f"{key}={value}" for key, value in {**OPTIONS, "steps": "6", "layers": "0,1,3"}.items()]
ENGINE = ["--device", "cpu", "--max-model-len", "96"]


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = 0
    try:
        main([str(word) for word in words])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_train_then_go_on_with_new_prompts(
    target: Path,
    prompts: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = tmp_path / "draft"
    given = ["--target", target, "--prompts", prompts, "--out", out, *ENGINE]
    code, text, _ = run(capsys, "train", "draft", *SMALL, *given, "--json")
    assert code == 0
    assert json.loads(text)["tokens_per_pass"] > 1.2
    assert caplog.messages == []  # no warnings of its own recipe
    code, text, _ = run(capsys, "train", "draft", "--resume", out, *ENGINE)
    assert code == 0
    assert f"--speculate draft:{out}" in text
    new = write_prompts(tmp_path / "new.jsonl", count=12)
    code, text, _ = run(
        capsys, "train", "draft", "lr=1e-5", "--resume", out, "--prompts", new, *ENGINE
    )
    assert code == 0
    assert (tmp_path / "draft-adapted" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_files_of_a_drafter_go_on_without_its_job(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"  # as one that was handed on
    cut = [word for word in SMALL if not word.startswith("precision")]
    given = ["--target", target, "--prompts", prompts, "--out", bare, *ENGINE]
    code, _, _ = run(capsys, "train", "draft", *cut, "draft_vocab=160", *given)
    assert code == 0
    shutil.rmtree(bare / "work")
    lines = [json.dumps({"prompt_ids": [5 + i, 9, 12]}) for i in range(12)]  # as a server logs
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(lines))
    more = [*cut, "lr=1e-5", "--resume", bare, "--prompts", log, *ENGINE]
    more = [word for word in more if not str(word).startswith("layers")]
    assert run(capsys, "train", "draft", *more)[0] == 2  # its own folder stays as it is
    code, text, _ = run(capsys, "train", "draft", *more, "--out", tmp_path / "tuned")
    assert code == 0
    maps = [load_file(path / "model.safetensors")["d2t"] for path in (bare, tmp_path / "tuned")]
    assert torch.equal(*maps)
    code, text, _ = run(
        capsys, "doctor", "--drafter", bare, "--target", target, "--prompts", prompts, "--json"
    )
    assert code in (0, 1)
    assert json.loads(text)["method"] == "draft"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train", "draft"], "train needs --out DIR"),
        (["train", "draft", "fast", "--prompts", "p", "--out", "o"], "KEY=VALUE"),
        (["train", "drift", "--prompts", "p", "--out", "o"], "did you mean 'draft'"),
        (["train", "draft", "--resume", "nowhere"], "no training job there"),
        (["train", "draft", "--prompts", "nowhere.jsonl", "--out", "o"], "no such file"),
        (["train", "phrases", "--prompts", "p", "--out", "o", "--minutes", "1"], "fewer prompts"),
    ],
)
def test_mistakes_are_named(
    words: list[str],
    expected: str,
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run(capsys, *words, *(["--target", str(target)] if "--out" in words else []))
    assert code == 2
    assert expected in err


def test_a_typo_in_prompts_leaves_no_job_behind(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", target, "--out", tmp_path / "out", *ENGINE]
    code, _, err = run(capsys, "train", "draft", *given, "--prompts", f"{prompts}.typo")
    assert code == 2
    assert "no such file" in err
    assert not (tmp_path / "out").exists()


def test_too_few_steps_are_an_error_and_no_drafter(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--target", target, "--prompts", prompts, "--out", tmp_path / "out", *ENGINE]
    options = [word for word in SMALL if not word.startswith(("steps", "minutes"))]
    code, text, err = run(capsys, "train", "draft", *options, "minutes=0.0001", *given)
    assert code == 2
    assert "nothing was learnt" in err
    assert "Use it with" not in text
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_ctrl_c_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hunch.train.job.run_job", stop)
    code, _, err = run(capsys, "train", "draft", "--out", tmp_path / "out", "--minutes", "3")
    assert "--minutes 3 is for the training alone" in err
    assert code == 130
    assert f"hunch train draft --resume {tmp_path / 'out'}" in err


def test_progress_in_a_pipe_has_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    from hunch.train.progress import _Lines

    lines = _Lines("train", 1.0)
    for done in (0.1, 0.2, 1.0):
        lines.shown = -100.0
        lines(done, "loss 2.0")
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "train 10%: loss 2.0"
    assert said[1].startswith("train 20%, ")
    assert said[1].endswith(" s left: loss 2.0")
    assert said[2] == "train 100%: loss 2.0"
