"""Live servers for tests."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hunch.hub import ModelFiles
from server.live_server import LiveServer

COMMAND = (
    "--host 0.0.0.0 --port PORT --model smollm2-135m --seed 42 -tp 1 --speculative_model [ngram] "
    "--use-v2-block-manager --num_speculative_tokens 5 --gpu_memory_utilization 0.8 "
    "--max-model-len 512"
)


@pytest.fixture(scope="session")
def start_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., LiveServer]]:
    servers: list[LiveServer] = []

    def start(env: dict[str, str] | None = None, **settings: Any) -> LiveServer:
        log = tmp_path_factory.mktemp("server") / "log"
        server = LiveServer(log, env or {}, **settings)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
def server(start_server: Callable[..., LiveServer]) -> LiveServer:
    """One server that tests share; they must leave it as they found it."""
    return start_server()


@pytest.fixture(scope="session")
def default_server(
    default_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server started as vLLM's documentation does, with the default model."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    words = COMMAND.replace("PORT", str(port)).split()
    log: Path = tmp_path_factory.mktemp("default") / "log"
    command = [sys.executable, "-m", "hunch.entrypoints.openai.api_server", *words]
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, "HUNCH_API_KEY": ""})
    end = time.monotonic() + 120
    while "serving smollm2-135m" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    yield f"http://127.0.0.1:{port}/v1"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
