"""What every request passes first: its id, its key, its size, and whether the server is leaving."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hunch.server import logs
from hunch.server.problems import OLLAMA, ProblemError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

# Where a stream finds the server's own `send`: what comes after the headers passes nobody else's
# hands, and a token's event is not handed through every layer of the application.
BODY_SEND = "hunch.send"
BODY_WRITER = "hunch.writer"  # the connection's own, where it has one
ARRIVAL = "arrival"  # in the state of a request: when it came, by the event loop's clock
BODY_SECONDS = 30.0  # how long a client may take to send its body
DISCARDED_BYTES = 32 << 20  # that are read of a body which is refused
DISCARD_SECONDS = 5.0
IS_READ = "hunch.body_is_read"
CHUNK_BYTES = 1 << 16  # of a body that is looked through
FROM_PAGES = frozenset({b"origin", b"sec-fetch-site"})  # what browsers send with a page's requests
HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"))
QUIET = frozenset({"/health", "/ready", "/metrics", "/stats"})  # polled; not worth a line each
# Escapes of the first half of a pair without the second, or the other way round.
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_HALF = re.compile(b"%b(?!%b)|(?<!%b)%b" % (_HIGH, _LOW, _HIGH, _LOW))
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[{,:'))
# A body of millions of tiny values costs a hundred times its size once it is read. What is counted,
# by the marks it shows by, and the bytes of the largest body that are allowed for each of them.
_COUNTED = {b",": ("values", 16), b"[{": ("objects and lists", 64), b":": ("named values", 64)}


class Keys:
    """API keys, compared in constant time and kept as digests."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, header: str) -> bool:
        """Whether an Authorization header carries one of the keys."""
        scheme, _, key = header.partition(" ")
        given = _digest(key.strip())
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return scheme.lower() == "bearer" and any(matches)


