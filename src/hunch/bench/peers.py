"""Other engines beside hunch: same file, same prompts, same threads, taking turns.

Every engine runs as a server of its own and is measured by the same client: hunch plain and with
`auto`, llama.cpp plain and with its own speculation, ik_llama.cpp where its wheel is installed, any
llama-server binary, and transformers, plain and with its own speculation.
"""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.request import Request, urlopen

from hunch.bench.transformers_server import METHODS as TRANSFORMERS_METHODS
from hunch.errors import ConfigError, EngineError

SECONDS = 900.0  # in which a server must start; one that ends is noticed at once
LLAMA_METHODS = ("off", "ngram-simple", "ngram-mod")
HUNCH_METHODS = ("off", "suffix", "auto")
KNOWN = ("hunch", "llama.cpp", "ik_llama.cpp", "transformers")


@dataclass(frozen=True, slots=True)
class Peer:
    """A server: its name in tables, and the command that starts it. {port} is filled in."""

    name: str
    command: tuple[str, ...]
    methods: tuple[str, ...] = ()  # of one process: "NAME METHOD" answers at URL/METHOD

    def addresses(self, url: str) -> dict[str, str]:
        """The addresses of all methods of the process, by name."""
        if not self.methods:
            return {self.name: url}
        return {f"{self.name} {method}": f"{url}/{method}" for method in self.methods}


class Place(NamedTuple):
    """The address of something that is measured."""

    name: str
    url: str
    pid: int


def peers(
    path: Path,
    *,
    threads: int,
    parallel: int = 1,
    skip: Sequence[str] = (),
    binaries: Sequence[str] = (),
    draft: Path | None = None,
) -> list[Peer]:
    """The servers to compare; `skip` leaves out some of KNOWN."""
    found: list[Peer] = []
    if "hunch" not in skip:
        for method in HUNCH_METHODS:
            found.append(
                _python(
                    f"hunch {method}",
                    "hunch.entrypoints.openai.api_server --port {port} --log-level warning "
                    f"--speculate {method} --max-num-seqs {parallel} --max-model-len 4096 "
                    # as in llama.cpp: activations of 8 bits, whatever the model's size
                    f"--threads {threads} --activation-bits 8 --model",
                    path,
                )
            )
    if "llama.cpp" not in skip:
        if find_spec("xllamacpp") is None:
            raise ConfigError(
                "llama.cpp's wheel is not installed: pip install xllamacpp (or make peers), or "
                "leave it out with --skip llama.cpp"
            )
        for method in LLAMA_METHODS:
            words = f"hunch.bench.llama_server --port {{port}} --spec-type {method}"
            more = f"{words} --threads {threads} --parallel {parallel}"
            found.append(_python(f"llama.cpp {method}", more, path))
    if "ik_llama.cpp" not in skip and find_spec("ik_llama_cpp") is not None:
        words = f"hunch.bench.ik_server --port {{port}} --threads {threads}"
        found.append(_python("ik_llama.cpp off", words, path))
    if "transformers" not in skip:
        methods = TRANSFORMERS_METHODS if draft is not None else TRANSFORMERS_METHODS[:-1]
        words = "hunch.bench.transformers_server --port {port} "
        more = f"{words} --methods {','.join(methods)} --threads {threads}"
        assistant = () if draft is None else ("--draft", draft)
        found.append(_python("transformers", more, path, *assistant, methods=methods))
    return found + [_binary(text, path, threads, parallel) for text in binaries]


def _python(name: str, words: str, *paths: Path | str, methods: tuple[str, ...] = ()) -> Peer:
    """A module of ours as a server; paths may hold spaces."""
    return Peer(name, (sys.executable, "-m", *words.split(), *map(str, paths)), methods)


def _binary(text: str, path: Path, threads: int, parallel: int) -> Peer:
    """A user's own llama-server, as NAME=COMMAND, with its flags."""
    name, is_named, command = text.partition("=")
    words = shlex.split(command)
    if not is_named or not words:
        raise ConfigError(f"--server {text!r} must be NAME=PATH [FLAGS], say ik=./llama-server")
    flags = ["-m", str(path), "--port", "{port}", "-t", str(threads), "-np", str(parallel)]
    return Peer(name, (*words, *flags, "-c", str(4096 * parallel)))


@contextmanager
def running(
    found: Sequence[Peer], say: Callable[[str], None] | None = None
) -> Iterator[list[Place]]:
    """Start all of them together; yields their addresses. They end with the block.

    One that does not start is an error. With `say`, which is told so, it is left out instead.
    """
    with ExitStack() as stack:
        started = [stack.enter_context(starting(peer)) for peer in found]
        began, problem = time.monotonic(), None
        places: list[Place] = []
        for number, server in enumerate(started, 1):
            try:
                url = server.wait()
            except EngineError as error:
                if say is None:
                    raise
                problem = error
                say(f"left out: {error}")
                continue
            found_here = server.peer.addresses(url).items()
            places += [Place(name, at, server.process.pid) for name, at in found_here]
            if say is not None:
                seconds = time.monotonic() - began
                say(
                    f"[{number} of {len(started)}] {server.peer.name} answers after {seconds:.0f} s"
                )
        if problem is not None and not places:
            raise problem
        yield places


def post(url: str, body: dict[str, Any], seconds: float = 120.0) -> dict[str, Any]:
    """A server's answer to a body, both in JSON."""
    request = Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=seconds) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@contextmanager
def serving(peer: Peer) -> Iterator[tuple[str, int]]:
    """Start one; yields its address and its process."""
    with starting(peer) as server:
        yield server.wait(), server.process.pid


@dataclass(frozen=True, slots=True)
class Server:
    """A peer that was started and may not answer yet."""

    peer: Peer
    process: subprocess.Popen[bytes]
    port: int
    log: IO[bytes]  # its output

    def wait(self) -> str:
        """Wait until it answers; returns its address."""
        url, end = f"http://127.0.0.1:{self.port}", time.monotonic() + SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                first = "".join(f"/{method}" for method in self.peer.methods[:1])
                with urlopen(f"{url}{first}/v1/models", timeout=5):
                    return url
            except OSError:  # not listening yet, or still loading
                time.sleep(0.3)
        how = f"did not answer within {SECONDS:.0f} s"
        if self.process.poll() is not None:
            how = f"ended by itself with code {self.process.returncode}"
        self.log.seek(0)
        output = self.log.read().decode("utf-8", "replace").strip()[-600:]
        raise EngineError(f"{self.peer.name} {how}" + (f". It said:\n{output}" if output else ""))


@contextmanager
def starting(peer: Peer) -> Iterator[Server]:
    """Start one without waiting for it; it ends with the block."""
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
            yield Server(peer, process, port, log)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
