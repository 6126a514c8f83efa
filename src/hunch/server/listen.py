"""Where a server listens: a port, or a path of the file system."""

from __future__ import annotations

import errno
import socket
import stat
from pathlib import Path
from typing import Any

from hunch.errors import ConfigError
from hunch.server.settings import ServeConfig

BACKLOG = 2048  # connections that wait to be taken, as in uvicorn


def bind(settings: ServeConfig) -> socket.socket:
    """The socket that requests come by; ConfigError where another program has it."""
    if settings.uds:
        return _bind_path(settings.uds)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    sock = socket.socket(family)
    if settings.workers > 1:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        _bind_alone(sock, (settings.host, settings.port))
    except OSError as error:
        sock.close()
        raise _taken(settings, error) from None
    return sock


def _bind_alone(sock: socket.socket, address: Any) -> None:
    """Take a port before anybody listens on it.

    With SO_REUSEADDR two servers that both still load could have the same one. So it is set only
    where a plain try fails, as after a server that has just left connections behind.
    """
    try:
        sock.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)


def listen(sock: socket.socket, settings: ServeConfig) -> None:
    """From now on clients may connect; ConfigError where another program was faster."""
    if not settings.uds:  # connections inherit it, so that the next server can have the port
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _taken(settings, error) from None


def _taken(settings: ServeConfig, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        reason += "; give another --port"
    return ConfigError(f"cannot listen on {settings.host}:{settings.port}: {reason}")


def _bind_path(path: str) -> socket.socket:
    """A socket of the file system. One that nobody listens to is a dead server's, and replaced."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if stat.S_ISSOCK(Path(path).stat().st_mode) and sock.connect_ex(path):
            Path(path).unlink()
    except FileNotFoundError:
        pass
    sock.close()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(path)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {path}: {error.strerror or error}") from None
    return sock


def forget(settings: ServeConfig) -> None:
    """Take the path away that was listened on."""
    if settings.uds:
        Path(settings.uds).unlink(missing_ok=True)
