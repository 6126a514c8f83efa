"""A live server on loopback, a process of its own, over the engine of bytes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

HERE = Path(__file__).parent
# Seconds after which what must happen counts as never: a machine that others use may be slow.
PATIENCE = 300.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds, which a busy machine may take its time for."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@contextmanager
def api_server(words: list[str], log: Path) -> Iterator[str]:
    """The address of a server started by vLLM's module with these words; it must leave cleanly."""
    port = free_port()
    command = [sys.executable, "-m", "hunch.entrypoints.openai.api_server", "--port", str(port)]
    with log.open("w") as file:
        env = {**os.environ, "HUNCH_API_KEY": ""}
        process = subprocess.Popen([*command, *words], stderr=file, env=env)
    end = time.monotonic() + PATIENCE
    while "INFO serving" not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0


class LiveServer:
    """A running `hunch` server and its log."""

    by_url: ClassVar[dict[str, LiveServer]] = {}  # for who finds a page wrong and asks the log

    def __init__(
        self, log: Path, env: dict[str, str], *, is_expected_to_serve: bool = True, **settings: Any
    ) -> None:
        self.is_expected_to_serve = is_expected_to_serve
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log
        self.by_url[self.url] = self
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=4)
        self.client = httpx.Client(timeout=PATIENCE, verify=False, limits=limits)
        settings = {"port": self.port, "log_format": "json", **settings}
        self._is_silent = settings.get("log_level") == "warning"
        command = [sys.executable, str(HERE / "fake_serve.py"), json.dumps(settings)]
        paths = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "FAKE_HOLDS": str(log), **env}
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file, env=env)
        self._wait()

    def _wait(self) -> None:
        if not self.is_expected_to_serve:
            return
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.process.poll() is not None:
                pytest.fail(f"the server left:\n{self.log()}")
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1):
                    # Said right after the port is opened.
                    if self._is_silent or '"serving ' in self.log():
                        return
            except OSError:
                pass
            time.sleep(0.05)
        pytest.fail(f"the server did not start:\n{self.log()}")

    def log(self) -> str:
        return self.log_path.read_text()

    @contextmanager
    def holding(self, what: str, after: int = 0) -> Iterator[None]:
        """The engine stands still before `steps` (after so many), its `load` or `grammars`.

        What must be seen while a request is open is then seen, however slow the machine is.
        """
        mark = self.log_path.with_name(f"{self.log_path.name}.{what}")
        mark.write_text(str(after))
        try:
            yield
        finally:
            mark.unlink()

    @property
    def engine_pid(self) -> int:
        """The newest: an engine that died may have been started again."""
        return int(re.findall(r'"engine_pid": (\d+)', self.log())[-1])

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.client.get(self.url + path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        return self.client.post(self.url + path, **kwargs)

    def ended(self) -> list[str]:
        """The ids of requests in the order the server ended them; threads may be told late."""
        lines = [json.loads(line) for line in self.log().splitlines()]
        return [line["request_id"] for line in lines if line["message"] == "http"]

    def stats(self) -> dict[str, Any]:
        return self.get("/stats").json()

    def wait_idle(self) -> dict[str, Any]:
        """The engine's report once nothing is open any more."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            stats = self.stats()
            engine = stats["engine"]
            if stats["num_open"] == engine["num_running"] == engine["num_waiting"] == 0:
                return engine
            time.sleep(0.05)
        pytest.fail(f"requests are still open: {stats}")

    def end(self) -> None:
        """Ask it to leave, which takes it a moment."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def stop(self) -> int:
        self.end()
        try:
            return self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


Start = Callable[..., LiveServer]  # the fixture `start_server`: settings in, a server out
