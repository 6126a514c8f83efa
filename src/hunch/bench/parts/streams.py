"""Streams at once against a running server: tokens per second, first tokens, gaps between events.

Clients are several processes, as a single one would be the bottleneck. Every number of streams is
run once, for a short time, before it is measured.

    hunch serve --workers 4 --max-num-seqs 512 &
    hunch bench part streams --url http://127.0.0.1:8000 --streams 1 16 64 200 500
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

from hunch.bench.parts import PartOptions
from hunch.errors import EngineError

NAME = "hunch.bench.parts.streams"
TOPICS = ("the sea", "a clock", "two friends", "an old map", "winter", "a train", "bread", "rain")
TOKENS = {1: 300, 16: 600, 64: 800, 200: 800}  # of each stream; for more streams, MANY
MANY = 400
WARM_TOKENS = 40
START_SECONDS = 1.0  # until all clients begin


def request_of(host: str, number: int, num_tokens: int) -> bytes:
    topic = TOPICS[number % len(TOPICS)]
    body = json.dumps(
        {
            "prompt": f"A short story about {topic}, number {number}. Once upon a time",
            "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "seed": number,
            "temperature": 0.7,
        }
    ).encode()  # fmt: skip
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def read_one(
    host: str, port: int, request: bytes, firsts: array[float], gaps: array[float]
) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    began = time.perf_counter()
    writer.write(request)
    last, tail = 0.0, b""
    while data := await reader.read(1 << 16):
        now, tail = time.perf_counter(), (tail + data)[-40:]
        if last:
            gaps.append(now - last)
        elif b"data:" not in data:
            continue  # the headers alone
        else:
            firsts.append(now - began)
        last = now
    assert b"[DONE]" in tail, "a stream broke off"
    writer.close()


async def read_all(
    host: str, port: int, requests: Sequence[bytes]
) -> tuple[array[float], array[float]]:
    """When each stream's first token came, and the gaps between arrivals of the same stream."""
    firsts, gaps = array("d"), array("d")
    await asyncio.gather(*(read_one(host, port, one, firsts, gaps) for one in requests))
    return firsts, gaps


def client(words: Sequence[str]) -> None:
    """A process of clients: reports when its streams began and ended, and what they received."""
    host, port, first, count, num_tokens = words[0], *map(int, words[1:5])
    requests = [request_of(host, first + number, num_tokens) for number in range(count)]
    time.sleep(max(0.0, float(words[5]) - time.time()))
    firsts, gaps = asyncio.run(read_all(host, port, requests))
    print(json.dumps({"end": time.time(), "firsts": firsts.tolist(), "gaps": gaps.tolist()}))


def wait_ready(url: str, seconds: float) -> None:
    """Until the server's model is loaded."""
    end = time.monotonic() + seconds
    while True:
        try:
            with urlopen(f"{url}/ready", timeout=5):
                return
        except OSError as error:
            if time.monotonic() > end:
                raise EngineError(f"{url} is not ready after {seconds:.0f} s: {error}") from None
            time.sleep(0.2)


def open_idle(host: str, port: int, count: int) -> list[socket.socket]:
    """Connections that have sent one request, and stay open."""
    if count:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = []
    for _ in range(count):
        sock = socket.create_connection((host, port))
        sock.sendall(f"GET /health HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")
        found.append(sock)
    return found


def at(values: Sequence[float], share: float) -> float:
    return 1e3 * values[min(len(values) - 1, int(share * len(values)))]


def measure(
    host: str, port: int, num_streams: int, num_tokens: int, num_clients: int
) -> dict[str, Any]:
    start = time.time() + START_SECONDS
    shares = [len(range(one, num_streams, num_clients)) for one in range(num_clients)]
    firsts_of = [sum(shares[:one]) for one in range(num_clients)]
    processes = []
    for first, count in zip(firsts_of, shares, strict=True):
        words = [NAME, host, *map(str, (port, first, count, num_tokens, start))]
        if count:
            command = [sys.executable, "-m", *words]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    found = [json.loads(process.communicate()[0]) for process in processes]
    seconds = max(one["end"] for one in found) - start
    firsts = sorted(value for one in found for value in one["firsts"])
    gaps = sorted(value for one in found for value in one["gaps"])
    return {
        "streams": num_streams,
        "tokens_per_second": round(num_streams * num_tokens / seconds),
        "first_ms": {"p50": round(at(firsts, 0.5), 1), "p99": round(at(firsts, 0.99), 1)},
        "gap_ms": {"p50": round(at(gaps, 0.5), 2), "p99": round(at(gaps, 0.99), 2)},
        "events_per_stream": round(len(gaps) / num_streams),
    }


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("streams", __doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64, 200, 500])
    parser.add_argument("--tokens", type=int, help="of each stream; default: by their number")
    parser.add_argument("--clients", type=int, default=6, help="processes that read")
    parser.add_argument("--idle", type=int, default=0, help="connections that ask for nothing")
    parser.add_argument("--wait", type=float, default=120, help="seconds for the server to load")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args(words)
    place = urlsplit(args.url)
    if place.scheme != "http" or not place.hostname:
        parser.error(f"--url {args.url!r}: give the server's address, say http://host:8000")
    where = place.hostname or "127.0.0.1", place.port or 80
    wait_ready(args.url.rstrip("/"), args.wait)
    idle = open_idle(*where, args.idle)
    for num_streams in args.streams:
        num_tokens = args.tokens or TOKENS.get(num_streams, MANY)
        measure(*where, num_streams, WARM_TOKENS, args.clients)
        for _ in range(args.rounds):
            print(json.dumps(measure(*where, num_streams, num_tokens, args.clients)), flush=True)
    for sock in idle:
        sock.close()


if __name__ == "__main__":  # a process of clients that `measure` begins
    client(sys.argv[1:])
