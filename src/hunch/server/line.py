"""The HTTP side's end of the socket to the engine's process, and how that process ended."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import Callable

from hunch.server import wire


class Line(asyncio.Protocol):
    """The socket: messages are taken in as they are read, without waking a task for each."""

    def __init__(
        self,
        take: Callable[[wire.Message], None],
        tell: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self._take, self._tell, self._lost = take, tell, lost
        self._unpacker = wire.Unpacker()

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._take(message)
        self._tell()

    def connection_lost(self, error: Exception | None) -> None:
        self._lost()


def ending_of(process: subprocess.Popen[bytes]) -> str:
    """Wait for a process that closed its end, and say how it ended."""
    try:
        code = process.wait(10.0)
    except subprocess.TimeoutExpired:  # it goes on: it is of no use any more
        process.kill()
        code = process.wait()
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"
