"""Several HTTP processes over one engine: one server to its clients."""

from __future__ import annotations

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from server.fake_engine import expected_text
from server.live_server import PATIENCE, LiveServer, Start, wait_for
from server.test_lifecycle import read_stream

COMPLETE = "/v1/completions"


def children(server: LiveServer) -> list[int]:
    path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    return [int(pid) for pid in path.read_text().split() if int(pid) != server.engine_pid]


def test_processes_share_the_engine_the_port_and_the_counts(start_server: Start) -> None:
    server = start_server(workers=3, max_num_seqs=64, env={"FAKE_STEP_SECONDS": "0.005"})
    wait_for(lambda: "engine_pid" in server.log())
    wait_for(lambda: len(children(server)) == 2)
    # Which process answers is the system's choice: all of them must be listening.
    wait_for(lambda: len(re.findall(rf":{server.port:04X} ", listening())) >= 3)
    body = {"prompt": "Once", "max_tokens": 40}
    with ThreadPoolExecutor(24) as pool:
        answers = pool.map(lambda seed: read_stream(server, {**body, "seed": seed}), range(96))
        found = [count(server) for _ in range(24)]
        assert list(answers) == [(expected_text("Once", seed, 40), None) for seed in range(96)]
    assert found == sorted(found)  # who reads them would take a fall for a new beginning
    wait_for(lambda: {count(server) for _ in range(6)} == {96.0})
    started = [processes(server) for _ in range(6)]  # whichever answers, it tells of all
    assert {tuple(found) for found in started} == {("0", "1", "2")}
    assert all(found == started[0] for found in started)

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


def count(server: LiveServer) -> float:
    """Completions that were answered, from a connection of its own: from any of the processes."""
    told = httpx.get(server.url + "/metrics", timeout=PATIENCE).text
    found = re.search(rf'^hunch:http_requests_total.*"{COMPLETE}",status="200"}} (.*)$', told, re.M)
    return float(found[1]) if found else 0.0


def processes(server: LiveServer) -> dict[str, float]:
    """When each of the processes was started, by its number."""
    told = httpx.get(server.url + "/metrics", timeout=PATIENCE).text
    found = re.findall(r'^process_start_time_seconds\{worker="(\d)"\} (.*)$', told, re.M)
    return {number: float(seconds) for number, seconds in sorted(found)}


def listening() -> str:
    lines = Path("/proc/net/tcp").read_text().splitlines()
    return "\n".join(line.upper() for line in lines if line.split()[3] == "0A")
