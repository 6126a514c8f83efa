"""Compiles the kernels that a start will launch, ahead of it and on all cores.

Triton compiles a kernel when it is first launched: one after the other, on one core, half a second
each. It keeps them on disk, so only a machine's first start takes that long. That start first runs
its own code with launches that are only noted (`Noter`). Then processes that know nothing of the
GPU but its kind compile all of them into Triton's cache (`CompileWorkers`).

Only Triton's own interface is used: the hook before a kernel is compiled, the description that it
gets, `JITFunction.preload`, the listener for what was compiled, and a custom class for the cache.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass
from queue import Empty, Queue
from threading import Thread, get_ident
from threading import enumerate as all_threads

import torch
import triton
import triton.language as tl
from torch.overrides import TorchFunctionMode
from triton import knobs
from triton.runtime.cache import FileCacheManager
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from hunch.kernels import gpu_launch
from hunch.kernels.build import num_cpus

WORKERS = "HUNCH_COMPILE_WORKERS"  # processes; 0 or 1: kernels are compiled as they are launched
MAX_WORKERS = 32
LOWEST = 19  # priority of processes in the background
LOCK = "hunch-compile.lock"  # in Triton's cache
THREAD = "hunch-compile"  # name of threads that wait for the processes
PATIENCE = 120.0  # seconds within which a kernel must be done
# Operations of torch that read indices, which a kernel may not have computed.
INDEXED = {
    "__getitem__", "gather", "index_select", "take", "take_along_dim", "embedding",
    "scatter", "scatter_add", "index_add", "index_copy", "index_put",
}  # fmt: skip
IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__"}


def num_workers() -> int:
    """Number of processes that compile: one for every core but this process's."""
    told = os.environ.get(WORKERS, "").strip()
    if told.isdigit():
        return int(told)
    return min(num_cpus() - 1, MAX_WORKERS)


def wait_for_background() -> None:
    """Wait until nothing is compiled in the background any more."""
    for thread in all_threads():
        if thread.name == THREAD:
            thread.join()


def is_possible() -> bool:
    """Whether this Triton has the hooks, and there is more than one core."""
    has_hooks = hasattr(knobs.runtime, "jit_cache_hook") and hasattr(knobs.compilation, "listener")
    has_hooks = has_hooks and hasattr(JITFunction, "preload")
    has_hooks = has_hooks and hasattr(knobs.cache, "manager_class")
    return has_hooks and not gpu_launch.IS_INTERPRETED and num_workers() > 1


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel to compile, as Triton describes it."""

    module: str
    name: str
    source: str  # a hash of the code, part of its name in the cache
    description: str  # types, constants and options, in JSON


# --- what has to be compiled ----------------------------------------------------------------------


class Missing(Exception):  # noqa: N818  # not an error: it ends a search of the cache
    """A kernel is not in Triton's cache."""


