"""Where a server listens, and what it says while nothing happens."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from hunch.errors import ConfigError
from hunch.server.listen import bind, forget, listen
from hunch.server.settings import ServeConfig
from server.live_server import PATIENCE, Start, wait_for

COMPLETE = "/v1/completions"


def test_a_socket_of_the_file_system_and_comments_in_a_silent_stream(
    start_server: Start, tmp_path: Path
) -> None:
    path = tmp_path / "hunch.sock"
    server = start_server(is_expected_to_serve=False, uds=str(path), sse_keep_alive_interval=0.05)
    wait_for(lambda: path.exists() and '"serving ' in server.log())
    assert f"http+unix://{path}" in server.log()
    body = {"prompt": "Once", "max_tokens": 30, "seed": 1}
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://any-name", timeout=PATIENCE) as client:
        assert client.get("/health").status_code == 200
        text = client.post(COMPLETE, json=body).json()["choices"][0]["text"]
        asked = {"json": {**body, "stream": True}}
        with server.holding("steps"), client.stream("POST", COMPLETE, **asked) as answer:
            lines = answer.iter_lines()
            assert [next(lines) for _ in range(4)] == [": keep-alive", ""] * 2
        events = client.post(COMPLETE, **asked).text.split("\n")
    assert {line[:6] for line in events} <= {"data: ", ": keep", ""}
    said = [json.loads(line[6:]) for line in events if line.startswith("data: {")]
    assert "".join(choice["text"] for one in said for choice in one["choices"]) == text
    assert events[-3:] == ["data: [DONE]", "", ""]
    assert server.stop() == 0
    assert not path.exists()


def test_a_path_that_a_dead_server_left_is_taken_and_a_live_ones_is_not(tmp_path: Path) -> None:
    settings = ServeConfig(uds=str(tmp_path / "a.sock"))
    dead = bind(settings)
    dead.listen()
    with pytest.raises(ConfigError, match="Address already in use"):
        bind(settings)
    dead.close()
    alive = bind(settings)
    assert alive.family == socket.AF_UNIX
    alive.close()
    forget(settings)
    assert not Path(settings.uds).exists()
    plain = tmp_path / "a file"
    plain.write_text("kept")
    with pytest.raises(ConfigError):
        bind(ServeConfig(uds=str(plain)))
    assert plain.read_text() == "kept"
    with pytest.raises(ConfigError, match="No such file or directory"):
        bind(ServeConfig(uds=str(tmp_path / "nowhere" / "a.sock")))


def test_servers_that_still_load_cannot_have_the_same_port() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings = ServeConfig(host="127.0.0.1", port=free.getsockname()[1])
    first = bind(settings)
    with pytest.raises(ConfigError, match="give another --port"):
        bind(settings)
    listen(first, settings)
    with socket.create_connection(first.getsockname()) as client:
        taken, _ = first.accept()
        taken.close()  # the first to leave: the connection lingers on this side
        assert client.recv(1) == b""
    first.close()
    bind(settings).close()


def test_who_listens_second_is_told() -> None:
    both = [socket.socket(), socket.socket()]
    for one in both:  # as of a program that lets others have its port
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(("127.0.0.1", both[0].getsockname()[1]))
    settings = ServeConfig(host="127.0.0.1", port=both[0].getsockname()[1])
    both[0].listen()
    with pytest.raises(ConfigError, match="cannot listen on 127"):
        listen(both[1], settings)
    for one in both:
        one.close()
