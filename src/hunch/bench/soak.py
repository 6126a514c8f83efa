"""Soak a server: many streams with cancels, slow readers, malformed bodies and mixed sampling.

Each finished text is compared with the offline text: what `LLM(MODEL, speculate="off")` writes for
the same request. So a lost, doubled or changed token is found.

    hunch serve MODEL --port 8000 --max-queue 1000 &
    hunch bench soak http://127.0.0.1:8000 --model MODEL --pid $! --seconds 60
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from hunch import LLM, SamplingParams
from hunch.bench.environment import processes
from hunch.bench.metrics import percentile

COMPLETE = "/v1/completions"
WINDOW = 15.0  # seconds over which a peak of memory is taken
JSON = {"Content-Type": "application/json"}
BEHAVIOURS = ("polite",) * 6 + ("slow", "leaves", "malformed", "whole")


@dataclass(frozen=True, slots=True)
class Soak:
    """Which server to soak, and for how long."""

    url: str
    model: str  # what the server serves
    seconds: float = 60.0
    warm_up: float = 30.0
    num_streams: int = 200
    num_requests: int = 24  # different ones
    num_tokens: int = 48  # at most, of one
    api_key: str | None = None
    pid: int | None = None  # the server's process: watch its memory and threads


@dataclass
class Tally:
    """The counts of what happened."""

    ends: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    tokens: int = 0

    def count(self, end: str) -> None:
        self.ends[end] = self.ends.get(end, 0) + 1


def make_request(number: int, num_tokens: int) -> dict[str, Any]:
    """The request with this number, on which everything in it depends."""
    chance = random.Random(number)
    topics = ("rain", "bread", "the moon", "a small robot", "prime numbers", "the sea")
    return {
        "prompt": f"{number}. A short text about {chance.choice(topics)}:",
        "max_tokens": chance.randint(4, num_tokens),
        "seed": number,
        "temperature": chance.choice((0.0, 0.0, 0.7, 1.0)),
        "top_p": chance.choice((1.0, 0.9)),
        "top_k": chance.choice((0, 40)),
        "presence_penalty": chance.choice((0.0, 0.5)),
        "speculation": {"mode": chance.choice(("auto", "off"))},
        "ignore_eos": True,
    }


async def read(
    http: httpx.AsyncClient, url: str, body: dict[str, Any], tally: Tally, behaviour: str
) -> str | None:
    """A stream's text; None if this client left early."""
    start, text, is_over = time.monotonic(), "", False
    async with http.stream("POST", url + COMPLETE, json={**body, "stream": True}) as answer:
        if answer.status_code != 200:
            tally.count(f"status {answer.status_code}")
            return None
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                is_over = True
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                tally.wrong.append(f"error in a stream: {chunk['error']['message']}")
                return None
            if not text:
                tally.first_token.append(time.monotonic() - start)
            text += chunk["choices"][0]["text"]
            if behaviour == "leaves" and len(text) > 10:
                return None
            if behaviour == "slow":
                await asyncio.sleep(0.2)
    if not is_over:
        tally.wrong.append("a stream ended without its last event")
    tally.tokens += body["max_tokens"]
    return text


async def client(
    http: httpx.AsyncClient, asked: Soak, known: dict[int, str], number: int, tally: Tally,
    end: float,
) -> None:  # fmt: skip
    """Send requests until the time is over."""
    chance, url = random.Random(number), asked.url
    while time.monotonic() < end:
        which = chance.choice(list(known))
        body = make_request(which, asked.num_tokens)
        behaviour = chance.choice(BEHAVIOURS)
        if behaviour == "malformed":
            answer = await http.post(url + COMPLETE, content=b'{"prompt": [', headers=JSON)
            if answer.status_code != 400:
                tally.wrong.append(f"a malformed body got {answer.status_code}")
        elif behaviour == "whole":
            answer = await http.post(url + COMPLETE, json=body)
            if answer.json()["choices"][0]["text"] != known[which]:
                tally.wrong.append(f"request {which} got another text")
        else:
            text = await read(http, url, body, tally, behaviour)
            if text is not None and text != known[which]:
                tally.wrong.append(f"request {which} got another text")
        tally.count(behaviour)


