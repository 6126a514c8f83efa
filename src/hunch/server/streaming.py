"""Answers on their way to a client: collected or as events, with a deadline, until it hangs up."""

from __future__ import annotations

import asyncio
from asyncio import ensure_future
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence, Sized
from contextlib import asynccontextmanager
from functools import partial
from json.encoder import encode_basestring_ascii as _quote
from typing import TypeVar

from starlette.responses import Response

from hunch.errors import HunchError
from hunch.garbage import without_collector
from hunch.server.answers import Shape
from hunch.server.connections import BodyWriter
from hunch.server.cursor import Cursor, Delta
from hunch.server.guard import BODY_SEND, BODY_WRITER, Receive, Scope, Send
from hunch.server.problems import ProblemError, from_error
from hunch.server.remote_stream import RemoteStream
from hunch.server.schemas import StreamOptions
from hunch.server.summary import Json, check_ends, usage
from hunch.types import RequestOutput

COMMENT = b": keep-alive\n\n"
BLANK = "\0"  # no name and no id holds one
BLANKED = _quote(BLANK).encode()
MANY = 10_000  # scores that take some tens of milliseconds to put into words
LAST_WORDS_SECONDS = 1.0  # for telling a client that may not be reading why its stream ends

T = TypeVar("T")


class ClientGoneError(HunchError):
    """The client hung up; there is nobody to answer."""


