"""One small target and its prompts for all tests of training."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hunch.train.job import Job, answer_prompts, run_job
from hunch.train.loop import Loop
from hunch.train.progress import Progress
from hunch.train.select import Measured

sys.path.insert(0, str(Path(__file__).parent))

from train_setup import ANSWER_OPTIONS, new_job, write_prompts, write_target


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small only lose by sharing
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl")


@pytest.fixture(scope="session")
def answered(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job's work folder when the prompts are answered and nothing is trained."""
    torch.set_num_threads(1)
    work = tmp_path_factory.mktemp("answered")
    job = new_job(target, prompts, work)
    answer_prompts(job, Progress(is_quiet=True))
    return job.work


@pytest.fixture(scope="session")
def train(
    target: Path, prompts: Path, answered: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Job, Measured]]:
    """Train a method with some options, once for all tests that ask for the same."""
    done: dict[str, tuple[Job, Measured]] = {}

    def run(method: str, **options: Any) -> tuple[Job, Measured]:
        key = repr((method, sorted(options.items())))
        if key not in done:
            torch.set_num_threads(1)
            out = tmp_path_factory.mktemp(method)
            job = new_job(target, prompts, out, method, **options)
            if not ANSWER_OPTIONS & set(options):
                shutil.copytree(answered, out / "work")
            with pytest.MonkeyPatch.context() as patch:
                if method != "draft":  # whose jobs compare candidates: one engine less for each
                    patch.setattr(Loop, "marks", (1.0,))
                done[key] = job, run_job(job, Progress(is_quiet=True))
        return done[key]

    return run
