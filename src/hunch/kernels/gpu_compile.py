"""Kernels compiled ahead, on all cores, from what a start is going to launch.

Triton compiles a kernel when it is launched for the first time: one after the other, on one core,
half a second each. It keeps them on disk, so only a machine's first start waits. That start first
goes through its own code with launches that are only noted (`Noter`), and processes that know the
GPU by its name alone compile all of them into Triton's cache (`CompileWorkers`).

All of it goes through what Triton offers: a hook that is asked before a kernel is compiled, the
description that it hands over, `JITFunction.preload`, a listener that is told what was compiled,
and a class of one's own for the cache.
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
LOCK = "hunch-compile.lock"  # in Triton's cache
PATIENCE = 120.0  # seconds in which one of the kernels under way should be done
# What reads places that a kernel may have had to compute.
INDEXED = {
    "__getitem__", "gather", "index_select", "take", "take_along_dim", "embedding",
    "scatter", "scatter_add", "index_add", "index_copy", "index_put",
}  # fmt: skip
IN_PLACE = {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__", "__iand__"}


def num_workers() -> int:
    """Processes that compile: one for every core but ours."""
    told = os.environ.get(WORKERS, "").strip()
    if told.isdigit():
        return int(told)
    return min(num_cpus() - 1, MAX_WORKERS)


def is_possible() -> bool:
    """Whether this Triton has the hooks, and there are cores to gain."""
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


class Missing(Exception):  # noqa: N818  # no error: it ends a look into the cache
    """A kernel is not in Triton's cache."""


class Noter:
    """Runs code whose launches are only noted. It leaves all memory as it was.

    Kernels that Triton's cache has are loaded on the way, for when they are needed.
    """

    def __init__(self, note: Callable[[Job], None]) -> None:
        """`note` is called once for each kernel that is to be compiled."""
        self._note, self._thread = note, get_ident()
        self._seen: set[object] = set()
        self._noted: set[Job] = set()

    def __call__(self, body):
        """What `body` returns, with numbers in it that nobody computed."""
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
        """Triton's way to its cache, which ends where there is nothing."""
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
        """Whether no launch before was the same in all that a kernel is compiled for."""
        named = ((name, _kind(value)) for name, value in given.items())
        key = (id(kernel), *map(_kind, args), *named)
        if key in self._seen:
            return False
        self._seen.add(key)
        return True


def _kind(value):
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if isinstance(value, TensorDescriptor):
        return value.base.dtype, *value.block_shape
    return type(value), value


class Unwritten(TorchFunctionMode):
    """torch's own operations, where kernels are not launched: nothing that stands in memory is
    written, and what no kernel computed is no place to read from."""

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
        with suppress(OSError):  # a cache that nobody can write to, or cannot lock
            os.makedirs(knobs.cache.dir, exist_ok=True)
            file = stack.enter_context(open(os.path.join(knobs.cache.dir, LOCK), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- who compiles ---------------------------------------------------------------------------------


class CompileError(RuntimeError):
    """The processes that compile are gone."""


class CompileWorkers:
    """Processes that compile into Triton's cache, below one that has imported all they need."""

    def __init__(self, count: int) -> None:
        self.count, self.num_jobs, self.num_failed = count, 0, 0
        self._num_answered = 0
        self._lines: Queue[object] = Queue()  # to be sent; None: there will be no more
        self._answers: Queue[str | None] = Queue()  # None: there will be no more
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115  # of the processes, to show
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
            start_new_session=True,  # Ctrl-C reaches us, and we end it
        )
        self._lines.put([triton.__version__, count, gpu_launch.HAS_EARLY_START, vars(target)])
        loops = self._read, self._write
        self._threads = [Thread(target=loop, name="hunch-compile", daemon=True) for loop in loops]
        for thread in self._threads:
            thread.start()

    def _write(self) -> None:
        """Nobody waits while the other side is not there yet."""
        with suppress(OSError):  # it ended, or was ended
            while (line := self._lines.get()) is not None:
                self._process.stdin.write(json.dumps(line) + "\n")
                self._process.stdin.flush()
            self._process.stdin.close()  # it ends with the last of them

    def _read(self) -> None:
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)

    def submit(self, job: Job) -> None:
        self._lines.put(astuple(job))
        self.num_jobs += 1

    def results(self) -> Iterator[bool]:
        """For each submitted kernel, as it is done, whether it could be compiled; each once."""
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
        """Nobody waits for what is still under way: they end when it is done."""
        self._lines.put(None)
        Thread(target=self._end, name="hunch-compile", daemon=True).start()

    def close(self) -> None:
        """End all of them, whatever they are at."""
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