class Noter:
    """Runs code without launching kernels, and notes them; memory is not changed.

    Kernels that are in Triton's cache are loaded.
    """

    def __init__(self, note: Callable[[Job], None]) -> None:
        """`note` is called once for each kernel that must be compiled."""
        self._note, self._thread = note, get_ident()
        self._seen: set[object] = set()
        self._noted: set[Job] = set()

    def __call__(self, body):
        """Run `body`; what it returns has undefined numbers in it."""
        run, hook = JITFunction.run, knobs.runtime.jit_cache_hook
        asked: list[Job] = []  # the kernel that is looked for

        def launch(kernel, *args, grid, warmup, **given):
            if get_ident() != self._thread:
                return run(kernel, *args, grid=grid, warmup=warmup, **given)
            has_types = any(isinstance(value, tl.dtype) for value in (*args, *given.values()))
            if not has_types and self._is_new(kernel, args, given):
                try:
                    run(kernel, *args, grid=grid, warmup=True, **given)
                except Missing:
                    self._keep(asked.pop())
            return None

        def describe(*, fn, compile, **others):
            if get_ident() != self._thread:
                return None if hook is None else hook(fn=fn, compile=compile, **others)
            source = fn.jit_function.cache_key
            asked[:] = [Job(fn.module, fn.name, source, compile["specialization_data"])]
            return None

        with knobs.cache.scope():
            knobs.cache.manager_class = self._manager()
            JITFunction.run, knobs.runtime.jit_cache_hook = launch, describe
            try:
                with Unwritten():
                    return body()
            finally:
                JITFunction.run, knobs.runtime.jit_cache_hook = run, hook

    def _manager(self) -> type:
        """A class for Triton's cache that raises `Missing` if a kernel is not there."""
        thread = self._thread

        class Probe(knobs.cache.manager_class or FileCacheManager):
            def get_group(self, filename):
                found = super().get_group(filename)
                if get_ident() == thread and filename not in (found or ()):
                    raise Missing
                return found

        return Probe

    def _keep(self, job: Job) -> None:
        if job not in self._noted:
            self._noted.add(job)
            self._note(job)

    def _is_new(self, kernel, args, given) -> bool:
        """Whether no earlier launch was equal in all that a kernel is compiled for."""
        named = ((name, _compiled_for(value)) for name, value in given.items())
        key = (id(kernel), *map(_compiled_for, args), *named)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _compiled_for(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    return type(value), value


class Unwritten(TorchFunctionMode):
    """torch's own operations while kernels are not launched: they write to no existing memory, and
    do not use undefined numbers as indices."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if kwargs.get("out") is not None:
            return kwargs["out"]
        if name == "__setitem__":
            return None
        if name in IN_PLACE or (name.endswith("_") and not name.endswith("__")):
            return args[0]
        if name in INDEXED:
            first = 0 if name == "embedding" else 1
            args = (*args[:first], *map(_first_place, args[first:]))
            kwargs = {key: _first_place(value) for key, value in kwargs.items()}
        return function(*args, **kwargs)


def _first_place(value):
    """Zeros in place of indices."""
    if isinstance(value, tuple):
        return tuple(map(_first_place, value))
    is_index = isinstance(value, torch.Tensor) and value.dtype in (torch.int32, torch.int64)
    return torch.zeros_like(value) if is_index else value


@contextmanager
def told_of_misses(tell: Callable[[], None]) -> Iterator[None]:
    """`tell` is called when a kernel was compiled that Triton's cache did not have."""
    before = knobs.compilation.listener

    def listen(*, cache_hit, **others):
        if not cache_hit:
            tell()
        if before is not None:
            before(cache_hit=cache_hit, **others)

    knobs.compilation.listener = listen
    try:
        yield
    finally:
        knobs.compilation.listener = before


@contextmanager
def in_turn() -> Iterator[None]:
    """Engines that start side by side do this one after the other: the first compiles for all."""
    with ExitStack() as stack:
        with suppress(OSError):  # a cache that cannot be written to or locked
            os.makedirs(knobs.cache.dir, exist_ok=True)
            file = stack.enter_context(open(os.path.join(knobs.cache.dir, LOCK), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- the processes that compile -------------------------------------------------------------------


class CompileError(RuntimeError):
    """The processes that compile have ended."""


class CompileWorkers:
    """Processes that compile into Triton's cache, forked from one that has imported everything."""

    def __init__(self, count: int) -> None:
        self.count, self.num_jobs, self.num_failed = count, 0, 0
        self._num_answered = 0
        self._lines: Queue[object] = Queue()  # to be sent; None: there will be no more
        self._answers: Queue[str | None] = Queue()  # None: there will be no more
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115  # what the processes print
        target = driver.active.get_current_target()
        env = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",  # no memory of the GPU is taken
            "OMP_NUM_THREADS": "1",
            "TRITON_CACHE_DIR": str(knobs.cache.dir),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "hunch.kernels.gpu_compile_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env=env,
            text=True,
            start_new_session=True,  # Ctrl-C reaches this process, which ends it
        )
        self._lines.put([triton.__version__, count, gpu_launch.HAS_EARLY_START, vars(target)])
        loops = self._read, self._write
        self._threads = [Thread(target=loop, name=THREAD, daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        """Send queued lines, from a thread of its own: the process may still be starting."""
        with suppress(OSError):  # the process has ended
            while (line := self._lines.get()) is not None:
                self._process.stdin.write(json.dumps(line) + "\n")
                self._process.stdin.flush()
            self._process.stdin.close()  # it ends after the last line

    def _read(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def submit(self, job: Job) -> None:
        self._lines.put(astuple(job))
        self.num_jobs += 1

    def results(self) -> Iterator[bool]:
        """For each submitted kernel, when it is done: whether it could be compiled."""
        while self._num_answered < self.num_jobs:
            try:
                line = self._answers.get(timeout=PATIENCE)
            except Empty:
                raise CompileError(f"nothing was compiled for {PATIENCE:.0f} seconds") from None
            if line is None:
                raise CompileError(self._last_words())
            self._num_answered += 1
            is_done = line == "\n"
            self.num_failed += not is_done
            yield is_done

    def _last_words(self) -> str:
        self._words.seek(0)
        lines = self._words.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.poll()}"

    def finish_alone(self) -> None:
        """Let the processes finish their work in the background, and then end.

        Cores that requests need are theirs first.
        """
        with suppress(OSError):  # they have ended
            os.setpriority(os.PRIO_PGRP, self._process.pid, LOWEST)
        self._lines.put(None)
        Thread(target=self._end, name=THREAD, daemon=True).start()

    def close(self) -> None:
        """End all processes at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._lines.put(None)
        self._end()

    def _end(self) -> None:
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for file in (self._process.stdin, self._process.stdout, self._words):
            with suppress(OSError):
                file.close()
