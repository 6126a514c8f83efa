"""The first start on a machine compiles its kernels on all cores."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hunch.config import say_once
from hunch.kernels import gpu_compile
from hunch.kernels.gpu_compile import CompileError, CompileWorkers, Job, Unwritten
from hunch.step.ahead import FEW, Ahead, compiling_ahead
from hunch.step.capture import Graph
from tiny_models import write_llama

TESTS = Path(__file__).parents[1]
CPU = torch.device("cpu")


# --- a real start, for a GPU that is not there ----------------------------------------------------


def started(folder: Path, *methods: str) -> list[dict[str, Any]]:
    """Of each method's start: what it noted, and what it launched beyond that."""
    model = write_llama(folder / "model", width=32, layers=2)
    command = [sys.executable, str(TESTS / "rehearsed_start.py"), str(model), *methods]
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)]),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("method", ["suffix", pytest.param("off", marks=pytest.mark.slow)])
def test_a_rehearsal_notes_every_kernel_and_workers_compile_them(
    method: str, tmp_path: Path
) -> None:
    (report,) = started(tmp_path, method)
    assert report["in_start"] > 10
    assert report["noted"] > report["in_start"] + 2  # those of steps with extras
    assert report["missed"] == report["needless"] == []
    assert report["compiled"] == [True, True]
    assert report["found"] == 2


