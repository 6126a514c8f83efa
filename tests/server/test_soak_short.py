"""Two hundred clients at once, some rude: nothing lost, nothing doubled, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import httpx

from server.fake_engine import expected_text
from server.live_server import PATIENCE, LiveServer, Start

NUM_CLIENTS = 200
COMPLETE = "/v1/completions"


async def client(http: httpx.AsyncClient, url: str, number: int, ends: dict[str, int]) -> None:
    """One client: polite, slow, leaving early, or not making sense."""
    chance = random.Random(number)
    count = chance.randint(5, 80)
    body = {"prompt": f"client {number}", "seed": number, "max_tokens": count, "stream": True}
    body["speculation"] = {"mode": chance.choice(["auto", "off"])}
    kind = chance.choice(["polite", "polite", "polite", "slow", "leaves", "malformed"])
    if kind == "malformed":
        answer = await http.post(url + COMPLETE, json={**body, "temperature": "hot"})
        assert answer.status_code == 400
    else:
        text, is_over = "", False
        async with http.stream("POST", url + COMPLETE, json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    is_over = True
                elif line.startswith("data: "):
                    chunk = json.loads(line[6:])
                    assert "error" not in chunk
                    text += chunk["choices"][0]["text"]
                    if kind == "leaves" and len(text) > 3:
                        break
                    if kind == "slow":
                        await asyncio.sleep(0.02)
        wanted = expected_text(f"client {number}", number, count)
        if kind == "leaves":
            assert wanted.startswith(text)
        else:
            assert is_over
            assert text == wanted
    ends[kind] = ends.get(kind, 0) + 1


def test_many_clients_at_once(start_server: Start) -> None:
    server = start_server(max_queue=1000)
    ends: dict[str, int] = {}

    async def crowd(size: int) -> None:
        limits = httpx.Limits(max_connections=size)
        async with httpx.AsyncClient(limits=limits, timeout=PATIENCE, verify=False) as http:
            await asyncio.gather(*(client(http, server.url, n, ends) for n in range(size)))

    asyncio.run(crowd(30))  # pools of threads fill up
    ends.clear()
    num_threads = count_threads(server)
    asyncio.run(crowd(NUM_CLIENTS))
    assert sum(ends.values()) == NUM_CLIENTS
    assert len(ends) == 4
    engine = server.wait_idle()
    assert engine["kv_usage"] == 0
    assert count_threads(server) < num_threads + 20  # pools may have grown, but not by client
    assert "Traceback" not in server.log()


def count_threads(server: LiveServer) -> int:
    """Of the HTTP side and of the engine's process."""
    pids = (server.process.pid, server.engine_pid)
    return sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids)
