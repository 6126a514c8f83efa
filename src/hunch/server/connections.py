"""Connections: how many, how long one may take over its headers, and how large these may be.

uvicorn's protocol counts none of it: a client could open connections until the process has no more
files, keep them half open for ever, or send headers until the memory is full, all before its key
is looked at.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

from hunch.server.guard import BODY_WRITER
from hunch.server.problems import ProblemError

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ImportError:  # it has no wheel for every platform
    HttpToolsProtocol = None  # type: ignore[misc, assignment]

MAX_HEADER_BYTES = 64 * 1024  # the request line and all headers
MAX_HEADERS = 128
PIECE = 8192  # headers are read in pieces of this size
HEADER_SECONDS = 20.0  # from the first byte, or from connecting, to the end of the headers
# nginx keeps connections to its upstream for 60 s: whoever waits longer never closes one that the
# other side is about to use.
KEEP_ALIVE_SECONDS = 75
_UPGRADE = re.compile(rb"\r\nUpgrade(?=[ \t]*:)", re.IGNORECASE)


def protocol(max_connections: int) -> type[asyncio.Protocol] | str:
    """uvicorn's protocol with limits; h11's, which limits headers itself, where there is no other.

    Without httptools nothing limits connections: `docs/serving.md` says so.
    """
    if HttpToolsProtocol is None:
        return "h11"
    return type("LimitedProtocol", (_Limited,), {"limit": max_connections})


class _Limited(HttpToolsProtocol if HttpToolsProtocol is not None else object):  # type: ignore[misc]
    """One connection. Between two requests uvicorn's own timer decides how long it may idle."""

    limit: int  # connections at once
    _deadline: asyncio.TimerHandle | None = None
    _num_bytes = 0  # of headers that are not complete; -1 while a body is read

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limit:
            message = f"this server takes {self.limit} connections at once; try again later"
            code = "too_many_connections"
            self._refuse(ProblemError(503, message, code=code, retry_after=1))
        else:
            self._expect_headers()

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            if self._num_bytes < 0:  # a body; the application decides how much of it is read
                super().data_received(data)
                return
            if self._deadline is None:  # a further request of a connection that was kept
                self._expect_headers()
            piece, data = data[:PIECE], data[PIECE:]
            self._num_bytes += len(piece)
            if self._num_bytes > MAX_HEADER_BYTES:
                self._refuse(_too_large())
                return
            super().data_received(_as_http_1(piece))

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) < MAX_HEADERS:
            super().on_header(name, value)
        elif not self.transport.is_closing():
            self._refuse(_too_large())

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._num_bytes = -1
        if not self.transport.is_closing():
            super().on_headers_complete()
            self.scope[BODY_WRITER] = BodyWriter(self)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        if self.cycle is not None:
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        if self.cycle is not None:
            super().on_body(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        self._deadline = self.loop.call_later(HEADER_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, problem: ProblemError) -> None:
        self._stop_timer()
        self.transport.write(_raw(problem))
        self.transport.close()


class BodyWriter:
    """Writes parts of a streamed body at once, while the client keeps up: no task has to wait."""

    def __init__(self, connection: Any) -> None:
        self._cycle = connection.cycle  # of this request; the connection may have others later
        self._flow = connection.flow
        self._transport = connection.transport

    def is_ready(self) -> bool:
        """Whether the answer has begun and the client reads it."""
        is_slow = self._flow.write_paused or self._transport.is_closing()
        return bool(self._cycle.chunked_encoding) and not is_slow

    def write(self, body: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def _as_http_1(piece: bytes) -> bytes:
    """Headers, as long as before, without the offer of another protocol, which a server may ignore.

    Java's client offers HTTP/2 with every request, and the parser would leave out its body.
    """
    head, end, body = piece.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\r\nIgnored", head) + end + body


def _too_large() -> ProblemError:
    message = f"the headers are more than {MAX_HEADERS} or larger than {MAX_HEADER_BYTES} bytes"
    return ProblemError(431, message, code="limit_exceeded")


_REASONS = {431: "Request Header Fields Too Large", 503: "Service Unavailable"}


def _raw(problem: ProblemError) -> bytes:
    """A whole answer, for where no application is asked."""
    body = json.dumps(problem.body()).encode()
    headers: dict[str, Any] = {
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
        **problem.headers(),
    }
    lines = [f"HTTP/1.1 {problem.status} {_REASONS[problem.status]}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
