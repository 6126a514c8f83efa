"""A job from prompts to a drafter: undisturbed, killed in every stage, and going wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_setup import ENGINE, check_no_text_changes, new_job, write_prompts

import hunch.train.export
import hunch.train.job
import hunch.train.regenerate
import hunch.train.select
from hunch import LLM, SamplingParams
from hunch.errors import CapacityError, ConfigError, RequestError, TrainingError
from hunch.train.job import Job, build_student, run_job
from hunch.train.loop import LAST, Loop
from hunch.train.packed_step import PackedSteps
from hunch.train.progress import Progress
from hunch.train.regenerate import AnswerOptions, read_answers, regenerate
from hunch.train.student import PackLoss, StepInputs

QUIET = Progress(is_quiet=True)
BAR = 1.5  # tokens per pass; plain decoding has 1


@pytest.fixture(scope="module")
def undisturbed(
    target: Path, prompts: Path, answered: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("undisturbed")
    shutil.copytree(answered, out / "work")
    measured = run_job(new_job(target, prompts, out, layers="0,1,3"), QUIET)
    (out / "measured.json").write_text(json.dumps(measured.to_json()))
    return out


def test_a_cut_draft_is_worth_having(undisturbed: Path) -> None:
    measured = json.loads((undisturbed / "measured.json").read_text())
    assert measured["tokens_per_pass"] > BAR


def test_it_changes_no_text(undisturbed: Path, target: Path) -> None:
    check_no_text_changes(target, f"draft:{undisturbed}")


def test_the_card_says_what_it_is(undisturbed: Path) -> None:
    card = (undisturbed / "README.md").read_text()
    for words in ("draft drafter", "Tokens per pass", "prompts.jsonl", "layers: 0,1,3", "commit"):
        assert words in card


def test_answers_are_the_engines_own(target: Path, prompts: Path, tmp_path: Path) -> None:
    """More prompts than rows, each answered at every temperature, read back in their order."""
    with LLM(str(target), speculate="off", **{**ENGINE, "max_num_seqs": 4}) as llm:
        ids = [llm.tokenizer.encode(line) for line in prompts.read_text().splitlines()[:9]]
        options = AnswerOptions(temperatures="0,1", max_tokens=12, shard=5)
        told: list[float] = []
        show = Progress()
        show.stage = lambda name, total: nullcontext(lambda done, words: told.append(done))  # type: ignore[method-assign]
        regenerate(llm, ids, tmp_path, options, show)
        assert told[:17] == list(range(1, 18))  # not every file alone
        params = [
            SamplingParams(temperature=n // 9, max_tokens=12, seed=n) for n in range(2 * len(ids))
        ]
        outputs = llm.generate(ids * 2, params)
    texts = read_answers(tmp_path)
    expected = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]
    assert [texts.text(i).tolist() for i in range(len(texts))] == expected


def test_answers_that_run_out_of_time_end_where_they_are(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(str(target), speculate="off", **ENGINE) as llm:
        ids = [llm.tokenizer.encode("the model"), llm.tokenizer.encode("a guess")]
        options = AnswerOptions(max_tokens=80, ignore_eos=True)
        steps, step = 0, llm.engine.step

        def counted() -> Any:
            nonlocal steps
            steps += 1
            return step()

        llm.engine.step = counted  # type: ignore[method-assign]
        # A hundredth of a second per step, however busy this machine is.
        monkeypatch.setattr(hunch.train.regenerate, "perf_counter", lambda: 0.01 * steps)
        regenerate(llm, ids, tmp_path, options, QUIET, seconds=0.2)
    texts = read_answers(tmp_path)
    answered = texts.lengths - texts.prompt_len
    assert len(texts) == 2
    assert (answered < 80).all()
    assert (answered >= 8).all()


class _Killed(BaseException):
    pass


def _kill(on_call: int, original: Callable[..., Any]) -> Callable[..., Any]:
    count = 0

    def call(*args: Any, **rest: Any) -> Any:
        nonlocal count
        count += 1
        if count == on_call:
            raise _Killed
        return original(*args, **rest)

    return call


STAGES = {
    "regenerate": (hunch.train.regenerate, "write_shard", 2),
    "train": (Loop, "_learn", 13),
    "select": (hunch.train.select, "measure", 2),
    "export": (hunch.train.export, "save_file", 4),
}


@pytest.mark.parametrize(
    "stage", [pytest.param(s, marks=[pytest.mark.slow] * (s not in ("train",))) for s in STAGES]
)
def test_killed_and_resumed_is_the_same_as_undisturbed(
    stage: str,
    undisturbed: Path,
    target: Path,
    prompts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = new_job(target, prompts, tmp_path / "out", layers="0,1,3", save_every=0.2)
    where, name, on_call = STAGES[stage]
    with monkeypatch.context() as patch:
        patch.setattr(where, name, _kill(on_call, getattr(where, name)))
        with pytest.raises(_Killed):
            run_job(job, QUIET)
    assert not (job.out / "model.safetensors").exists()
    shards = {path: path.stat().st_mtime_ns for path in job.out.glob("work/answers/*.npz")}
    assert shards  # at most the one in the making is lost
    run_job(job, QUIET)
    assert all(path.stat().st_mtime_ns == time for path, time in shards.items())
    ours, theirs = (load_file(path / "model.safetensors") for path in (job.out, undisturbed))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_a_loss_that_is_no_number_stops_at_the_last_good_checkpoint(
    answered: Path, target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hunch.train.recipes.draft import DraftStudent

    job = new_job(target, prompts, tmp_path / "out", layers="0,1,3", save_every=0.01)
    shutil.copytree(answered, job.out / "work")
    original, count = DraftStudent.loss_on, 0

    def loss_on(self: Any, given: StepInputs) -> PackLoss:
        nonlocal count
        count += given.opinions is not None  # else it is a test
        found = original(self, given)
        return replace(found, loss=found.loss * (torch.nan if count > 12 else 1.0))

    with monkeypatch.context() as patch:
        patch.setattr(DraftStudent, "loss_on", loss_on)
        with pytest.raises(TrainingError, match=r"no number.*lr="):
            run_job(job, QUIET)
    kept = torch.load(job.out / "work" / "train" / LAST, weights_only=True)
    assert kept["place"]["step"] == 12
    assert all(torch.isfinite(tensor).all() for tensor in kept["tensors"].values())


def test_a_full_disk_is_said_so(
    target: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = new_job(target, prompts, tmp_path / "out", layers="0,1,3")
    written, fsync = 0, os.fsync

    def full(number: int) -> None:
        nonlocal written
        written += 1
        if written > 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CapacityError, match=r"no room left.*kept"):
        run_job(job, QUIET)
    left = list(job.out.rglob("*"))
    assert any(path.suffix == ".npz" for path in left)
    assert not any(path.suffix == ".part" for path in left)


def test_another_job_in_the_same_place_is_refused(undisturbed: Path, target: Path) -> None:
    other = write_prompts(undisturbed / "other.jsonl")
    with pytest.raises(ConfigError, match="choose another --out"):
        run_job(new_job(target, other, undisturbed, layers="0,1,3"), QUIET)


def test_too_few_prompts(target: Path, tmp_path: Path) -> None:
    few = write_prompts(tmp_path / "few.jsonl", count=3)
    with pytest.raises(ConfigError, match="too few"):
        run_job(new_job(target, few, tmp_path / "out"), QUIET)


def test_an_empty_file_is_refused_before_anything_starts(target: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(RequestError, match="no prompts"):
        run_job(new_job(target, empty, tmp_path / "out"), QUIET)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layer": 3}, "did you mean 'layers'"),
        ({"layers": "9"}, "has 4 layers"),
        ({"layers": "0,7"}, "has 4 layers"),
        ({"loss": "mse"}, "is not one of"),
        ({"temperatures": "hot"}, "temperatures"),
        ({"draft_vocab": 1}, "draft_vocab=1"),
    ],
)
def test_options_that_cannot_work(
    options: dict[str, Any], words: str, target: Path, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        run_job(new_job(target, prompts, tmp_path / "out", **options), QUIET)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("draft", {"layers": 4}, "0 .. 3 in ascending order"),
        ("draft", {"layers": "0,9"}, "0 .. 3 in ascending order"),
        ("eagle3", {"features": "2,3,9"}, "the target's 4 layers"),
    ],
)
def test_what_does_not_fit_the_target_is_said_before_anything_is_made(
    method: str, options: dict[str, Any], words: str, target: Path, prompts: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        run_job(new_job(target, prompts, tmp_path / "out", method, **options))
    assert not (tmp_path / "out").exists()


def test_fine_tuning_refuses_a_worse_drafter(
    undisturbed: Path, target: Path, tmp_path: Path
) -> None:
    new = write_prompts(tmp_path / "new.jsonl", count=12)
    wild = new_job(target, new, tmp_path / "wild", layers="0,1,3", steps=6, lr=1.0)
    with pytest.raises(TrainingError, match="worse on held-out prompts"):
        run_job(wild, QUIET, before=undisturbed)
    assert not (wild.out / "model.safetensors").exists()


def test_slow_steps_become_smaller(target: Path, answered: Path, tmp_path: Path) -> None:
    """Where the first ones tell that there would be few; a loop that goes on keeps to it."""
    job = Job("draft", str(target), "", tmp_path, {"minutes": "1"}, dict(ENGINE))
    texts = read_answers(answered / "answers")
    student, decoder = build_student(job, texts)
    loop = Loop(student, decoder, tmp_path, job.settings.loop, 1e-3)
    steps = PackedSteps(student, loop.optimiser, loop._new_kept(texts), loop.batch, 0.3)
    before = next(steps.packs(0, 0)).num_tokens
    loop.place.step, loop.place.seconds = 1, 0.1
    loop._fit(steps)
    assert loop.batch > before  # fast enough
    loop.place.seconds = 20.0
    loop._fit(steps)
    assert loop.batch == 256
    assert next(steps.packs(0, 0)).num_tokens <= 256 < before
    loop._save(LAST)
    assert Loop(student, decoder, tmp_path, job.settings.loop, 1e-3).batch == 256
