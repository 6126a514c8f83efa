"""Several HTTP processes over one engine: who starts them, and how they see the engine.

The first process owns the engine and starts the others. Each has its own socket on the same port
(the system shares connections out among them) and its own line to the engine. After the engine was
started again, the first process hands out new lines.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict

from hunch.config import Config
from hunch.errors import EngineError
from hunch.server import wire
from hunch.server.remote import RemoteEngine
from hunch.server.settings import ServeConfig

GRACE_SECONDS = 15.0  # beyond the drain, for a process to leave


class Workers:
    """The other HTTP processes, as the first one sees them."""

    def __init__(self, config: Config, settings: ServeConfig, text_factory: str) -> None:
        self._order = {
            "config": asdict(config),
            "settings": asdict(settings),
            "text_factory": text_factory,
        }
        self._num = settings.workers - 1
        self._drain_timeout = settings.drain_timeout
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: list[socket.socket] = []

    def start(self, sock: socket.socket) -> None:
        """Start them; they wait for their lines. `sock` is the one the first process listens on."""
        order = wire.pack({**self._order, "port": sock.getsockname()[1]})
        for _ in range(self._num):
            ours, theirs = socket.socketpair()
            fd = theirs.fileno()
            command = [sys.executable, "-m", "hunch.server.worker", str(fd)]
            process = subprocess.Popen(
                command, pass_fds=(fd,), start_new_session=True, stdin=subprocess.DEVNULL
            )
            theirs.close()
            ours.sendall(order)
            self._processes.append(process)
            self._controls.append(ours)

    def give(self, lines: list[socket.socket]) -> None:
        """A line to the engine for each."""
        for control, line in zip(self._controls, lines, strict=True):
            with suppress(OSError):  # it is gone; `watch` tells
                socket.send_fds(control, [b"!"], [line.fileno()])
            line.close()

    async def watch(self) -> None:
        """Returns when one of them has left without being told to."""
        while all(process.poll() is None for process in self._processes):
            await asyncio.sleep(1.0)

    def stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)

    async def close(self) -> None:
        """Wait until they have drained and left."""
        self.stop()
        end = time.monotonic() + self._drain_timeout + GRACE_SECONDS
        for process in self._processes:
            while process.poll() is None and time.monotonic() < end:
                await asyncio.sleep(0.05)
            if process.poll() is None:
                process.kill()
            process.wait()
        for control in self._controls:
            control.close()


class JoinedEngine(RemoteEngine):
    """The engine, as a process sees it that did not start it."""

    def __init__(self, config: Config, control: socket.socket, *, max_queue: int) -> None:
        super().__init__(config, "", max_queue=max_queue)
        self._control = control

    async def start(self) -> None:
        """Wait for a line, and until the model behind it is loaded."""
        self.died.clear()
        line = await self._receive_line()
        await self._join(line)
        await self._ready
        self.death = None

    async def _receive_line(self) -> socket.socket:
        loop = asyncio.get_running_loop()
        self._control.setblocking(False)
        while True:
            is_there = asyncio.Event()
            loop.add_reader(self._control, is_there.set)
            try:
                await is_there.wait()
            finally:
                loop.remove_reader(self._control)
            data, fds, _, _ = socket.recv_fds(self._control, 1, 1)
            if not data:
                raise EngineError("the process that owns the engine is gone")
            if fds:
                return socket.socket(fileno=fds[0])

    async def _wait_process(self) -> str:
        return "the engine's process ended"

    def kill(self, reason: str) -> None:
        """That is for its owner to do."""

    async def close(self) -> None:
        await self.drain(0.0)
        self._is_closing = True
        if self._line is not None:
            self._line.close()
