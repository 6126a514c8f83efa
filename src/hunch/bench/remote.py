"""Runs a load on a server that speaks OpenAI's API: hunch, vLLM, SGLang, llama.cpp, any other.

One event loop and plain sockets: a client that is slow itself would measure itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

from hunch.bench.environment import cpu_seconds
from hunch.bench.loads import Job, Load, next_turn, nobody
from hunch.bench.records import Answer, Round
from hunch.errors import RequestError

SECONDS = 600.0  # without a byte from the server before a request fails
MAX_LINE = 2**22
KEY = "OPENAI_API_KEY"
OnAnswer = Callable[[str, Any], None]


class UrlSubject:
    """A server. Figures that only it knows (passes, drafts) are there for hunch alone."""

    def __init__(
        self, name: str, url: str, model: str | None = None, pid: int | None = None, **extra: Any
    ) -> None:
        self.name, self.pid = name, pid  # of a server on this machine
        self.server = _Server(url)
        self.model = model or self.server.first_model()
        self.extra = extra  # further fields of every body, say ignore_eos

    def warm(self, jobs: Sequence[Job], load: Load) -> None:
        del load
        job = min(jobs, key=lambda j: len(json.dumps(j.body)))
        for _ in range(2):
            asyncio.run(self._one(job, 0.0, perf_counter(), max_tokens=8))

    def drive(self, jobs: Sequence[Job], load: Load, on_answer: OnAnswer = nobody) -> Round:
        del on_answer  # texts are not kept
        before = None if self.pid is None else cpu_seconds(self.pid)
        found = asyncio.run(self._drive(jobs, load))
        after = None if self.pid is None else cpu_seconds(self.pid)
        if before is not None and after is not None:
            found.counts["cpu_seconds"] = after - before
        return found

    def close(self) -> None:
        pass

    async def _drive(self, jobs: Sequence[Job], load: Load) -> Round:
        began = perf_counter()
        places = asyncio.Semaphore(load.concurrency or len(jobs))

        async def at(place: int, due: float) -> list[Answer]:
            if load.rate is not None:
                await asyncio.sleep(max(0.0, due - (perf_counter() - began)))
            async with places:
                start = due if load.rate is not None else perf_counter() - began
                answers = await self._conversation(jobs[place], start, began)
            for answer in answers:
                answer.is_warmup = place < load.num_warmup
            return answers

        moments = enumerate(load.arrivals(len(jobs)))
        found = await asyncio.gather(*(at(place, due) for place, due in moments))
        return Round(perf_counter() - began, [answer for some in found for answer in some])

    async def _conversation(self, job: Job, start: float, began: float) -> list[Answer]:
        """A request, and what is asked after its answer, up to a turn that fails."""
        answers: list[Answer] = []
        asked: Job | None = job
        while asked is not None:
            answer, text = await self._one(asked, start, began)
            answers.append(answer)
            asked = next_turn(asked, text) if answer.error is None else None
            start = perf_counter() - began
        return answers

    async def _one(
        self, job: Job, start: float, began: float, max_tokens: int | None = None
    ) -> tuple[Answer, str]:
        """An answer and its text. A request that fails has an error; the measurement goes on."""
        seen = _Seen()
        try:
            async for event in self.server.stream(job.body, self._fields(job, max_tokens)):
                seen.take(event)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, ValueError) as error:
            seen.error = f"{type(error).__name__}: {error}"
        except RequestError as error:
            seen.error = str(error)
        return seen.answer(job, start, perf_counter() - began, began), "".join(seen.content)

    def _fields(self, job: Job, max_tokens: int | None) -> dict[str, Any]:
        params = job.params
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": params.temperature,
            "max_tokens": max_tokens or params.max_tokens,
        }
        if params.top_p != 1.0:
            fields["top_p"] = params.top_p
        if params.seed is not None:
            fields["seed"] = params.seed
        if params.ignore_eos:
            fields["ignore_eos"] = True
        return fields | self.extra


class _Seen:
    """The result of one request."""

    def __init__(self) -> None:
        self.moments: list[float] = []
        self.text = hashlib.sha256()
        self.content: list[str] = []  # the text without the model's reasoning
        self.usage: dict[str, Any] = {}
        self.stats: dict[str, Any] = {}
        self.error: str | None = None

    def take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            error = event["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        self.usage = event.get("usage") or self.usage
        self.stats = (event.get("hunch") or {}).get("stats") or self.stats
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            content = choice.get("text") or delta.get("content")
            piece = content or delta.get("reasoning_content")
            if content:
                self.content.append(content)
            if piece:
                self.text.update(piece.encode())
                self.moments.append(perf_counter())

    def answer(self, job: Job, start: float, end: float, began: float) -> Answer:
        first = self.moments[0] - began if self.moments else None
        last = self.moments[-1] - began if self.moments else end
        error = self.error
        if error is None and not self.moments:
            error = "the answer was empty"
        return Answer(
            id=job.answer_id,
            category=job.category,
            num_prompt_tokens=self.usage.get("prompt_tokens", len(job.token_ids)),
            num_tokens=self.usage.get("completion_tokens", len(self.moments)),
            start=start,
            first_token=None if first is None else first - start,
            end_to_end=last - start,
            digest=self.text.hexdigest()[:16],
            gaps=[b - a for a, b in zip(self.moments, self.moments[1:], strict=False)],
            num_passes=self.stats.get("steps"),
            drafted=self.stats.get("drafted"),
            accepted=self.stats.get("accepted"),
            error=error,
        )


class _Server:
    """An address, and HTTP/1.1 as far as streaming an answer needs it."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:  # an invalid port, or an open bracket
            host = None
        if not host or parts.scheme not in ("http", "https"):
            raise RequestError(f"--url {url!r}: give the server's address, say http://host:8000")
        self.host, self.is_tls = host, parts.scheme == "https"
        self.port = port or (443 if self.is_tls else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = url

    def first_model(self) -> str:
        try:
            found = json.loads(asyncio.run(self._get("/v1/models")))
            return str(found["data"][0]["id"])
        except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
            raise RequestError(f"no answer from {self.url}: {error}") from None
        except (KeyError, IndexError, TypeError, ValueError):
            raise RequestError(f"{self.url} lists no model: give --served-model") from None

    async def _get(self, path: str) -> str:
        return "".join([line async for line in self._lines("GET", path, b"")])

    async def stream(
        self, body: dict[str, Any], fields: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        """The events of one streamed answer."""
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        data = json.dumps({**body, **fields}).encode()
        async for line in self._lines("POST", path, data):
            if line.startswith("data:") and "[DONE]" not in line:
                event = json.loads(line[5:])
                if isinstance(event, dict):
                    yield event

    async def _lines(self, method: str, path: str, data: bytes) -> AsyncIterator[str]:
        tls = ssl.create_default_context() if self.is_tls else None
        opened = asyncio.open_connection(self.host, self.port, ssl=tls, limit=MAX_LINE)
        reader, writer = await asyncio.wait_for(opened, 30)
        try:
            key = os.environ.get(KEY)
            writer.write(
                f"{method} {self.path}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
                f"Connection: close\r\nContent-Type: application/json\r\n"
                f"{f'Authorization: Bearer {key}' + chr(13) + chr(10) if key else ''}"
                f"Content-Length: {len(data)}\r\n\r\n".encode()
                + data
            )
            await writer.drain()
            status, is_chunked = await _head(reader)
            held = b""
            async for piece in _pieces(reader, is_chunked):
                *lines, held = (held + piece).split(b"\n")
                if status != 200:
                    held = b"\n".join([*lines, held])[:2000]
                    continue
                for line in lines:
                    yield line.decode("utf-8", "replace").strip()
            if status != 200:
                raise RequestError(f"HTTP {status}: {held.decode('utf-8', 'replace')[:300]}")
            if held:
                yield held.decode("utf-8", "replace").strip()
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body comes in chunks."""
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), SECONDS)
    first, *rest = head.decode("latin-1").split("\r\n")
    words = first.split()
    if len(words) < 2 or not words[1].isdigit():
        raise ValueError(f"not an HTTP answer: {first[:80]!r}")
    fields = dict(line.lower().split(":", 1) for line in rest if ":" in line)
    return int(words[1]), "chunked" in fields.get("transfer-encoding", "")


async def _pieces(reader: asyncio.StreamReader, is_chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes."""
    while True:
        if not is_chunked:
            piece = await asyncio.wait_for(reader.read(1 << 16), SECONDS)
            if not piece:
                return
            yield piece
            continue
        size = int((await asyncio.wait_for(reader.readline(), SECONDS)).split(b";")[0] or b"0", 16)
        if not size:
            return
        yield await asyncio.wait_for(reader.readexactly(size), SECONDS)
        await reader.readexactly(2)
