"""The engine's own process: commands in, steps, differences out. HTTP work never stalls it.

One thread does all of it: between two steps it takes the commands that have arrived, so an abort
takes effect within one step and nothing competes with the step for the interpreter. A second one
says every second that the process is alive, and how long the step that runs has taken.
"""

from __future__ import annotations

import gc
import logging
import select
import signal
import socket
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from typing import Any, Protocol

from hunch.errors import HunchError
from hunch.server import logs, wire
from hunch.types import Capacity, RequestOutput, SamplingParams

STATS_SECONDS = 1.0  # between two reports while requests run
IDLE_SECONDS = 5.0  # between two reports while none do
BEAT_SECONDS = 1.0  # between two signs of life
RECEIVE_BYTES = 1 << 18

log = logging.getLogger("hunch.server.engine")


class Engine(Protocol):
    """What this process drives; the real one comes from the factory named on start."""

    @property
    def capacity(self) -> Capacity: ...

    def has_work(self) -> bool: ...

    def check(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        **options: Any,
    ) -> Any: ...

    def check_queue(self, num_coming: int) -> None: ...

    def admit(self, asked: Any) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def take_said(self) -> list[int]: ...

    def stats(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class Channel:
    """The socket to the HTTP side. Sending never waits: what does not fit is kept for later."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._unpacker = wire.Unpacker()
        self._unsent = bytearray()
        self._sending = threading.Lock()
        self._bell, self._button = socket.socketpair()
        self.is_open = True

    def ring(self) -> None:
        """End a wait in `receive`. Any thread may call it."""
        self._button.send(b"!")

    def send(self, message: wire.Message) -> None:
        """Any thread may call it."""
        frame = wire.pack(message)
        with self._sending:
            self._unsent += frame
            self._flush()

    def receive(self, timeout: float) -> list[wire.Message]:
        """The messages that have arrived; waits up to `timeout` seconds for the first."""
        writers = [self._sock] if self._unsent else []
        readable, writable, _ = select.select([self._sock, self._bell], writers, [], timeout)
        if writable:
            with self._sending:
                self._flush()
        if self._bell in readable:
            self._bell.recv(RECEIVE_BYTES)
        if self._sock not in readable:
            return []
        try:
            data = self._sock.recv(RECEIVE_BYTES)
        except ConnectionError:
            data = b""
        self.is_open = bool(data)
        return self._unpacker.feed(data)

    def flush(self, timeout: float) -> None:
        """Send what is kept, for at most `timeout` seconds."""
        end = time.monotonic() + timeout
        while self._unsent and self.is_open and time.monotonic() < end:
            select.select([], [self._sock], [], max(0.0, end - time.monotonic()))
            with self._sending:
                self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._sock.send(self._unsent)]
        except BlockingIOError:
            pass  # the reader is behind; the next receive() tries again
        except ConnectionError:
            self.is_open = False


class Loop:
    """Commands, a step, answers; until the HTTP side hangs up."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self.engine = engine
        self.channel = channel
        self.sent: dict[str, wire.Sent] = {}
        self.is_closing = False
        self._next_stats = 0.0
        self._step_began: float | None = None
        # Grammars are compiled beside the steps; requests that bring one wait for it here.
        self._checking: dict[str, Future[Any]] = {}
        self._checkers = ThreadPoolExecutor(2, thread_name_prefix="hunch-check")

    def beat(self) -> None:
        """Signs of life, from a thread of their own, for as long as anybody listens."""
        while self.channel.is_open and not self.is_closing:
            began = self._step_began
            seconds = 0.0 if began is None else time.monotonic() - began
            self.channel.send({"op": "alive", "step_seconds": seconds})
            time.sleep(BEAT_SECONDS)

    def run(self) -> None:
        threading.Thread(target=self.beat, name="hunch-beat", daemon=True).start()
        while self.channel.is_open and not self.is_closing:
            has_work = self.engine.has_work()
            for message in self.channel.receive(0.0 if has_work else IDLE_SECONDS):
                self._obey(message)
            if self._checking:
                self._admit_checked()
            if self.engine.has_work():
                self._step()
            self._report(is_idle=not self.engine.has_work())
        self._checkers.shutdown(wait=False, cancel_futures=True)

    def _obey(self, message: wire.Message) -> None:
        match message["op"]:
            case "submit":
                self._submit(message)
            case "abort":
                if self.sent.pop(message["id"], None) is not None:
                    self.engine.abort(message["id"])
                elif (waiting := self._checking.pop(message["id"], None)) is not None:
                    waiting.cancel()
            case "close":
                self.is_closing = True

    def _submit(self, message: wire.Message) -> None:
        request_id = message["id"]
        try:
            params = wire.load_params(message["params"])
            check = partial(
                self.engine.check,
                request_id,
                message["prompt_ids"],
                params,
                **message["options"],
            )
            if params.structured_outputs is not None:
                waiting = self._checking[request_id] = self._checkers.submit(check)
                waiting.add_done_callback(lambda _: self.channel.ring())
                return
            self._admit(request_id, check())
        except Exception as error:  # whatever is wrong with one request ends that one alone
            self._refuse(request_id, error)

    def _admit_checked(self) -> None:
        done = [request_id for request_id, found in self._checking.items() if found.done()]
        for request_id in done:
            try:
                self._admit(request_id, self._checking.pop(request_id).result())
            except Exception as error:  # see _submit
                self._refuse(request_id, error)

    def _admit(self, request_id: str, asked: Any) -> None:
        self.engine.check_queue(0)
        self.engine.admit(asked)
        self.sent[request_id] = wire.Sent()
        self.channel.send({"op": "accepted", "id": request_id})

    def _refuse(self, request_id: str, error: Exception) -> None:
        if not isinstance(error, HunchError):
            log.error("a request could not be checked", exc_info=error)
            error = HunchError("the request failed inside the server")
        self.channel.send({"op": "refused", "id": request_id, **wire.dump_error(error)})

    def _step(self) -> None:
        items = []
        self._step_began = time.monotonic()
        outputs = self.engine.step()
        self._step_began = None
        for output in outputs:
            sent = self.sent.get(output.request_id)
            if sent is None:
                continue
            items.append(wire.dump_delta(output, sent))
            if output.finished:
                del self.sent[output.request_id]
        said = self.engine.take_said()
        if items or said:
            self.channel.send({"op": "deltas", "items": items, "said": said})

    def _report(self, *, is_idle: bool) -> None:
        now = time.monotonic()
        if is_idle or now >= self._next_stats:
            self._next_stats = now + STATS_SECONDS
            self.channel.send({"op": "stats", "stats": self.engine.stats()})


def _info(capacity: Capacity, config: wire.Message) -> wire.Message:
    """What the HTTP side has to know. The longest text is one that fits into the KV memory."""
    info: wire.Message = {
        name: getattr(capacity, name) for name in ("num_blocks", "block_size", "max_rows")
    }
    num_slots = capacity.num_blocks * capacity.block_size
    max_len = min(config["model"]["max_model_len"] or capacity.max_len, capacity.max_len)
    return info | {"max_len": min(max_len, num_slots), "methods": list(capacity.methods)}


def resolve(path: str) -> Any:
    """The object 'package.module:name' names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def main(fd: int) -> int:
    """Build the engine the first message describes and serve until the socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the HTTP side decides when to drain and leave
    channel = Channel(socket.socket(fileno=fd))
    start: wire.Message | None = None
    while start is None:
        start = next(iter(channel.receive(IDLE_SECONDS)), None)
        if not channel.is_open:
            return 0
    logs.set_up(*start["logs"])
    try:
        engine: Engine = resolve(start["factory"])(wire.load_config(start["config"]))
    except HunchError as error:
        channel.send({"op": "fatal", "message": str(error)})
        channel.flush(5.0)
        return 1
    gc.collect()
    gc.freeze()  # what is there now stays: looking through it again would stop steps
    channel.send({"op": "stats", "stats": engine.stats()})
    channel.send({"op": "ready", "info": _info(engine.capacity, start["config"])})
    loop = Loop(engine, channel)
    try:
        loop.run()
    except HunchError as error:
        channel.send({"op": "fatal", "message": str(error)})
        channel.flush(5.0)
        return 1
    engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
