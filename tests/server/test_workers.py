"""Several HTTP processes over one engine: one server to its clients."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from server.fake_engine import expected_text
from server.live_server import PATIENCE, LiveServer, wait_for
from server.test_lifecycle import read_stream
from server.test_operations import read

COMPLETE = "/v1/completions"


def children(server: LiveServer) -> list[int]:
    path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return [int(pid) for pid in path.read_text().split() if int(pid) != server.engine_pid]


def test_processes_share_the_engine_the_port_and_the_counts(
    start_server: Callable[..., LiveServer],
) -> None:
    server = start_server(workers=3, max_num_seqs=64, env={"FAKE_STEP_SECONDS": "0.005"})
    wait_for(lambda: "engine_pid" in server.log())
    wait_for(lambda: len(children(server)) == 2)
    # Which process answers is the system's choice: all of them must be listening.
    wait_for(lambda: len(re.findall(rf":{server.port:04X} ", listening())) >= 3)
    body = {"prompt": "Once", "max_tokens": 40}
    with ThreadPoolExecutor(24) as pool:
        answers = list(
            pool.map(lambda seed: read_stream(server, {**body, "seed": seed}), range(24))
        )
    assert answers == [(expected_text("Once", seed, 40), None) for seed in range(24)]

    def counts() -> set[float]:
        found = set()
        for _ in range(6):  # each from a connection of its own, so from any of the processes
            with httpx.Client(timeout=PATIENCE) as client:
                server.client, kept = client, server.client
                found.add(read(server)["hunch:http_requests_total"].get((COMPLETE, "200"), 0.0))
                server.client = kept
        return found

    wait_for(lambda: counts() == {24.0})

    os.kill(server.engine_pid, signal.SIGKILL)
    wait_for(lambda: "the engine was started again" in server.log())

    def is_well() -> bool:
        with httpx.Client(timeout=PATIENCE) as client:
            return all(
                client.get(server.url + "/ready", headers={"Connection": "close"}).status_code
                == 200
                for _ in range(24)
            )

    wait_for(is_well)
    assert read_stream(server, {**body, "seed": 1}) == (expected_text("Once", 1, 40), None)
    pids = children(server)
    assert server.stop() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def listening() -> str:
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return "\n".join(line.upper() for line in lines if line.split()[3] == "0A")
