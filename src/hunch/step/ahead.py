"""The first start on a machine: all its kernels are compiled at once, before graphs are captured.

When Triton first compiles a kernel that its cache does not have, the rest of the start is
rehearsed, to see which kernels it will launch, and these are compiled on all cores. Kernels that
only some requests need (rules, masks, scores, predictions) are compiled after that in the
background. A start whose kernels are all in the cache takes no longer than without this.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from hunch.config import say_once
from hunch.models.target import OverProcesses
from hunch.step.parts import LeadsSteps
from hunch.step.runner import Runner

if TYPE_CHECKING:  # needs Triton
    from hunch.kernels.gpu_compile import CompileWorkers, Job

log = logging.getLogger("hunch")

Bar = Callable[[int, bool | None, str], AbstractContextManager[Callable[[], None]]]
FEW = 4  # kernels: fewer are not worth starting processes for
# What torch raises, and what a Triton raises whose interface is not the one used here.
COMPILE_ERRORS = (RuntimeError, TypeError, AttributeError, LookupError)


class Ahead:
    """Compiles the missing kernels of a start, once, when the first of them is seen."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers  # 0: kernels are compiled as they are launched
        self._workers: CompileWorkers | None = None
        self._is_over = num_workers == 0
        self._is_behind = False  # workers still compile in the background

    @property
    def is_due(self) -> bool:
        return self._workers is not None and not self._is_over

    def missed(self) -> None:
        """A kernel was not in the cache: start worker processes, as more will be missing."""
        if self._is_over or self._workers is not None:
            return
        from hunch.kernels.gpu_compile import CompileWorkers

        try:
            self._workers = CompileWorkers(self._num_workers)
        except OSError as error:
            self._give_up(error)

    def prepare(self, runner: Runner, bar: Bar, *, is_greedy: bool) -> None:
        """Do the runner's preparations; compile what they launch as soon as a kernel is missing."""
        todo, done = runner.preparations(is_greedy=is_greedy), 0
        # Ranks in other processes would have to rehearse too.
        self._is_over |= isinstance(runner.target, OverProcesses | LeadsSteps)
        while done < len(todo):
            if self.is_due:
                rest = runner.preparations(is_greedy=is_greedy, is_rehearsal=True)
                self._compile(rest[done : len(todo)], rest[len(todo) :], bar)
            with bar(len(todo) - done, None, "capturing graphs") as advance:
                for prepare in todo[done:]:
                    prepare()
                    advance()
                    done += 1
                    if self.is_due:
                        break

    def _compile(
        self, rest: list[Callable[[], Any]], later: list[Callable[[], Any]], bar: Bar
    ) -> None:
        """Compile what the rest of a start launches, and in the background what comes later."""
        from hunch.kernels.gpu_compile import in_turn

        assert self._workers is not None
        self._is_over, began, workers = True, perf_counter(), self._workers
        jobs: list[Job] = []
        later_jobs: list[Job] = []
        num_before = workers.num_jobs

        def submit(job: Job) -> None:
            jobs.append(job)
            if len(jobs) >= FEW:
                for one in jobs[workers.num_jobs - num_before :]:
                    workers.submit(one)

        try:
            with in_turn():
                rehearsal = _Rehearsal()
                rehearsal.run(rest, submit)
                if len(jobs) < FEW:
                    return
                what = f"compiling {len(jobs)} kernels on {workers.count} cores, once per machine"
                log.info("%s", what)
                self._rehearse_later(rehearsal, later, later_jobs.append)
                with bar(len(jobs), None, what) as advance:
                    for _ in workers.results():
                        advance()
        except COMPILE_ERRORS as error:
            self._give_up(error)
            return
        log.info("compiled in %.1f seconds", perf_counter() - began)
        if failed := workers.num_failed:
            log.info("%d of the kernels did not compile ahead", failed)
        for job in later_jobs:
            workers.submit(job)
        self._is_behind = bool(later_jobs)

    def _rehearse_later(
        self, rehearsal: _Rehearsal, later: list[Callable[[], Any]], note: Callable[[Job], None]
    ) -> None:
        try:
            rehearsal.run(later, note)
        except COMPILE_ERRORS as error:
            say_once(f"kernels that only some requests need are compiled as these come: {error}")

    def _give_up(self, error: Exception) -> None:
        self._is_over = True
        say_once(f"kernels are compiled one after the other, as they are launched: {error}")

    def close(self) -> None:
        """The start is over; workers in the background finish what they have."""
        self._is_over = True
        if self._workers is None:
            return
        if self._is_behind:
            self._workers.finish_alone()
        else:
            self._workers.close()


class _Rehearsal:
    """Runs preparations without launching kernels, and notes each kernel once."""

    def __init__(self) -> None:
        from hunch.kernels.gpu_compile import Noter

        self._noter = Noter(lambda job: self._note(job))
        self._note: Callable[[Job], None]

    def run(self, todo: list[Callable[[], Any]], note: Callable[[Job], None]) -> None:
        """Call `note` for each kernel that `todo` would launch and that is not in the cache."""
        from hunch.step.capture import rehearsed

        self._note = note
        with rehearsed(self._noter):
            for prepare in todo:
                prepare()
        todo.clear()
        torch.cuda.empty_cache()  # graphs have memory of their own


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[Ahead]:
    """For the time in which a model is loaded and prepared on this device."""
    if device.type != "cuda":
        yield Ahead(0)
        return
    try:
        from hunch.kernels import gpu_compile
    except ImportError:  # no Triton, or another version of it
        yield Ahead(0)
        return
    if not gpu_compile.is_possible():
        yield Ahead(0)
        return
    ahead = Ahead(gpu_compile.num_workers())
    try:
        with gpu_compile.told_of_misses(ahead.missed):
            yield ahead
    finally:
        ahead.close()
