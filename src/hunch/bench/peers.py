"""Other engines beside hunch: same file, same prompts, same threads, taking turns.

Every engine runs as a server of its own and is measured by the same client: hunch plain and with
`auto`, llama.cpp plain and with its own speculation, ik_llama.cpp where its wheel is installed, any
llama-server binary, and transformers, plain and with its own speculation.
"""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from hunch.errors import ConfigError, EngineError

SECONDS = 300.0  # a server may take to start
LLAMA_KINDS = ("off", "ngram-simple", "ngram-mod")
HUNCH_KINDS = ("off", "suffix", "auto")
TRANSFORMERS_KINDS = ("off", "lookup", "assisted")
KNOWN = ("hunch", "llama.cpp", "ik_llama.cpp", "transformers")


@dataclass(frozen=True, slots=True)
class Peer:
    """A server: its name in tables, and the command that starts it. {port} is filled in."""

    name: str
    command: tuple[str, ...]


def peers(
    path: Path,
    *,
    threads: int,
    parallel: int = 1,
    skip: Sequence[str] = (),
    binaries: Sequence[str] = (),
    draft: Path | None = None,
) -> list[Peer]:
    """What is set side by side; `skip` leaves out some of KNOWN."""
    found: list[Peer] = []
    if "hunch" not in skip:
        for kind in HUNCH_KINDS:
            found.append(
                _python(
                    f"hunch {kind}",
                    "hunch.entrypoints.openai.api_server --port {port} --log-level warning "
                    f"--speculate {kind} --max-num-seqs {parallel} --max-model-len 4096 "
                    f"--threads {threads} --model",
                    path,
                )
            )
    if "llama.cpp" not in skip:
        if find_spec("xllamacpp") is None:
            raise ConfigError(
                "llama.cpp's wheel is not installed: pip install xllamacpp (or make peers), or "
                "leave it out with --skip llama.cpp"
            )
        for kind in LLAMA_KINDS:
            words = f"hunch.bench.llama_server --port {{port}} --spec-type {kind}"
            more = f"{words} --threads {threads} --parallel {parallel}"
            found.append(_python(f"llama.cpp {kind}", more, path))
    if "ik_llama.cpp" not in skip and find_spec("ik_llama_cpp") is not None:
        words = f"hunch.bench.ik_server --port {{port}} --threads {threads}"
        found.append(_python("ik_llama.cpp off", words, path))
    if "transformers" not in skip:
        for kind in TRANSFORMERS_KINDS:
            words = f"hunch.bench.transformers_server --port {{port}} --kind {kind}"
            more = f"{words} --threads {threads}"
            if kind == "assisted":
                if draft is None:
                    continue
                found.append(_python(f"transformers {kind}", f"{more} --draft", draft, path))
                continue
            found.append(_python(f"transformers {kind}", more, path))
    return found + [_binary(text, path, threads, parallel) for text in binaries]


def _python(name: str, words: str, *paths: Path) -> Peer:
    """A module of ours as a server; paths may hold spaces."""
    return Peer(name, (sys.executable, "-m", *words.split(), *map(str, paths)))


def _binary(text: str, path: Path, threads: int, parallel: int) -> Peer:
    """NAME=COMMAND: a llama-server of one's own, with flags of its own."""
    name, is_named, command = text.partition("=")
    words = shlex.split(command)
    if not is_named or not words:
        raise ConfigError(f"--server {text!r} must be NAME=PATH [FLAGS], say ik=./llama-server")
    flags = ["-m", str(path), "--port", "{port}", "-t", str(threads), "-np", str(parallel)]
    return Peer(name, (*words, *flags, "-c", str(4096 * parallel)))


@contextmanager
def running(found: Sequence[Peer]) -> Iterator[list[str]]:
    """Starts all of them, one after the other; yields NAME=URL of each. They end with the block."""
    with ExitStack() as stack:
        started = [(peer, stack.enter_context(serving(peer))) for peer in found]
        yield [f"{peer.name}={url}" for peer, (url, _) in started]


@contextmanager
def serving(peer: Peer) -> Iterator[tuple[str, int]]:
    """Starts one; yields its address and its process."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = int(sock.getsockname()[1])
    words = [word.replace("{port}", str(port)) for word in peer.command]
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
            )
        except OSError as error:
            raise ConfigError(f"{peer.name} cannot be started: {error}") from None
        try:
            _wait(peer, process, port, log)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(peer: Peer, process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    from urllib.error import HTTPError, URLError
    from urllib.request import urlopen

    end = time.monotonic() + SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5):
                return
        except (HTTPError, URLError, OSError):  # not listening yet, or still loading
            time.sleep(0.3)
    log.seek(0)
    said = log.read().decode("utf-8", "replace").strip()[-600:]
    raise EngineError(f"{peer.name} did not start. It said:\n{said}")
