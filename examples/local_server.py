"""A server for the examples: `hunch serve` on a free port, ended with the block."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def server(*flags: str) -> Iterator[str]:
    """The base URL that OpenAI's clients want."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    words = [sys.executable, "-m", "hunch.entrypoints.openai.api_server", "--port", str(port)]
    process = subprocess.Popen([*words, "--log-level", "warning", *flags])
    try:
        while process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.1)
        if process.poll() is not None:
            raise SystemExit("the server did not start")
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(30)
