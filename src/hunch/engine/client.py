"""The engine in a thread of its own, for callers from other threads and from asyncio.

Submissions and aborts cross by a queue that the engine's thread empties before every step. Answers
come back through a `Stream`, which keeps only the newest output: outputs are cumulative, so a slow
reader misses nothing, holds nobody up and costs one output's memory.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Self

from hunch.engine.engine import Engine
from hunch.engine.intake import Asked
from hunch.errors import EngineError, RequestError
from hunch.types import RequestOutput, SamplingParams

_Waiters = dict[asyncio.AbstractEventLoop, list["asyncio.Future[None]"]]


class Stream:
    """A request's answer as it grows: `for output in stream`, or `async for`. One reader."""

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._changed = threading.Condition()
        self._newest: RequestOutput | None = None  # not read yet
        self._finished: RequestOutput | None = None
        self._is_done = False
        self._error: EngineError | None = None
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None

    def abort(self) -> None:
        """Give the request up; the stream ends with an output whose finish reason is "abort"."""
        self._abort(self.request_id)

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Wait for the finished output. TimeoutError after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done, timeout):
                raise TimeoutError(f"request {self.request_id!r} is not done after {timeout} s")
            if self._error is not None:
                raise self._error
            assert self._finished is not None
            return self._finished

    def __iter__(self) -> Iterator[RequestOutput]:
        is_last = False
        while not is_last:
            with self._changed:
                self._changed.wait_for(lambda: self._newest is not None or self._is_done)
                output, is_last = self._take()
            if output is not None:
                yield output

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        loop, is_last = asyncio.get_running_loop(), False
        while not is_last:
            with self._changed:
                waiting = None
                if self._newest is None and not self._is_done:
                    waiting = loop.create_future()
                    self._waiter = (loop, waiting)
            if waiting is not None:
                await waiting
            with self._changed:
                output, is_last = self._take()
            if output is not None:
                yield output

    def _take(self) -> tuple[RequestOutput | None, bool]:
        output, is_last = self._newest, self._is_done
        if output is None and self._error is not None:
            raise self._error
        self._newest = None
        return output, is_last and self._error is None

    def _put(self, output: RequestOutput, waiters: _Waiters) -> None:
        with self._changed:
            self._newest = output
            if output.finished:
                self._finished, self._is_done = output, True
            self._wake(waiters)

    def _fail(self, error: EngineError, waiters: _Waiters) -> None:
        with self._changed:
            self._error, self._is_done = error, True
            self._wake(waiters)

    def _wake(self, waiters: _Waiters) -> None:
        self._changed.notify_all()
        if self._waiter is not None:
            loop, waiter = self._waiter
            waiters[loop].append(waiter)
            self._waiter = None


class EngineClient:
    """Owns the engine's thread. Every method may be called from any thread."""

    def __init__(self, engine: Engine | Callable[[], Engine]) -> None:
        """Takes an engine, or a function that builds it inside the thread; its errors come here."""
        self._source = engine
        self._inbox: deque[Asked | str] = deque()  # a string is the id of a request to abort
        self._wake = threading.Condition()
        self._streams: dict[str, Stream] = {}
        self._ids = count()
        self._is_closing = False
        self._failure: BaseException | None = None
        self._engine: Engine | None = None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hunch-engine", daemon=True)
        self._thread.start()
        self._is_ready.wait()
        if self._engine is None:
            assert self._failure is not None
            raise self._failure

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    @property
    def is_alive(self) -> bool:
        """Whether the engine runs and takes requests."""
        return self._failure is None and not self._is_closing

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        prompt: str | None = None,
        stream: bool = True,
    ) -> Stream:
        """Queue a request. What is wrong with it is raised here, as is a full queue."""
        if request_id is None:
            request_id = f"request-{next(self._ids)}"
        asked = self.engine.check(request_id, prompt_ids, params, prompt=prompt, stream=stream)
        with self._wake:
            self._check_open()
            if request_id in self._streams:
                raise RequestError(f"request id {request_id!r} is in use")
            self.engine.check_queue(
                sum(len(a.requests) for a in self._inbox if isinstance(a, Asked))
            )
            answer = self._streams[request_id] = Stream(request_id, self.abort)
            self._inbox.append(asked)
            self._wake.notify()
        return answer

    def abort(self, request_id: str) -> None:
        """End a request before the next step. One that is over already is no error."""
        with self._wake:
            if request_id in self._streams:
                self._inbox.append(request_id)
                self._wake.notify()

    def stats(self) -> dict[str, Any]:
        return self.engine.stats()

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests, give the open ones `drain` seconds, abort the rest and stop."""
        with self._wake:
            self._is_closing = True
            self._wake.wait_for(lambda: not self._streams, drain)
            self._inbox.extend(self._streams)
            self._wake.notify_all()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise EngineError(f"the engine stopped: {self._failure}") from self._failure
        if self._is_closing:
            raise EngineError("the engine is closing and takes no more requests")

    # --- in the engine's thread -----------------------------------------------------------------

    def _run(self) -> None:
        try:
            source = self._source
            self._engine = source if isinstance(source, Engine) else source()
            self._is_ready.set()
            while self._receive():
                self._deliver(self.engine.step())
            self.engine.close()
        except BaseException as cause:  # a thread's edge: whatever ended it, readers must be told
            self._fail(cause)

    def _receive(self) -> bool:
        """Take in what has arrived, waiting while there is nothing to do; False at the end."""
        with self._wake:
            self._wake.wait_for(
                lambda: self._inbox or self.engine.has_work() or self._is_stopping()
            )
            if self._is_stopping() and not self._inbox and not self.engine.has_work():
                return False
            messages = list(self._inbox)
            self._inbox.clear()
        for message in messages:
            if isinstance(message, Asked):
                self.engine.admit(message)
            else:
                self.engine.abort(message)
        return True

    def _is_stopping(self) -> bool:
        return self._is_closing and not self._streams

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        waiters: _Waiters = defaultdict(list)
        for output in outputs:
            self._streams[output.request_id]._put(output, waiters)
        _wake_all(waiters)
        if any(output.finished for output in outputs):
            with self._wake:
                for output in outputs:
                    if output.finished:
                        del self._streams[output.request_id]
                self._wake.notify_all()

    def _fail(self, cause: BaseException) -> None:
        waiters: _Waiters = defaultdict(list)
        with self._wake:
            self._failure = cause
            for stream in self._streams.values():
                error = EngineError(f"the engine stopped: {cause}")
                error.__cause__ = cause
                stream._fail(error, waiters)
            self._streams.clear()
            self._inbox.clear()
            self._wake.notify_all()
        _wake_all(waiters)
        self._is_ready.set()


def _wake_all(waiters: _Waiters) -> None:
    """One call into each event loop, however many of its readers have news."""
    for loop, futures in waiters.items():
        with suppress(RuntimeError):  # the loop was closed, and its readers with it
            loop.call_soon_threadsafe(_release, futures)


def _release(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():  # its reader may have been cancelled
            future.set_result(None)
