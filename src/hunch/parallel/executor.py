"""Rank 0's side: starts the other ranks, loads models over them, and knows when one has died."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import IO

import torch

from hunch.config import ModelConfig
from hunch.errors import EngineError, HunchError, ModelError
from hunch.kernels.build import num_cores
from hunch.parallel.link import JOIN_SECONDS, Link, Numbers, rank_device, torchrun_rank
from hunch.parallel.orders import Op, load_order, order
from hunch.parallel.part import Layout, Part, dump_model
from hunch.parallel.whole import NoMemory

BLAME_SECONDS = 10.0  # after a line broke, in which the rank that broke it must be found
LEAVE_SECONDS = 5.0  # in which a rank must leave when it is told to
HEAR_SECONDS = 3.0  # in which it must be told
MEMORY_FOLDER = "/dev/shm"  # a folder whose files are in memory
FOLLOWER = "hunch.parallel.follower"  # the module that other ranks run


class Ranks:
    """Processes that hold models together. This one is rank 0, which sends orders to the others."""

    def __init__(
        self,
        link: Link,
        processes: list[subprocess.Popen[bytes]],
        folder: tempfile.TemporaryDirectory[str] | None = None,
    ) -> None:
        self.link = link
        self._folder = folder  # where ranks find each other
        self.size = link.size
        self._processes = processes
        self._numbers = count()
        self._broken: str | None = None  # why no order can be carried out any more
        self._deaths: list[str] = []
        self._died = threading.Event()
        self._is_closing = False
        self._watches = [
            threading.Thread(target=self._watch, args=(rank, process), daemon=True)
            for rank, process in enumerate(processes, start=1)
        ]
        for watch in self._watches:
            watch.start()
        atexit.register(_close, weakref.ref(self))  # else torchrun's ranks would see the line break

    def load(self, path: Path, config: ModelConfig, layout: Layout) -> tuple[int, Part]:
        """Load a model over the first ranks; returns its number, and this rank's part."""
        number = self.new_number()
        fields = {"number": number, "path": str(path), **asdict(layout)}
        failure: HunchError | None = None
        with self.in_step():
            self.send(load_order({**fields, "model": dump_model(config)}))
            part: Part | None = None
            try:
                part = Part.load(self.link, path, config, layout)
            except HunchError as error:  # the others' answers must be read before it is raised
                failure = error
            replies = self.link.tell_rank_0("")
        if failure is not None:
            raise failure
        told = [f"rank {rank}: {text}" for rank, text in enumerate(replies) if text]
        if told:
            raise ModelError(f"the model could not be loaded: {'; '.join(told)}")
        assert part is not None
        return number, part

    def new_number(self) -> int:
        """A new number for a model or a KV cache."""
        return next(self._numbers)

    def send(self, numbers: Numbers) -> None:
        """Send an order to all other ranks."""
        self.link.send(numbers)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """For what all ranks do together: after an error in it they are out of step for good.

        Unless memory lacked in a pass: then all have made the pass's exchanges.
        """
        self.check()
        try:
            yield
        except NoMemory:
            raise
        except BaseException as error:
            self._broken = self._reason(error)
            if isinstance(error, RuntimeError):
                raise EngineError(self._broken) from error
            raise

    def check(self) -> None:
        """Raise if a rank is gone."""
        if self._broken is None and self._deaths:
            self._broken = self._deaths[0]
        if self._broken is not None:
            raise EngineError(self._broken)
        self.link.check()

    def without_memory(self) -> str:
        """Which ranks ran out of memory since this was last called, and their errors."""
        with self.in_step():
            self.send(order(Op.ASK))
            replies = self.link.tell_rank_0("")
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(replies) if text)

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, RuntimeError) and self._watches:
            self._died.wait(BLAME_SECONDS)
        if self._deaths:
            return self._deaths[0]
        return f"rank 0 left a step of all ranks: {type(error).__name__}: {error}"

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process of a rank ends; note how it ended."""
        stdout = process.stdout
        assert stdout is not None
        output = stdout.read().decode(errors="replace").strip()  # ends with the process
        code = process.wait()
        if self._is_closing:
            return
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        why = f" ({output.splitlines()[-1]})" if output else ""
        self._deaths.append(
            f"rank {rank} (process {process.pid}) {how}{why}; the model cannot go on without it"
        )
        # Others end because of the first one: its line breaks, and they leave with code 1.
        self._deaths.sort(key=lambda text: "exit code 1;" in text)
        self._died.set()
        self.link.stop_waiting()

    def close(self) -> None:
        """End the other ranks; further calls do nothing."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._broken is None and not self._deaths:
            with contextlib.suppress(RuntimeError):
                self.send(order(Op.CLOSE))
                # The order may be on its way: a line that breaks under it can leave a thread of
                # gloo's waiting forever, and this process with it.
                self._wait(HEAR_SECONDS)
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # which ends it if it hangs
        end = time.monotonic() + LEAVE_SECONDS
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for watch in self._watches:  # each reads its process's output to the end
            watch.join()
        for process in self._processes:
            assert process.stdout is not None
            process.stdout.close()
        self.link.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _wait(self, seconds: float) -> None:
        """Wait until all other ranks have left, but no longer than this."""
        end = time.monotonic() + seconds
        with contextlib.suppress(subprocess.TimeoutExpired):
            for process in self._processes:
                process.wait(max(0.0, end - time.monotonic()))

    def __del__(self) -> None:
        if not getattr(self, "_is_closing", True):
            self.close()