@asynccontextmanager
async def until(deadline: float) -> AsyncIterator[None]:
    """408 for what takes longer."""
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise too_late() from None


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, unless the client hangs up first."""
    task, gone = ensure_future(work), ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError("the client hung up")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def collect(streams: Sequence[RemoteStream]) -> list[RequestOutput]:
    """The finished outputs; nothing is left running if one fails or nobody waits any more."""
    try:
        async for _ in merge(streams):
            pass
    finally:
        for stream in streams:
            stream.abort()
    return [stream.output for stream in streams]


async def merge(streams: Sequence[RemoteStream]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """The news of several streams, each with its stream's number."""
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    tasks = {ensure_future(anext(stream)): number for number, stream in enumerate(streams)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                number = tasks.pop(task)
                output = task.result()
                if not output.finished:
                    tasks[ensure_future(anext(streams[number]))] = number
                yield number, output
    finally:
        for task in tasks:
            task.cancel()


class EventStream(Response):
    """News in the form that the shape gives them; a client that hangs up stops its requests."""

    def __init__(
        self,
        streams: Sequence[RemoteStream],
        shape: Shape,
        cursors: Sequence[Sequence[Cursor]],
        *,
        deadline: float,
        options: StreamOptions,
        keep_alive: float = 0.0,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(headers=headers, media_type=shape.media_type)
        del self.headers["content-length"]
        self._streams = streams
        self._shape = shape
        self._cursors = cursors
        self._deadline = deadline
        self._options = options
        self._is_opened = [False] * len(streams)
        self._is_plain = shape.is_plain and not options.continuous_usage_stats
        self._num_open = sum(map(len, cursors))  # answers without their last chunk
        self._frames: dict[int, tuple[bytes, bytes]] = {}
        self._writer: BodyWriter | None = None
        self._keep_alive = keep_alive if shape.media_type == "text/event-stream" else 0.0
        self._last_sent = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._writer = scope.get(BODY_WRITER)
            await while_connected(receive, self._write(send, scope.get(BODY_SEND, send)))
        except ClientGoneError:
            pass
        finally:
            for stream in self._streams:
                stream.abort()

    async def _write(self, begin: Send, send: Send) -> None:
        headers = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await begin(headers)
        if not self._shape.needs_prompt:
            opening = b"".join(b"".join(self._open(number)) for number in range(len(self._streams)))
            if opening:
                await send({"type": "http.response.body", "body": opening, "more_body": True})
        try:
            async with asyncio.timeout_at(self._deadline), self._comments(send):
                if len(self._streams) == 1 and self._writer is not None and self._is_plain:
                    self._streams[0].sink = self._push
                async for number, output in merge(self._streams):
                    await self._tell(send, number, output)
        except TimeoutError:
            await _last_words(send, self._shape.fault(too_late()))
        except HunchError as error:
            await _last_words(send, self._shape.fault(from_error(error)))
        else:
            await send({"type": "http.response.body", "body": self._shape.last})

    @asynccontextmanager
    async def _comments(self, send: Send) -> AsyncIterator[None]:
        """A comment whenever nothing was sent for long: a proxy may close a silent connection."""
        if not self._keep_alive:
            yield
            return
        loop = asyncio.get_running_loop()
        self._last_sent = loop.time()

        async def comment() -> None:
            while True:
                left = self._last_sent + self._keep_alive - loop.time()
                if left > 0:
                    await asyncio.sleep(left)
                    continue
                self._last_sent = loop.time()
                await send({"type": "http.response.body", "body": COMMENT, "more_body": True})

        task = ensure_future(comment())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _open(self, number: int) -> Iterator[bytes]:
        """What comes before the first text of a prompt's answers."""
        if not self._is_opened[number]:
            self._is_opened[number] = True
            for cursor in self._cursors[number]:
                output = self._streams[number].output
                yield from map(self._event, self._shape.opening(cursor.index, output))

    def _event(self, chunk: Json) -> bytes:
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage([stream.output for stream in self._streams])
        return self._shape.encode(chunk)

    def _push(self) -> bool:
        """Send text at once, in the turn of the event loop that brought it."""
        (cursor, *others), (stream,) = self._cursors[0], self._streams
        if others or self._writer is None or not self._writer.is_ready():
            return False
        text = cursor.plain(stream.read().outputs[0])
        if text is None:
            return False
        self._writer.write(b"".join(self._open(0)) + self._frame(cursor.index, text))
        self._note_sent()
        return True

    def _note_sent(self) -> None:
        if self._keep_alive:
            self._last_sent = asyncio.get_running_loop().time()

    async def _tell(self, send: Send, number: int, output: RequestOutput) -> None:
        parts: list[bytes] = list(self._open(number))
        chunks: list[Json] = []
        has_news, num_scores = False, 0
        if output.finished:
            check_ends([output])
        for cursor, choice in zip(self._cursors[number], output.outputs, strict=True):
            text = cursor.plain(choice) if self._is_plain else None
            if text is not None:
                parts.append(self._frame(cursor.index, text))
                continue
            delta = cursor.advance(choice)
            if delta is not None:
                has_news = True
                self._num_open -= delta.finish_reason is not None
                num = count(delta.logprobs or ())
                num_scores += num
                chunks += await beside(num, partial(self._shape.chunks, delta))
        if has_news and not self._num_open:
            outputs = [stream.output for stream in self._streams]
            chunks = self._shape.closing(chunks, outputs, self._options.include_usage)
        parts += await beside(num_scores, lambda: [*map(self._event, chunks)])
        if parts:
            body = b"".join(parts)
            self._note_sent()
            await send({"type": "http.response.body", "body": body, "more_body": True})

    def _frame(self, index: int, text: str) -> bytes:
        """The event of a chunk that is nothing but text: all of it but the text stays the same."""
        frame = self._frames.get(index)
        if frame is None:
            (chunk,) = self._shape.chunks(Delta(index=index, text=BLANK))
            before, after = self._shape.encode(chunk).split(BLANKED)
            frame = self._frames[index] = (before, after)
        return frame[0] + _quote(text).encode() + frame[1]


def too_late() -> ProblemError:
    return ProblemError(408, "the request reached its deadline", code="deadline_exceeded")


async def _last_words(send: Send, body: bytes) -> None:
    try:
        async with asyncio.timeout(LAST_WORDS_SECONDS):
            await send({"type": "http.response.body", "body": body})
    except TimeoutError:
        pass  # it does not read; the connection closes with the request


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def beside(num_scores: int, work: Callable[[], T]) -> T:
    """What the work gives; where it is long, the other requests go on meanwhile."""
    if num_scores < MANY:
        return work()

    def run() -> T:
        with without_collector():  # all that is made is kept: looking for garbage triples the time
            return work()

    return await asyncio.to_thread(run)


def scores_in(output: RequestOutput) -> int:
    """How many log-probabilities a request's answers and prompt have."""
    found = count(output.prompt_logprobs or ())
    return found + sum(count(choice.logprobs or ()) for choice in output.outputs)


def count(entries: Iterable[Sized | None]) -> int:
    return sum(len(entry) for entry in entries if entry is not None)
