"""`LLM` for asyncio, as vLLM's AsyncLLM: many requests at once, each an async generator."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Literal, Self, TypeVar, Unpack

from hunch.arguments import Arguments
from hunch.compat import VllmCalls, wishes_of
from hunch.config import DEFAULT_MODEL, Config, ModelConfig
from hunch.engine_args import EngineArgs, UsageContext, check_plain
from hunch.errors import EngineError, HunchError, RequestError
from hunch.llm import LLM
from hunch.offline import check_process
from hunch.pooling import params_to_pool
from hunch.prompts import Prompt, list_priorities, read_prompt, salt_of
from hunch.text.tokenizer import Tokenizer
from hunch.types import RequestOutput, RequestOutputKind, SamplingParams
from hunch.vectors import (
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    check_task,
    pooled_of,
)

log = logging.getLogger("hunch")
T = TypeVar("T")


class AsyncLLM(VllmCalls):
    """A model whose answers are async generators. Requests of one moment share steps.

    >>> llm = AsyncLLM("smollm2-135m")
    >>> async for output in llm.generate("The future of AI is"):
    ...     print(output.outputs[0].text)

    The engine runs in a thread of its own; generators may be used from any event loop.
    """

    def __init__(self, model: str = DEFAULT_MODEL, **arguments: Unpack[Arguments]) -> None:
        self._open(LLM(model, **arguments))

    def _open(self, llm: LLM) -> None:
        self._llm = llm
        self._streams: dict[str, _Stream] = {}  # only the engine's thread changes it
        # Requests that wait for a pause's end: their ids, and what adds them.
        self._held: dict[_Stream, tuple[str, Callable[[], None]]] = {}
        self._orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._trouble: Exception | None = None
        self._is_paused = self._is_closed = False  # no steps are run; no requests are taken
        self._pauses: list[tuple[Future[None], bool]] = []  # asked for, with whether to clear
        self._process = os.getpid()
        self._thread = Thread(target=self._work, name="hunch-engine", daemon=True)
        self._thread.start()
        # A thread that computes while Python shuts down ends in an abort.
        atexit.register(self.shutdown)

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: UsageContext | None = None,
        stat_loggers: Any = None,
        start_engine_loop: bool = True,
    ) -> Self:
        """vLLM's further arguments, which mean nothing here, are taken at their usual values."""
        check_plain(stat_loggers, start_engine_loop)
        return cls(**engine_args.given())

    @classmethod
    def from_llm(cls, llm: LLM) -> Self:
        """Over a model that is loaded already; `llm` itself must not be used any more."""
        made = cls.__new__(cls)
        made._open(llm)
        return made

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer as it grows, all of it so far each time; the last output is `finished`. With
        `output_kind` DELTA each output holds what is new; with FINAL_ONLY there is only the last.
        Requests of lower `priority` go first.

        Who reads slowly misses outputs, never text. Leaving the loop, closing the generator or
        cancelling its task aborts the request.
        """
        self._check()
        wishes_of("generate", others, {})
        (params,) = self._llm.params_for(1, sampling_params)
        text, ids = await asyncio.to_thread(read_prompt, prompt, self._llm.tokenizer)
        request_id = request_id or f"request-{uuid.uuid4().hex}"
        (level,) = list_priorities(1, [priority])
        how = {"prompt": text, "priority": level, "cache_salt": salt_of(prompt)}
        engine, stream = self._llm.engine, _Stream(asyncio.get_running_loop())

        def start() -> None:
            if self._is_closed:
                self._held[stream] = request_id, add
            else:
                add()

        def add() -> None:
            try:
                engine.add(request_id, ids, params, **how)
            except HunchError as error:
                stream.put(error)
                return
            self._streams[request_id] = stream

        is_over, before = False, None
        try:
            self._order(start)
            while not is_over:
                output = await stream.get()
                is_over = output.finished
                if is_over or params.output_kind != RequestOutputKind.FINAL_ONLY:
                    yield output.since(before)
                if params.output_kind == RequestOutputKind.DELTA:
                    before = output
        finally:
            if not is_over:
                self._orders.put(lambda: self._abort(request_id, stream))

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        pooling_task: str | None = None,
        **others: Any,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """A text as a vector, the only output; others as of `generate`."""
        check_task("pooling_task", pooling_task)
        asked = pooling_params or PoolingParams()
        answer = self.generate(prompt, params_to_pool("last"), request_id, **others)
        async with aclosing(answer) as outputs:
            async for output in outputs:
                if output.finished:
                    yield pooled_of(output, asked)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; a generator gives one more output, with finish reason "abort"."""
        for one in [request_id] if isinstance(request_id, str) else request_id:
            self._orders.put(partial(self._end, one))

    @property
    def config(self) -> Config:
        return self._llm.config

    @property
    def model_config(self) -> ModelConfig:
        return self._llm.model_config

    async def get_model_config(self) -> ModelConfig:
        return self._llm.model_config

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    async def get_tokenizer(self) -> Tokenizer:
        return self._llm.get_tokenizer()

    async def check_health(self) -> None:
        """Raises where no request can be answered any more."""
        self._check()

    async def reset_prefix_cache(  # type: ignore[override]
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget cached prefixes; whether none is left. Running requests go on as they are."""
        return await self._done(lambda: self._llm.reset_cache(is_held_too=reset_running_requests))

    async def pause_generation(
        self,
        *,
        mode: Literal["abort", "wait", "keep"] = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        """Run no steps until `resume_generation`. Running requests are ended (`abort`), answered
        first (`wait`, in older words `wait_for_inflight_requests`), or wait as they are (`keep`);
        those that come meanwhile wait. With `clear_cache`, prefixes are forgotten."""
        self._check()
        mode = "wait" if wait_for_inflight_requests else mode
        if mode not in ("abort", "wait", "keep"):
            raise RequestError(f"pause_generation: mode={mode!r} must be abort, wait or keep")
        done: Future[None] = Future()

        def pause() -> None:
            self._is_paused, self._is_closed = mode == "keep", mode != "keep"
            for request_id in self._streams if mode == "abort" else ():
                self._llm.engine.abort(request_id)
            self._pauses.append((done, clear_cache))

        self._order(pause)
        await asyncio.wrap_future(done)

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""

        def resume() -> None:
            self._is_paused = self._is_closed = False
            held, self._held = self._held, {}
            for _, add in held.values():
                add()

        await self._done(resume)

    async def is_paused(self) -> bool:
        return self._is_paused or self._is_closed

    @property
    def errored(self) -> bool:
        return self._trouble is not None

    @property
    def is_running(self) -> bool:
        return not self.errored

    @property
    def is_stopped(self) -> bool:
        return self.errored

    @property
    def dead_error(self) -> EngineError:
        return EngineError(f"the engine stopped: {self._trouble}")

    def stats(self) -> dict[str, Any]:
        """Totals since the start, with the keys every hunch tool uses."""
        return self._llm.stats()

    def shutdown(self) -> None:
        """End every request and give the model's memory back."""
        if self._thread.is_alive():
            self._orders.put(None)
            self._thread.join()
        atexit.unregister(self.shutdown)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    async def _done(self, order: Callable[[], T]) -> T:
        """What an order gives, once the engine's thread has taken it."""
        self._check()
        done: Future[T] = Future()
        self._order(lambda: _tell(done, order()))
        return await asyncio.wrap_future(done)

    def _order(self, order: Callable[[], None]) -> None:
        """Have the engine's thread do this, or raise where it has stopped."""
        self._orders.put(order)
        self._check()

    def _check(self) -> None:
        check_process(self._process)
        if self._trouble is not None:
            raise self.dead_error from self._trouble

    def _work(self) -> None:
        """What the engine's thread does: orders first, then a step while there is work."""
        try:
            while self._take_orders():
                if self._llm.engine.has_work() and not self._is_paused:
                    self._deliver(self._llm.engine.step())
                self._end_pauses()
            self._trouble = EngineError("it was shut down")
        except Exception as error:  # whatever it is, those who wait must hear of it
            log.exception("the engine stopped")
            self._trouble = error
        while not self._orders.empty():  # of those who have not seen that there is trouble
            if (order := self._orders.get()) is not None:
                order()
        for stream in (*self._streams.values(), *self._held):
            stream.put(self.dead_error)
        self._streams.clear()
        self._held.clear()
        for done, _ in self._pauses:
            if done.set_running_or_notify_cancel():
                done.set_exception(self.dead_error)
        self._llm.close()

    def _take_orders(self) -> bool:
        """Waits for one where nothing else is to do; False: shut down."""
        is_idle = self._is_paused or not self._llm.engine.has_work()
        while True:
            try:
                order = self._orders.get(block=is_idle)
            except Empty:
                return True
            if order is None:
                return False
            order()
            is_idle = False

    def _end_pauses(self) -> None:
        """Tell who asked for a pause that it has begun."""
        if not self._is_paused and self._streams:
            return
        for done, clears in self._pauses:
            if clears:
                self._llm.reset_cache(is_held_too=True)
            _tell(done, None)
        self._pauses.clear()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finished:
                del self._streams[output.request_id]
            if not stream.put(output):
                self._abort(output.request_id, stream)

    def _end(self, request_id: str) -> None:
        """End a request, also one that waits for a pause's end, and tell its reader."""
        for stream, (held_id, add) in list(self._held.items()):
            if held_id == request_id:
                del self._held[stream]
                add()
        self._llm.engine.abort(request_id)

    def _abort(self, request_id: str, stream: _Stream) -> None:
        """End a stream's request. Under its id there may be another one by now, which goes on."""
        self._held.pop(stream, None)
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._llm.engine.abort(request_id, is_told=False)


def _tell(done: Future[T], result: T) -> None:
    """Give a result to who waits for it, unless nobody does any more."""
    if done.set_running_or_notify_cancel():
        done.set_result(result)


class _Stream:
    """The newest output of a request, on its way from the engine's thread to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._is_there = asyncio.Event()
        self._newest: RequestOutput | Exception | None = None

    def put(self, item: RequestOutput | Exception) -> bool:
        """From the engine's thread; False where the loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._take, item)
        except RuntimeError:
            return False
        return True

    def _take(self, item: RequestOutput | Exception) -> None:
        self._newest = item
        self._is_there.set()

    async def get(self) -> RequestOutput:
        await self._is_there.wait()
        self._is_there.clear()
        item = self._newest
        assert item is not None
        if isinstance(item, Exception):
            raise item
        return item