def _close(ranks: weakref.ref[Ranks]) -> None:
    if (there := ranks()) is not None:
        there.close()


def start_ranks(size: int, device: str, num_threads: int | None = None) -> Ranks:
    """`size` ranks, this process the first of them; torchrun's, if torchrun started this one."""
    threads = num_threads or threads_of_rank(size)
    if torchrun_rank(size) == 0:
        return Ranks(Link.of_torchrun(rank_device(device, 0, size)), [])
    own_device = rank_device(device, 0, size)  # raises if there are too few
    folder = tempfile.TemporaryDirectory(prefix="hunch-ranks-", dir=memory_folder())
    place = Path(folder.name)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(1, size):
            processes.append(_start(rank, size, device, place, threads))
        for rank, process in enumerate(processes, start=1):
            assert process.stdout is not None
            _wait_here(rank, process, process.stdout)
        return Ranks(Link.in_folder(place, 0, size, own_device), processes, folder)
    except BaseException:
        for process in processes:
            process.kill()
            process.wait()
        folder.cleanup()
        raise


def memory_folder() -> str | None:
    """A folder whose files are in memory; None: there is none."""
    return MEMORY_FOLDER if os.access(MEMORY_FOLDER, os.W_OK) else None


def _start(
    rank: int, size: int, device: str, folder: Path, num_threads: int
) -> subprocess.Popen[bytes]:
    words = [str(rank), str(size), device, str(folder)]
    env = {**os.environ, "HUNCH_RANK_THREADS": str(num_threads)}
    return subprocess.Popen(
        [sys.executable, "-m", FOLLOWER, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
        start_new_session=True,  # Ctrl-C is for rank 0, which ends the others
    )


def _wait_here(rank: int, process: subprocess.Popen[bytes], stdout: IO[bytes]) -> None:
    """Wait until the process is about to join: if it died before, the others would wait in vain."""
    ready, _, _ = select.select([stdout], [], [], JOIN_SECONDS)
    line = stdout.readline() if ready else b""
    if line != b"here\n":
        output = line.decode(errors="replace").strip()
        raise EngineError(f"rank {rank} did not start {output}".rstrip())


def threads_of_rank(num_ranks: int) -> int:
    """Threads of each of the ranks that share this machine's cores."""
    return max(1, num_cores() // num_ranks)


def model_of_rank(config: ModelConfig, num_ranks: int) -> ModelConfig:
    """The config for every rank: cores are divided among them."""
    threads = config.threads or threads_of_rank(num_ranks)
    return replace(config, threads=threads)


def follow_torchrun(size: int, device: str, num_threads: int | None) -> int | None:
    """Run a rank other than 0 that torchrun started, to its end; None: this is no such rank."""
    rank = torchrun_rank(size)
    if not rank:
        return None
    from hunch.parallel.follower import follow

    torch.set_num_threads(num_threads or threads_of_rank(size))
    return follow(Link.of_torchrun(rank_device(device, rank, size)))
