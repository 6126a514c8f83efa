"""One of several HTTP processes over an engine: python -m hunch.server.worker FD."""

from __future__ import annotations

import logging
import os
import socket
import sys

from hunch.errors import EngineError
from hunch.server import logs, wire
from hunch.server.run import run_worker
from hunch.server.settings import Limits, ServeConfig
from hunch.server.workers import JoinedEngine


def _read_order(control: socket.socket) -> wire.Message:
    """Exactly one message: what follows it carries files."""
    head = _read_exactly(control, 4)
    (order,) = wire.Unpacker().feed(head + _read_exactly(control, int.from_bytes(head, "big")))
    return order


def _read_exactly(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = control.recv(size - len(data))
        if not piece:
            raise EngineError("the process that owns the engine is gone")
        data += piece
    return data


def main(fd: int) -> int:
    """Serve until told to stop, or until the process that owns the engine is gone."""
    control = socket.socket(fileno=fd)
    try:
        order = _read_order(control)
    except EngineError:
        return 1
    given = order["settings"]
    given["limits"] = Limits(**given["limits"])
    settings = ServeConfig(**{**given, "port": order["port"]})
    config = wire.load_config(order["config"])
    logs.set_up(settings.log_format, settings.log_level)
    engine = JoinedEngine(config, control, max_queue=settings.max_queue)
    code = run_worker(engine, config, settings, order["text_factory"])
    logs.event(logging.DEBUG, "an HTTP process leaves", pid=os.getpid())
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