def test_workers_compile_what_a_launch_compiles(tmp_path: Path) -> None:
    """Also where a kernel's constant is a word that Triton has a type for."""
    env = {**os.environ, "TRITON_INTERPRET": "0"}
    env["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent / "src"), str(TESTS)])
    command = [sys.executable, str(TESTS / "compiled_twice.py"), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["words"] == ["bf16", "bf16"]
    assert report["compiled"] == report["same"] == [True] * 4


# --- what torch does in a rehearsal ---------------------------------------------------------------


def test_a_rehearsal_writes_nothing_and_reads_at_no_odd_place() -> None:
    held, odd = torch.zeros(4), torch.tensor([2**40, -(2**40)])
    with Unwritten():
        held.fill_(1)
        held += 1
        held[1:] = 3
        torch.add(held, 1, out=held)
        assert held[odd].shape == held.index_select(0, odd).shape == (2,)
        assert held.gather(0, odd).shape == (2,)
        assert torch.nn.functional.embedding(odd, held.view(4, 1)).shape == (2, 1)
        assert (held + 1).tolist() == [1] * 4
    assert held.tolist() == [0] * 4


# --- when, and what happens where it does not work ------------------------------------------------


class FakeWorkers:
    made: list[FakeWorkers]

    def __init__(self, count: int) -> None:
        self.count, self.num_jobs, self.num_failed = count, 0, 0
        self.jobs: list[Job] = []
        self.is_closed = self.is_left = False
        self.num_waited = 0
        self.made.append(self)

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        self.num_jobs += 1

    def results(self) -> Iterator[bool]:
        if broken:
            raise CompileError("gone")
        self.num_waited = self.num_jobs
        return iter([True] * self.num_jobs)

    def close(self) -> None:
        self.is_closed = True

    def finish_alone(self) -> None:
        self.is_left = True


broken: list[bool] = []


class FakeNoter:
    """Every body needs a kernel of its own."""

    def __init__(self, note: Callable[[Job], None]) -> None:
        self.note = note

    def __call__(self, body: Callable[[], Any]) -> Any:
        self.note(Job("module", f"{body()}_kernel", "", ""))


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[FakeWorkers]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    FakeWorkers.made = []
    broken.clear()
    say_once.cache_clear()
    monkeypatch.setattr(gpu_compile, "CompileWorkers", FakeWorkers)
    monkeypatch.setattr(gpu_compile, "Noter", FakeNoter)
    return FakeWorkers.made


WRONG = 20  # this place cannot be rehearsed


class FakeRunner:
    """Captures graphs one after the other; `missing` of them need a kernel to be compiled."""

    target = SimpleNamespace()

    def __init__(
        self, ahead: Ahead, size: int, missing: tuple[int, ...], num_later: int = 0
    ) -> None:
        self.ahead, self.size, self.missing = ahead, size, missing
        self.num_later = num_later  # graphs of requests that may come
        self.done: list[int] = []

    def preparations(self, *, is_greedy: bool, is_rehearsal: bool = False) -> list[Any]:
        def prepare(place: int) -> None:
            if place == WRONG:
                raise RuntimeError("no such table")
            Graph(lambda: place, CPU, None)
            if not is_rehearsal:
                self.done.append(place)
                if place in self.missing:
                    self.ahead.missed()

        size = self.size + self.num_later * is_rehearsal
        return [lambda place=place: prepare(place) for place in range(size)]


@contextmanager
def bar(total: int, wanted: bool | None, what: str) -> Iterator[Callable[[], None]]:
    yield lambda: None


def start(
    missing: tuple[int, ...], size: int = 8, num_workers: int = 3, num_later: int = 0
) -> list[int]:
    ahead = Ahead(num_workers)
    runner = FakeRunner(ahead, size, missing, num_later)
    ahead.prepare(runner, bar, is_greedy=False)  # type: ignore[arg-type]
    ahead.close()
    return runner.done


def test_what_follows_the_first_missing_kernel_is_compiled_at_once(
    fakes: list[FakeWorkers],
) -> None:
    assert start((2, 5)) == list(range(8))
    (workers,) = fakes
    assert [job.name for job in workers.jobs] == [f"{place}_kernel" for place in range(3, 8)]
    assert workers.count == 3
    assert workers.is_closed


def test_what_only_some_requests_need_is_compiled_in_the_background(
    fakes: list[FakeWorkers],
) -> None:
    assert start((2,), num_later=3) == list(range(8))
    (workers,) = fakes
    assert [job.name for job in workers.jobs] == [f"{place}_kernel" for place in range(3, 11)]
    assert workers.num_waited == 5
    assert workers.is_left
    assert not workers.is_closed


def test_a_start_does_without_what_cannot_be_rehearsed_for_later(
    fakes: list[FakeWorkers], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert start((2,), size=WRONG - 1, num_later=3) == list(range(WRONG - 1))
    (word,) = [record.message for record in caplog.records]
    assert word.startswith("kernels that only some requests need")
    assert fakes[0].num_waited == WRONG - 4


def test_a_start_with_all_kernels_in_the_cache_starts_no_process(fakes: list[FakeWorkers]) -> None:
    assert start(()) == list(range(8))
    assert not fakes


def test_a_few_kernels_wait_for_nobody(fakes: list[FakeWorkers]) -> None:
    assert start((8 - FEW,)) == list(range(8))
    assert fakes[0].jobs == []
    assert fakes[0].is_closed


def test_it_can_be_turned_off(fakes: list[FakeWorkers]) -> None:
    assert start((0,), num_workers=0) == list(range(8))
    assert not fakes


def test_a_start_goes_on_without_its_workers(caplog: pytest.LogCaptureFixture) -> None:
    broken.append(True)
    with caplog.at_level(logging.WARNING):
        assert start((0,)) == start((0,)) == list(range(8))
    words = [record.message for record in caplog.records]
    assert words == ["kernels are compiled one after the other, as they are launched: gone"]


def test_engines_that_start_side_by_side_compile_in_turn(fakes: list[FakeWorkers]) -> None:
    with ThreadPoolExecutor(1) as other:
        with gpu_compile.in_turn():
            started = other.submit(start, (0,))
            while not fakes:
                time.sleep(0.01)
            with pytest.raises(TimeoutError):
                started.result(timeout=0.5)
            assert not fakes[0].jobs  # it will find what is being compiled
        assert started.result(timeout=300) == list(range(8))
    assert len(fakes[0].jobs) == 7


def pretend_workers(monkeypatch: pytest.MonkeyPatch, executable: str) -> None:
    """This program in place of Python, and a GPU that is not there."""
    monkeypatch.setattr(sys, "executable", executable)
    target = SimpleNamespace(backend="cuda", arch=90, warp_size=32)
    gpu = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(gpu_compile, "driver", gpu)


def test_workers_that_are_left_alone_end_with_their_last_kernel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script, told = tmp_path / "worker", tmp_path / "told"
    script.write_text(f"#!/bin/sh\ncat > {told}\n")
    script.chmod(0o755)
    pretend_workers(monkeypatch, str(script))
    workers = CompileWorkers(2)
    workers.submit(Job("module", "kernel", "", ""))
    workers.finish_alone()
    gpu_compile.wait_for_background()
    assert workers._process.poll() == 0
    assert json.loads(told.read_text().splitlines()[-1]) == ["module", "kernel", "", ""]


def test_workers_that_cannot_start_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_workers(monkeypatch, "/bin/false")
    workers = CompileWorkers(2)
    workers.submit(Job("module", "kernel", "", ""))
    with pytest.raises(CompileError, match="exit code"):
        list(workers.results())
    workers.close()


def test_how_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_compile, "num_cpus", lambda: 16)
    monkeypatch.delenv(gpu_compile.WORKERS, raising=False)
    assert gpu_compile.num_workers() == 15
    monkeypatch.setenv(gpu_compile.WORKERS, "0")
    assert gpu_compile.num_workers() == 0
    assert not gpu_compile.is_possible()


def test_other_devices_and_the_interpreter_compile_nothing(fakes: list[FakeWorkers]) -> None:
    for device in ("cpu", "cuda"):
        with compiling_ahead(torch.device(device)) as ahead:
            if device == "cpu" or gpu_compile.gpu_launch.IS_INTERPRETED:
                ahead.missed()
    assert not fakes
