"""Trials before training: where there is time and something to decide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from test_train_auto import COSTS, FAMILIES, wide_spec

import hunch.train.trials
from hunch.train.clock import Clock
from hunch.train.expect import rank
from hunch.train.plan import Asked, Plan
from hunch.train.progress import Progress
from hunch.train.serving import Serving
from hunch.train.sizes import Ground, Size, sizes_for
from hunch.train.texts import Texts
from hunch.train.trials import LONG, Run, _candidates, choose, with_columns

SPEC = wide_spec(*FAMILIES[0])
GROUND = Ground(COSTS, SPEC, "cuda")


def plan_of(**speeds: float) -> Plan:
    """The best of each method, expected to be so fast."""
    found = rank(GROUND, seconds=100.0, sizes=sizes_for(SPEC))
    best = {one.size.method: one for one in reversed(found)}
    chosen = [replace(best[name], speedup=speed) for name, speed in speeds.items()]
    return Plan(GROUND, 1.1, chosen)


def run_of(folder: Path, plan: Plan, minutes: float) -> Run:
    texts = Texts(np.arange(40_000), np.array([0, 20_000, 40_000]), np.array([1, 1]))
    serving = Serving("t", Clock(folder / "clock.json", minutes))
    asked = Asked(target="t", out=folder, prompts="p", minutes=minutes)
    return Run(asked, plan, folder, texts, [], serving)


def test_only_drafters_that_are_expected_to_be_close_are_tried() -> None:
    assert set(_candidates(plan_of(draft=2.0, block=1.9))) == {"draft", "block"}
    assert set(_candidates(plan_of(draft=2.0, block=1.8))) == {"draft"}


def test_a_short_job_goes_by_what_is_expected(tmp_path: Path) -> None:
    """A trial is time in which the one that is chosen in the end could have learned."""
    plan = plan_of(draft=2.0, block=1.98)
    run = run_of(tmp_path, plan, LONG / 60 - 1)
    best, before = choose(run, Progress(is_quiet=True), print)
    assert best == plan.best.size
    assert before is None


def test_a_trial_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a slow machine, say; where all do, what is expected decides."""

    def fail(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(hunch.train.trials, "build_student", fail)
    plan = plan_of(draft=2.0, block=1.98)
    best, before = choose(run_of(tmp_path, plan, LONG / 60), Progress(is_quiet=True), print)
    assert (best, before) == (plan.best.size, None)
    said = capsys.readouterr().out
    assert said.count("too little memory") == 2
    assert "trial of block" in said


def test_drafters_that_are_tried_share_what_the_target_said(tmp_path: Path) -> None:
    """With the same tokens to guess, whatever each would choose by itself."""
    ground = replace(GROUND, device="cpu")
    plan = Plan(ground, 1.1, rank(ground, seconds=100.0))
    run = run_of(tmp_path, plan, 10.0)
    _, first = with_columns(run, Size(method="draft", layers=2, columns=8192))
    other = Size(method="draft", layers=1, columns=8192, abreast=2)
    job, second = with_columns(run, other, 5.0, 2 * first.size.columns)
    assert second.size.columns == 2 * first.size.columns
    assert job.options["draft_vocab"] == str(second.size.columns)
