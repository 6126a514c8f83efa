"""Live servers for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hunch.hub import ModelFiles
from server.live_server import LiveServer, Start, api_server

COMMAND = (
    "--host 0.0.0.0 --model smollm2-135m --seed 42 -tp 1 --speculative_model [ngram] "
    "--use-v2-block-manager --num_speculative_tokens 5 --gpu_memory_utilization 0.8 "
    "--max-model-len 512"
)


@contextmanager
def servers_in(folders: pytest.TempPathFactory) -> Iterator[Start]:
    """What starts servers; all of them leave together at the end."""
    servers: list[LiveServer] = []

    def start(env: dict[str, str] | None = None, **settings: Any) -> LiveServer:
        log = folders.mktemp("server") / "log"
        server = LiveServer(log, env or {}, **settings)
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.end()
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Servers of one file of tests."""
    with servers_in(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def start_shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Servers that all files share."""
    with servers_in(tmp_path_factory) as start:
        yield start


@pytest.fixture(scope="session")
def server(start_shared: Start) -> LiveServer:
    """One server that tests share; they must leave it as they found it."""
    return start_shared()


@pytest.fixture(scope="session")
def thinker(start_shared: Start) -> LiveServer:
    """The same for a model that reasons, with a longer context."""
    return start_shared(reasoning_parser="qwen3", max_model_len=4096)


@pytest.fixture(scope="session")
def default_server(
    default_files: ModelFiles, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a server started as vLLM's documentation does, with the default model."""
    with api_server(COMMAND.split(), tmp_path_factory.mktemp("default") / "log") as url:
        yield url
