"""Clients that break off, dawdle or make no sense, and what they must be answered."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from server.fake_engine import expected_text

COMPLETE = "/v1/completions"
JSON = "Content-Type: application/json\r\n"
BAD_BODIES = {
    "no JSON": b'{"prompt": "x"',
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "deep": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"a":' * 20_000 + b"1" + b"}" * 20_000,
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "top_p": Infinity}',
    "huge number": b'{"prompt": "x", "max_tokens": 1e999}',
    "many digits": b'{"prompt": "x", "seed": ' + b"9" * 10_000 + b"}",
    "a list": b"[]",
    "a word": b"null",
    "nothing": b"",
    "half of a pair": b'{"prompt": "\\ud800"}',
    "a zero byte": b'{"prompt": "x"}\x00',
}
BAD_HEADS = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),
    "unknown method": b"FETCH /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "negative length": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Length: -5\r\n\r\n",
    "length of letters": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Length: abc\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
    b"Content-Length: 6\r\n\r\nhello!",
    "wrong chunk": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "large headers": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 200_000,
}


def post(body: bytes, *, length: int | None = None, more: str = "") -> bytes:
    size = len(body) if length is None else length
    head = (
        f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\n{JSON}{more}Content-Length: {size}\r\n\r\n"
    )
    return head.encode() + body


def wish(number: int, count: int, **fields: Any) -> bytes:
    body = {"prompt": f"client {number}", "seed": number, "max_tokens": count, **fields}
    return json.dumps(body).encode()


class Crowd:
    """Broken clients of one server; what goes wrong is kept as a sentence each."""

    def __init__(self, port: int, seed: int = 0, pause: float = 1.0) -> None:
        """`pause`: seconds, the longer the more of them are open at a time."""
        self.port = port
        self.pause = pause
        self.chance = random.Random(seed)
        self.problems: list[str] = []
        self.counts: dict[str, int] = {}
        self.kinds: dict[str, Callable[[], Awaitable[None]]] = {
            "resets": self.resets,
            "half closes": self.half_closes,
            "reads slowly": self.reads_slowly,
            "sends slowly": self.sends_slowly,
            "sends no end": self.sends_no_end,
            "pipelines": self.pipelines,
            "bad body": self.bad_body,
            "bad head": self.bad_head,
            "repeats keys": self.repeats_keys,
            "leaves at once": self.leaves_at_once,
            "waits to be told": self.waits_to_be_told,
            "upgrades": self.upgrades,
        }

    async def one(self, kind: str) -> None:
        """One client of a kind; a server may close a connection at any time, but not hang."""
        try:
            await asyncio.wait_for(self.kinds[kind](), 300)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        except TimeoutError:
            self.problems.append(f"{kind}: no end after 300 s")
        self.counts[kind] = self.counts.get(kind, 0) + 1

    async def any(self) -> None:
        await self.one(self.chance.choice(sorted(self.kinds)))

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 22)

    def expect(self, kind: str, said: bytes, *starts: bytes) -> None:
        if said and not said.startswith(starts):
            self.problems.append(f"{kind}: {said[:200]!r}")

    # --- kinds ----------------------------------------------------------------------------------

    async def resets(self) -> None:
        reader, writer = await self.open()
        writer.write(post(wish(1, 200, stream=True, n=self.chance.randint(1, 3))))
        await reader.read(self.chance.randint(1, 3000))
        _reset(writer)

    async def half_closes(self) -> None:
        reader, writer = await self.open()
        writer.write(post(wish(2, 50, stream=self.chance.random() < 0.5)))
        await writer.drain()
        writer.write_eof()
        said = await reader.read()
        self.expect("half closes", said, b"HTTP/1.1 200 ")
        writer.close()

    async def reads_slowly(self) -> None:
        reader, writer = await self.open()
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        writer.write(post(wish(3, 400, stream=True, n=4)))
        for _ in range(self.chance.randint(1, 8)):
            await reader.readexactly(1)
            await asyncio.sleep(self.pause)
        _reset(writer) if self.chance.random() < 0.5 else writer.close()

    async def sends_slowly(self) -> None:
        reader, writer = await self.open()
        data = post(wish(4, 20), more="Connection: close\r\n")
        size = len(data) // 40 + 1
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            await asyncio.sleep(0.02)  # its headers have 20 s, on a slow machine too
        said = await reader.read()
        self.check_text("sends slowly", said, 4, 20)
        writer.close()

    async def sends_no_end(self) -> None:
        _, writer = await self.open()
        body = wish(5, 20)
        chunked = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\n{JSON}"
        chunked += f"Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n"
        data = self.chance.choice([post(body, length=len(body) + 100), chunked.encode() + body])
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(self.chance.random() * 5 * self.pause)
        _reset(writer) if self.chance.random() < 0.5 else writer.close()

    async def pipelines(self) -> None:
        reader, writer = await self.open()
        for number in range(6, 10):
            more = "Connection: close\r\n" if number == 9 else ""
            writer.write(post(wish(number, 15), more=more))
        said = await reader.read()
        answers = said.split(b"HTTP/1.1 ")[1:]
        if len(answers) != 4:
            self.problems.append(f"pipelines: {len(answers)} answers of 4")
        for number, answer in enumerate(answers, 6):
            self.check_text("pipelines", b"HTTP/1.1 " + answer, number, 15)
        writer.close()

    async def bad_body(self, name: str = "") -> None:
        name = name or self.chance.choice(sorted(BAD_BODIES))
        reader, writer = await self.open()
        writer.write(post(BAD_BODIES[name], more="Connection: close\r\n"))
        self.expect(f"bad body, {name}", await reader.read(), b"HTTP/1.1 400 ", b"HTTP/1.1 413 ")
        writer.close()

    async def bad_head(self, name: str = "") -> None:
        name = name or self.chance.choice(sorted(BAD_HEADS))
        reader, writer = await self.open()
        writer.write(BAD_HEADS[name])
        said = await asyncio.wait_for(reader.read(200), 300)
        self.expect(f"bad head, {name}", said, b"HTTP/1.1 4")
        writer.close()

    async def repeats_keys(self) -> None:
        reader, writer = await self.open()
        body = b'{"prompt": "wrong", "seed": 1, "max_tokens": 400, ' + wish(11, 15)[1:]
        writer.write(post(body, more="Connection: close\r\n"))
        self.check_text("repeats keys", await reader.read(), 11, 15)
        writer.close()

    async def leaves_at_once(self) -> None:
        _, writer = await self.open()
        writer.write(post(wish(12, 300)))
        await writer.drain()
        _reset(writer)

    async def waits_to_be_told(self) -> None:
        """Sends its body only when the server says so, as curl does with a large one."""
        reader, writer = await self.open()
        data = post(wish(13, 15), more="Expect: 100-continue\r\nConnection: close\r\n")
        head, _, body = data.partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        said = await reader.readuntil(b"\r\n\r\n")
        self.expect("waits to be told", said, b"HTTP/1.1 100 ")
        writer.write(body)
        self.check_text("waits to be told", await reader.read(), 13, 15)
        writer.close()

    async def upgrades(self) -> None:
        reader, writer = await self.open()
        more = "Connection: Upgrade, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
        writer.write(post(wish(14, 15), more=more))
        said = await asyncio.wait_for(reader.read(100), 300)
        self.expect("upgrades", said, b"HTTP/1.1 200 ")
        writer.close()

    # --- good ones ------------------------------------------------------------------------------

    async def good(self, number: int) -> None:
        """A client that must always be answered with the right text."""
        count = self.chance.randint(5, 120)
        is_streamed = self.chance.random() < 0.5
        reader, writer = await self.open()
        data = wish(number, count, stream=is_streamed)
        writer.write(post(data, more="Connection: close\r\n"))
        try:
            said = await asyncio.wait_for(reader.read(), 300)
        except (ConnectionError, TimeoutError) as error:
            self.problems.append(f"good client: {error!r}")
            return
        finally:
            writer.close()
        self.check_text("good client", said, number, count)
        self.counts["good"] = self.counts.get("good", 0) + 1

    def check_text(self, kind: str, said: bytes, number: int, count: int) -> None:
        head, _, body = said.partition(b"\r\n\r\n")
        text = ""
        if b"text/event-stream" in head:
            lines = [line for line in body.split(b"\n") if line.startswith(b"data: {")]
            text = "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)
        elif head.startswith(b"HTTP/1.1 200 "):
            text = json.loads(body)["choices"][0]["text"]
        if text != expected_text(f"client {number}", number, count):
            self.problems.append(f"{kind}: {said[:300]!r}")


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a reset in place of an orderly end."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


def held(pids: list[int]) -> dict[str, int]:
    """What these processes hold: files, threads and kilobytes."""
    total = {"files": 0, "threads": 0, "kilobytes": 0}
    for pid in pids:
        total["files"] += len(list(Path(f"/proc/{pid}/fd").iterdir()))
        total["threads"] += len(list(Path(f"/proc/{pid}/task").iterdir()))
        status = Path(f"/proc/{pid}/status").read_text()
        total["kilobytes"] += int(status.partition("VmRSS:")[2].split()[0])
    return total


async def besiege(crowd: Crowd, seconds: float, num_clients: int = 24, num_idle: int = 300) -> None:
    """Broken clients and good ones for a while, with many connections that do nothing."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    idle = [await crowd.open() for _ in range(num_idle)]

    async def broken() -> None:
        while loop.time() < end:
            await crowd.any()

    async def good(number: int) -> None:
        while loop.time() < end:
            await crowd.good(number)
            await asyncio.sleep(0.05)

    await asyncio.gather(*(broken() for _ in range(num_clients)), good(100), good(101))
    for _, writer in idle:
        writer.close()