def offline_texts(model: str, num_requests: int, num_tokens: int) -> dict[int, str]:
    """What each request's text must be."""
    bodies = [make_request(number, num_tokens) for number in range(num_requests)]
    prompts = [body.pop("prompt") for body in bodies]
    for body in bodies:
        del body["speculation"]
    with LLM(model, speculate="off", max_model_len=512) as llm:
        outputs = llm.generate(prompts, [SamplingParams(**body) for body in bodies])
    return {number: output.outputs[0].text for number, output in enumerate(outputs)}


def num_threads(pid: int | None) -> int:
    family = [] if pid is None else processes(pid)
    return sum(len(os.listdir(f"/proc/{one}/task")) for one in family)


async def watch_memory(pid: int | None, samples: list[tuple[float, int]]) -> None:
    """Note the time and the resident bytes, several times a second."""
    pids = [] if pid is None else processes(pid)
    while pids:
        num_pages = 0
        for one in pids:
            with open(f"/proc/{one}/statm") as file:
                num_pages += int(file.read().split()[1])
        samples.append((time.monotonic(), num_pages * os.sysconf("SC_PAGE_SIZE")))
        await asyncio.sleep(0.2)


def peak(samples: list[tuple[float, int]], since: float, until: float) -> int:
    return max(size for moment, size in samples if since <= moment <= until)


async def soak(asked: Soak) -> dict[str, Any]:
    """Soak the server; the report's "is_clean" says whether all is as it was before."""
    limits = httpx.Limits(max_connections=None)
    headers = {"Authorization": f"Bearer {asked.api_key}"} if asked.api_key else {}
    async with httpx.AsyncClient(timeout=600, limits=limits, headers=headers) as http:
        tally = Tally()
        known = offline_texts(asked.model, asked.num_requests, asked.num_tokens)
        memory: list[tuple[float, int]] = []
        watch = asyncio.create_task(watch_memory(asked.pid, memory))
        await crowd(http, asked, known, Tally(), time.monotonic() + asked.warm_up)
        threads_before = num_threads(asked.pid)
        start = time.monotonic()
        await crowd(http, asked, known, tally, start + asked.seconds)
        end = time.monotonic()
        watch.cancel()
        left = await settle(http, asked.url)
        thread_growth = num_threads(asked.pid) - threads_before
    seconds = end - start
    report: dict[str, Any] = {
        "seconds": round(seconds, 1),
        "streams": asked.num_streams,
        "ends": tally.ends,
        "wrong": len(tally.wrong),
        "first_wrong": tally.wrong[:5],
        "tokens_per_second": round(tally.tokens / seconds, 1),
        "first_token_ms": {
            f"p{p}": round(1000 * (percentile(tally.first_token, p) or 0.0), 1)
            for p in (50, 95, 99)
        },
        "left_behind": left,
    }
    if asked.pid is not None:
        # Peaks, as a step's own buffers come and go.
        warm, last = peak(memory, start - WINDOW, start), peak(memory, end - WINDOW, end)
        report["memory_mb"] = [round(size / 1e6) for size in (warm, last)]
        report["memory_growth"] = round(last / warm - 1, 4)
        report["thread_growth"] = thread_growth
    is_clean = not tally.wrong and not any(left.values()) and report.get("thread_growth", 0) <= 0
    report["is_clean"] = is_clean and report.get("memory_growth", 0) <= 0.05
    return report


async def crowd(
    http: httpx.AsyncClient, asked: Soak, known: dict[int, str], tally: Tally, end: float
) -> None:
    jobs = [client(http, asked, known, n, tally, end) for n in range(asked.num_streams)]
    await asyncio.gather(*jobs)


async def settle(http: httpx.AsyncClient, url: str) -> dict[str, float]:
    """Wait for the server to become idle; returns what it still holds."""
    for _ in range(100):
        stats = (await http.get(url + "/stats")).json()
        left = {name: stats["engine"][name] for name in ("num_running", "num_waiting", "kv_usage")}
        left["num_open"] = stats["num_open"]
        if not any(left.values()):
            break
        await asyncio.sleep(0.1)
    return left
