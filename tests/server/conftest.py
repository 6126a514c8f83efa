"""Live servers for tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from server.live_server import LiveServer


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
