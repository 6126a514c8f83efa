"""Broken clients of every kind at once: good ones get their text, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time

from server.broken_clients import BAD_BODIES, BAD_HEADS, Crowd, held
from server.live_server import LiveServer, Start, wait_for


def test_broken_clients_leave_nothing_behind(start_server: Start) -> None:
    server = start_server(max_queue=1000)
    crowd = Crowd(server.port, pause=0.2)

    async def everyone() -> None:
        idle = [await crowd.open() for _ in range(100)]
        broken = [crowd.one(kind) for kind in [*crowd.kinds] * 2]
        await asyncio.gather(*broken, *(crowd.good(number) for number in range(100, 120)))
        for _, writer in idle:
            writer.close()

    asyncio.run(everyone())  # pools of threads fill up
    server.wait_idle()
    pids = [server.process.pid, server.engine_pid]
    time.sleep(0.5)
    before = held(pids)
    asyncio.run(everyone())
    assert crowd.problems == []
    engine = server.wait_idle()
    assert engine["kv_usage"] == 0
    wait_for(lambda: held(pids)["files"] <= before["files"])
    assert held(pids)["threads"] < before["threads"] + 20  # pools may grow, but not by client
    assert "Traceback" not in server.log()


def test_every_wrong_body_and_head_is_answered(server: LiveServer) -> None:
    crowd = Crowd(server.port)

    async def all_of_them() -> None:
        for name in BAD_BODIES:
            await crowd.bad_body(name)
        for name in BAD_HEADS:
            await crowd.bad_head(name)
        await crowd.good(100)

    asyncio.run(all_of_them())
    assert crowd.problems == []
    assert "Traceback" not in server.log()