@dataclass(eq=False, repr=False)
class Guard:
    """ASGI middleware around the whole application."""

    app: App
    keys: Keys
    public_paths: frozenset[str]
    body_paths: frozenset[str]
    max_body_bytes: int
    hosts: frozenset[str] | None  # names it may be called by, besides addresses; None: any
    is_draining: Callable[[], bool]
    answered: Callable[[str, int, float], None]
    paths: frozenset[str]
    mount: str  # what a proxy may put before every path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        scope["path"] = self._known(scope["path"])
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state[ARRIVAL] = asyncio.get_running_loop().time()
        scope[BODY_SEND] = send
        token = logs.request_id.set(request_id)
        start = time.monotonic()
        status = 499  # what is logged if the client leaves before an answer begins

        async def send_marked(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                marks = [(b"x-request-id", request_id.encode()), *HEADERS]
                message = {**message, "headers": [*message.get("headers", ()), *marks]}
            await send(message)

        try:
            checked = await self._check(scope, headers, receive)
            state[IS_READ] = True  # or it is the app's to read
            await self.app(scope, checked, send_marked)
        except ProblemError as problem:
            if scope["method"] == "POST" and not state.get(IS_READ) and problem.status != 408:
                await self._discard(headers, receive)
            body = json.dumps(problem.body(scope["path"])).encode()
            extra = {"content-type": "application/json", "connection": "close"}
            pairs = {**extra, **problem.headers(), "content-length": str(len(body))}
            raw = [(name.lower().encode(), value.encode()) for name, value in pairs.items()]
            begin = {"type": "http.response.start", "status": problem.status, "headers": raw}
            await send_marked(begin)
            await send({"type": "http.response.body", "body": body})
        finally:
            seconds = time.monotonic() - start
            self.answered(scope["path"], status, seconds)
            level = logging.DEBUG if scope["path"] in QUIET and status < 400 else logging.INFO
            path = scope["path"][:200]
            logs.event(
                level, "http", method=scope["method"], path=path, status=status, seconds=seconds
            )
            logs.request_id.reset(token)

    def _known(self, path: str) -> str:
        """A path by its own name, without what a proxy left before it and a slash after it."""
        if path.startswith(f"{self.mount}/") and path not in self.paths:
            path = path.removeprefix(self.mount)
        bare = path.rstrip("/")
        return bare if bare in self.paths else path

    async def _check(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> Receive:
        path = scope["path"]
        if self.hosts is not None:
            _check_host(headers.get(b"host", b"").decode("latin-1"), self.hosts)
        if self.keys and path not in self.public_paths:
            self._check_key(headers)
        if scope["method"] != "POST" or path not in self.body_paths:
            return receive
        if self.is_draining():
            raise ProblemError(
                503, "the server is shutting down", code="shutting_down", retry_after=5
            )
        media_type = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip()
        if media_type.lower() != "application/json":
            # Ollama's own examples name no type; web sites always say that they ask.
            if not path.startswith(OLLAMA) or headers.keys() & FROM_PAGES:
                raise ProblemError(415, "send the body with 'Content-Type: application/json'")
            others = [pair for pair in scope["headers"] if pair[0] != b"content-type"]
            scope["headers"] = [*others, (b"content-type", b"application/json")]
        if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
            raise ProblemError(415, "send the body as it is, without a Content-Encoding")
        body = await self._read(headers, receive)
        scope["state"][IS_READ] = True
        check_values(body, self.max_body_bytes)
        check_characters(body)
        return replay({"type": "http.request", "body": body, "more_body": False}, receive)

    def _check_key(self, headers: dict[bytes, bytes]) -> None:
        given = [headers.get(b"authorization", b"").decode("latin-1")]
        if b"x-api-key" in headers:  # as Anthropic's clients send it
            given.append(f"Bearer {headers[b'x-api-key'].decode('latin-1')}")
        if any(self.keys.admit(header) for header in given):
            return
        message = "this server needs an API key"
        if any(given):
            message += ", and what was sent is none of its keys"
        message += ": send 'Authorization: Bearer KEY'"
        raise ProblemError(401, message, code="invalid_api_key")

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ProblemError(400, "the client left before its body was complete")
                    body += message.get("body", b"")
                    if len(body) > self.max_body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            message_text = f"the body took longer than {BODY_SECONDS:.0f} s"
            raise ProblemError(408, message_text, code="timeout") from None

    async def _discard(self, headers: dict[bytes, bytes], receive: Receive) -> None:
        """Read on, within limits: who still writes when the connection closes sees no answer."""
        if b"expect" in headers:  # it waits for a word before it sends the body
            return
        left = DISCARDED_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(DISCARD_SECONDS):
                while left > 0:
                    message = await receive()
                    left -= len(message.get("body", b""))
                    if not message.get("more_body", False):  # all of it, or the client is gone
                        return

    def _too_large(self) -> ProblemError:
        return ProblemError(
            413, f"the body is larger than {self.max_body_bytes} bytes", code="limit_exceeded"
        )


def replay(message: MutableMapping[str, Any], receive: Receive) -> Receive:
    """A message that was received already; after it, whatever the connection says."""
    is_given = False

    async def receive_again() -> MutableMapping[str, Any]:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return message

    return receive_again


def check_values(body: bytes, max_bytes: int) -> None:
    """Refuse a body of more values than any request has use for, before it is parsed.

    Counts commas, colons and opening brackets outside of strings. A pair of quotes side by side can
    be dropped without a look: whatever stands before or after it is as much in a string as it was.
    """
    limits = {marks: max_bytes // size for marks, (_, size) in _COUNTED.items()}
    if all(_count(body, marks) <= most for marks, most in limits.items()):
        return  # not even if all of them were structure
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = text.translate(None, _NOT_STRUCTURE).replace(b'""', b"")
    counts, is_inside = dict.fromkeys(limits, 0), False
    for first in range(0, len(text), CHUNK_BYTES):  # all at once would take twenty times its size
        parts = text[first : first + CHUNK_BYTES].split(b'"')
        outside = b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        for marks, most in limits.items():
            counts[marks] += _count(outside, marks)
            if counts[marks] > most:
                raise ProblemError(
                    400,
                    f"the body holds {counts[marks]} {_COUNTED[marks][0]} or more; this server "
                    f"allows at most {most}",
                    code="limit_exceeded",
                )


def _count(text: bytes, marks: bytes) -> int:
    return sum(map(text.count, marks))


def _check_host(header: str, hosts: frozenset[str]) -> None:
    """A page of another site whose name leads here would be let in by the browser otherwise."""
    name = header.lower()
    name = name[: name.find("]") + 1] if name.startswith("[") else name.partition(":")[0]
    if not name or name in hosts or name.endswith(".localhost"):
        return
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        raise ProblemError(
            403,
            f"this server is not called {name[:100]!r}: without an API key it answers to localhost "
            "and to addresses alone; start it with --allowed-hosts NAME, or with --api-key",
            code="host_not_allowed",
        ) from None


def check_characters(body: bytes) -> None:
    """Refuse half a character, which JSON can spell and no text can hold, wherever it stands."""
    if b"\\u" in body and _HALF.search(body.replace(b"\\\\", b"  ")):
        raise ProblemError(400, "the body holds half of a surrogate pair")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
