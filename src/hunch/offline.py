"""Requests of one program on one engine: from any thread, with Ctrl-C between steps, not after a
fork."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import uuid
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any

from hunch.engine.engine import Engine
from hunch.errors import EngineError, HunchError, RequestError
from hunch.prompts import Prompt, list_priorities, read_prompt, salt_of
from hunch.types import RequestOutput, SamplingParams, TextCodec


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """vLLM's: models that no name leads to any more give their memory back now."""
    gc.collect()


def random_uuid() -> str:
    """vLLM's: an id for a request."""
    return uuid.uuid4().hex


def init_logger(name: str) -> logging.Logger:
    """vLLM's: a logger of this name."""
    return logging.getLogger(name)


class OfflineRequests:
    """Adds requests, makes steps while somebody waits for one, and hands out their outputs.

    Threads take turns, step by step; each step brings the requests of all of them on.
    """

    def __init__(
        self, engine: Engine, codec: TextCodec, lock: threading.RLock | None = None
    ) -> None:
        """`lock`: of another engine over the same weights, which must not run at the same time."""
        self._engine, self._codec = engine, codec
        self.lock = lock or threading.RLock()
        self._process = os.getpid()
        self._ids = count()
        self._open: set[str] = set()  # requests that somebody waits for
        self._kept: dict[str, RequestOutput] = {}  # newest outputs, until they are handed out
        self._is_whole = True  # no step was broken off
        self._reason = "a step was broken off in the middle"

    def add(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        stream: bool,
        names: Sequence[str] | None = None,
        priorities: Sequence[int] | None = None,
    ) -> list[str]:
        """Queue requests, all or none; returns their ids: `names`, or new ones."""
        check_process(self._process)
        ids: list[str] = []
        given = (str(one) for one in self._ids) if names is None else iter(names)
        levels = list_priorities(len(prompts), priorities)
        try:
            for prompt, one, level in zip(prompts, params, levels, strict=True):
                text, token_ids = read_prompt(prompt, self._codec)
                request_id = next(given)
                how: dict[str, Any] = {"priority": level, "cache_salt": salt_of(prompt)}
                how |= {"prompt": text, "stream": stream}
                asked = self._engine.check(request_id, token_ids, one, **how)
                with held_interrupts(), self._turn():
                    if request_id in self._open:  # perhaps done, but its output is not fetched yet
                        raise RequestError(f"request id {request_id!r} is in use")
                    self._engine.check_queue(0)
                    self._engine.admit(asked)
                    self._open.add(request_id)
                    ids.append(request_id)
        except (HunchError, KeyboardInterrupt):
            self.end(ids)
            raise
        return ids

    def run(self, ids: Sequence[str]) -> Iterator[RequestOutput]:
        """Outputs of these requests as they come; who leaves early aborts what is not done."""
        waiting = set(ids)
        try:
            while waiting:
                for output in self._next(waiting):
                    if output.finished:
                        waiting.discard(output.request_id)
                        self._open.discard(output.request_id)
                    yield output
        finally:
            self.end(waiting)
            with self.lock:
                self._engine.end_period()

    def step(self, waiting: Collection[str]) -> list[RequestOutput]:
        """What came for these requests meanwhile, or with one step, which may be nothing."""
        check_process(self._process)
        with held_interrupts(), self._turn():
            found = self._step(waiting)
            self._open.difference_update(one.request_id for one in found if one.finished)
        return found

    def _next(self, waiting: Collection[str]) -> list[RequestOutput]:
        """What came for these requests meanwhile, or with the first step that brings something.

        Empty where Ctrl-C came, and its handler did not raise.
        """
        check_process(self._process)
        found: list[RequestOutput] = []
        with held_interrupts() as held:
            while not found and not held:
                with self._turn():
                    found = self._step(waiting)
        return found

    def _step(self, waiting: Collection[str]) -> list[RequestOutput]:
        """What came for these requests meanwhile, or with a step that is made now."""
        if self._kept.keys().isdisjoint(waiting):
            self._is_whole = False
            try:
                outputs = self._engine.step()
            except EngineError as error:  # told again to whoever comes later
                self._reason = str(error)
                raise
            for output in outputs:
                if output.request_id in self._open:
                    self._kept[output.request_id] = output
            self._is_whole = True
        return [self._kept.pop(one) for one in list(self._kept) if one in waiting]

    def end(self, ids: Collection[str]) -> None:
        """Nobody waits for these requests any more; those that are done are done."""
        if not self.is_own_process:
            return
        with held_interrupts(), self.lock:
            for request_id in ids:
                self._open.discard(request_id)
                self._kept.pop(request_id, None)
                if self._is_whole:
                    self._engine.abort(request_id, is_told=False)

    @property
    def is_own_process(self) -> bool:
        """False in a process that was forked after the model was loaded."""
        return os.getpid() == self._process

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Nobody else's until it is over."""
        with self.lock:
            if not self._is_whole:
                raise EngineError(f"{self._reason}: load the model again")
            yield


def check_process(loaded: int) -> None:
    """Raise in any process but the one in which the model was loaded."""
    if os.getpid() != loaded:
        raise EngineError(
            f"this model was loaded in process {loaded}, and process {os.getpid()} was forked from "
            "that one, without its threads: load the model in the child, or start children with "
            'multiprocessing.get_context("spawn")'
        )


@contextmanager
def held_interrupts() -> Iterator[list[tuple[int, FrameType | None]]]:
    """Ctrl-C waits for the end of the block, so that nothing is left half done.

    A second one does not wait. The list that the block is given says what waits.
    """
    held: list[tuple[int, FrameType | None]] = []
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(handler):
        yield held
        return

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))
        if len(held) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        handler(*held[0])
