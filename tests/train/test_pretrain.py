"""A draft from scratch: plain text first, then answers; killed while it reads, and going wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_setup import WORDS, new_job

from hunch.errors import ConfigError, RequestError
from hunch.train.job import build_student, read_settings, run_job
from hunch.train.pretrain import Pretrain, pretrain, read_stored
from hunch.train.progress import Progress
from hunch.train.regenerate import read_answers

QUIET = Progress(is_quiet=True)
SCRATCH: dict[str, Any] = {"layers": 2, "from_scratch": True, "lr": 0.02}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "plain.txt"
    path.write_text((" ".join(WORDS) + "\n") * 300)
    return path


@pytest.fixture(scope="module")
def undisturbed(
    target: Path, prompts: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("scratch")
    run_job(new_job(target, prompts, out, text=text, **SCRATCH), QUIET)
    return out


class _Killed(BaseException):
    pass


@pytest.mark.slow
def test_killed_while_it_reads_and_resumed_is_the_same(
    undisturbed: Path,
    target: Path,
    prompts: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = new_job(target, prompts, tmp_path / "out", text=text, save_every=0.01, **SCRATCH)
    original = Pretrain._learn

    def learn(self: Pretrain, *words: Any) -> torch.Tensor:
        if self.place.step == 7:
            raise _Killed
        return original(self, *words)

    with monkeypatch.context() as patch:
        patch.setattr(Pretrain, "_learn", learn)
        with pytest.raises(_Killed):
            run_job(job, QUIET)
    assert not (job.out / "work" / "train").exists()
    run_job(job, QUIET)
    ours, theirs = (load_file(path / "model.safetensors") for path in (job.out, undisturbed))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_it_takes_its_share_of_the_steps(undisturbed: Path) -> None:
    places = [
        torch.load(undisturbed / "work" / stage / "last.pt", weights_only=True)["place"]["step"]
        for stage in ("pretrain", "train")
    ]
    assert places == [12, 12]


def test_it_learns_the_text(undisturbed: Path, target: Path, prompts: Path, text: Path) -> None:
    job = new_job(target, prompts, undisturbed, text=text, **SCRATCH)
    student, decoder = build_student(job, read_answers(undisturbed / "work" / "answers"))
    texts = read_stored(undisturbed / "work")
    fresh = Pretrain(student, decoder, undisturbed / "nowhere", job.settings.loop, 1.0)
    before = fresh.test(texts).tokens_per_pass
    pretrain(
        student, decoder, undisturbed / "work", job.settings.loop, 1.0, QUIET
    )  # as it was left
    assert fresh.test(texts).tokens_per_pass > before + 1.0


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("draft", {"from_scratch": True}, "text=FILE, or text=none"),
        ("medusa", {"text": "some.txt"}, "for train draft"),
        ("draft", {"text": "some.txt", "text_share": 1.0}, "text_share=1.0"),
    ],
)
def test_options_that_cannot_work(method: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_settings(method, {key: str(value) for key, value in options.items()})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.txt", None, "no such file"),
        ("short.txt", b"a few words", "too few"),
        ("broken.txt", b"\xff\xfe\xfd", "not UTF-8"),
        ("other.jsonl", b'{"prompt": "x"}\n', "JSON with 'text'"),
    ],
)
def test_text_that_cannot_be_read(
    name: str, content: bytes | None, words: str, target: Path, prompts: Path, tmp_path: Path
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RequestError, match=words):
        run_job(new_job(target, prompts, tmp_path / "out", text=path, **SCRATCH), QUIET)


def test_lines_of_json_are_read_too(
    target: Path, prompts: Path, text: Path, tmp_path: Path, undisturbed: Path
) -> None:
    lines = tmp_path / "text.jsonl"
    lines.write_text(json.dumps({"text": text.read_text()}) + "\n")
    options = {**SCRATCH, "steps": 2}
    run_job(new_job(target, prompts, tmp_path / "out", text=lines, **options), QUIET)
    ours, theirs = (read_stored(path / "work") for path in (tmp_path / "out", undisturbed))
    assert (ours.tokens == theirs.tokens).all()
