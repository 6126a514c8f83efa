"""The engine's own process: commands in, steps, differences out. HTTP work never stalls it.

One thread does all of it: between two steps it takes the commands that have arrived, so an abort
takes effect within one step and nothing competes with the step for the interpreter. A second one
says every second that the process is alive, and how long the step that runs has taken.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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
        self, request_id: str, prompt_ids: list[int], params: SamplingParams, **options: Any
    ) -> Any: ...

    def check_queue(self, num_coming: int) -> None: ...

    def admit(self, asked: Any) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    def take_tokens(self) -> list[Any]: ...

    def stats(self) -> dict[str, Any]: ...

    def reset_cache(self, *, is_held_too: bool = False) -> object: ...

    def check_alive(self) -> None: ...

    def close(self) -> None: ...


class Channel:
    """The socket to an HTTP process. Sending never waits: what does not fit is kept for later."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._unpacker = wire.Unpacker()
        self.unsent = bytearray()
        self._sending = threading.Lock()
        self.is_open = True

    def send(self, message: wire.Message) -> None:
        """Any thread may call it."""
        self.send_frame(wire.pack(message))

    def send_frame(self, frame: bytes) -> None:
        with self._sending:
            self.unsent += frame
            self._flush()

    def push(self) -> None:
        """Send what is kept, as far as it goes."""
        with self._sending:
            self._flush()

    def receive(self) -> list[wire.Message]:
        """The messages that have arrived."""
        try:
            data = self.sock.recv(RECEIVE_BYTES)
        except ConnectionError:
            data = b""
        self.is_open = bool(data)
        return self._unpacker.feed(data)

    def flush(self, timeout: float) -> None:
        """Send what is kept, for at most `timeout` seconds."""
        end = time.monotonic() + timeout
        while self.unsent and self.is_open and time.monotonic() < end:
            select.select([], [self.sock], [], max(0.0, end - time.monotonic()))
            self.push()

    def _flush(self) -> None:
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            pass  # the reader is behind; the next receive() tries again
        except ConnectionError:
            self.is_open = False


class Lines:
    """The channels to all HTTP processes. The first belongs to the one that started this one."""

    def __init__(self, channels: list[Channel]) -> None:
        self.channels = channels
        self._bell, self._button = socket.socketpair()

    def ring(self) -> None:
        """End a wait in `receive`. Any thread may call it."""
        self._button.send(b"!")

    @property
    def is_open(self) -> bool:
        return self.channels[0].is_open

    def send(self, message: wire.Message) -> None:
        """To everyone."""
        frame = wire.pack(message)
        for channel in self.channels:
            if channel.is_open:
                channel.send_frame(frame)

    def receive(self, timeout: float) -> list[tuple[Channel, wire.Message]]:
        """The messages that have arrived; waits up to `timeout` seconds for the first."""
        channels = {channel.sock: channel for channel in self.channels if channel.is_open}
        writers = [sock for sock, channel in channels.items() if channel.unsent]
        readable, writable, _ = select.select([*channels, self._bell], writers, [], timeout)
        for sock in writable:
            channels[sock].push()
        found: list[tuple[Channel, wire.Message]] = []
        for sock in readable:
            if sock is self._bell:
                sock.recv(RECEIVE_BYTES)
                continue
            channel = channels[sock]
            found += [(channel, message) for message in channel.receive()]
            if not channel.is_open:
                found.append((channel, {"op": "gone"}))
        return found


@dataclass(slots=True)
class Open:
    """A request that runs: whom to tell of it, and what was told already."""

    channel: Channel
    sent: wire.Sent = field(default_factory=wire.Sent)


class Loop:
    """Commands, a step, answers; until the HTTP side hangs up."""

    def __init__(self, engine: Engine, lines: Lines) -> None:
        self.engine = engine
        self.lines = lines
        self.open: dict[str, Open] = {}
        self.is_closing = False
        self._next_stats = 0.0
        self._last_params: tuple[wire.Message, SamplingParams] | None = None
        self._step_began: float | None = None
        self._counts: dict[int, Any] = {}  # what each HTTP process has counted
        # Grammars are compiled beside the steps; requests that bring one wait for it here.
        self._checking: dict[str, tuple[Channel, Future[Any]]] = {}
        self._checkers = ThreadPoolExecutor(2, thread_name_prefix="hunch-check")

    def beat(self) -> None:
        """Signs of life, from a thread of their own, for as long as anybody listens."""
        while self.lines.is_open and not self.is_closing:
            began = self._step_began
            seconds = 0.0 if began is None else time.monotonic() - began
            self.lines.send({"op": "alive", "step_seconds": seconds})
            time.sleep(BEAT_SECONDS)

    def run(self) -> None:
        threading.Thread(target=self.beat, name="hunch-beat", daemon=True).start()
        while self.lines.is_open and not self.is_closing:
            has_work = self.engine.has_work()
            if not has_work:
                self.engine.check_alive()  # a step would find out by itself
            for channel, message in self.lines.receive(0.0 if has_work else IDLE_SECONDS):
                self._obey(channel, message)
            if self._checking:
                self._admit_checked()
            if self.engine.has_work():
                self._step()
            else:
                self._report(is_idle=True)
        self._checkers.shutdown(wait=False, cancel_futures=True)

    def _obey(self, channel: Channel, message: wire.Message) -> None:
        match message["op"]:
            case "submit":
                self._submit(channel, message)
            case "abort":
                self._abort(message["id"])
            case "reset":
                is_held_too = bool(message["is_held_too"])
                is_done = is_held_too or not self.engine.has_work()
                if is_done:
                    self.engine.reset_cache(is_held_too=is_held_too)
                channel.send({"op": "reset", "is_done": is_done})
            case "counts":
                self._counts[self.lines.channels.index(channel)] = message["families"]
                channel.send({"op": "counts", "by_process": self._counts})
            case "gone":
                for request_id in [i for i, one in self.open.items() if one.channel is channel]:
                    self._abort(request_id)
            case "close":
                self.is_closing = True

    def _abort(self, request_id: str) -> None:
        if self.open.pop(request_id, None) is not None:
            self.engine.abort(request_id)
        elif (waiting := self._checking.pop(request_id, None)) is not None:
            waiting[1].cancel()

    def _submit(self, channel: Channel, message: wire.Message) -> None:
        request_id, options = message["id"], message["options"]
        try:
            params = self._params(message["params"])
            if "handle" in options:  # each process counts its own; here they must differ
                number = self.lines.channels.index(channel)
                options["handle"] = options["handle"] * len(self.lines.channels) + number
            check = partial(self.engine.check, request_id, message["prompt_ids"], params, **options)
            if params.structured_outputs is not None:
                waiting = self._checkers.submit(check)
                self._checking[request_id] = channel, waiting
                waiting.add_done_callback(lambda _: self.lines.ring())
                return
            self._admit(channel, request_id, check())
        except Exception as error:  # whatever is wrong with one request ends that one alone
            self._refuse(channel, request_id, error)

    def _params(self, given: wire.Message) -> SamplingParams:
        """The parameters of a request. Most are like those before it, and nobody changes them."""
        if self._last_params is None or self._last_params[0] != given:
            self._last_params = given, wire.load_params(given)
        return self._last_params[1]

    def _admit_checked(self) -> None:
        done = [request_id for request_id, (_, found) in self._checking.items() if found.done()]
        for request_id in done:
            channel, found = self._checking.pop(request_id)
            try:
                self._admit(channel, request_id, found.result())
            except Exception as error:  # see _submit
                self._refuse(channel, request_id, error)

    def _admit(self, channel: Channel, request_id: str, asked: Any) -> None:
        self.engine.check_queue(0)
        self.engine.admit(asked)
        self.open[request_id] = Open(channel)
        channel.send({"op": "accepted", "id": request_id})

    def _refuse(self, channel: Channel, request_id: str, error: Exception) -> None:
        if not isinstance(error, HunchError):
            log.error("a request could not be checked", exc_info=error)
            error = HunchError("the request failed inside the server")
        channel.send({"op": "refused", "id": request_id, **wire.dump_error(error)})

    def _step(self) -> None:
        self._step_began = time.monotonic()
        outputs = self.engine.step()
        self._step_began = None
        # Before the answers: who has one finds it counted.
        self._report(is_idle=not self.engine.has_work())
        items: dict[Channel, list[wire.Message]] = {}
        for output in outputs:
            one = self.open.get(output.request_id)
            if one is None:
                continue
            items.setdefault(one.channel, []).append(wire.dump_delta(output, one.sent))
            if output.finished:
                del self.open[output.request_id]
        new_tokens = self.engine.take_tokens()
        channels = self.lines.channels
        if len(channels) == 1:
            if items or new_tokens:
                found = items.get(channels[0], [])
                channels[0].send({"op": "deltas", "items": found, "tokens": new_tokens})
            return
        for channel, tokens in zip(channels, _shared(new_tokens, len(channels)), strict=True):
            if tokens or channel in items:
                channel.send({"op": "deltas", "items": items.get(channel, []), "tokens": tokens})

    def _report(self, *, is_idle: bool) -> None:
        now = time.monotonic()
        if is_idle or now >= self._next_stats:
            self._next_stats = now + STATS_SECONDS
            self.lines.send({"op": "stats", "stats": self.engine.stats()})


def _shared(new_tokens: list[Any], count: int) -> list[list[Any]]:
    """Handles and tokens, by the channel that a handle belongs to, with its own number for it."""
    found: list[list[Any]] = [[] for _ in range(count)]
    pairs = iter(new_tokens)
    for handle, tokens in zip(pairs, pairs, strict=True):
        found[handle % count] += (handle // count, tokens)
    return found


def _info(capacity: Capacity, config: wire.Message) -> wire.Message:
    """What the HTTP side has to know. The longest text is one that fits into the KV memory."""
    info: wire.Message = {
        name: getattr(capacity, name) for name in ("num_blocks", "block_size", "max_rows")
    }
    max_len = min(config["model"]["max_model_len"] or capacity.max_len, capacity.max_len)
    info |= {"max_len": min(max_len, capacity.max_slots), "methods": list(capacity.methods)}
    info["model"] = dict(capacity.model)
    return info | {"pid": os.getpid()}


def resolve(path: str) -> Any:
    """The object 'package.module:name' names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def main(fds: Sequence[int]) -> int:
    """Build the engine the first message describes and serve until the first socket closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the HTTP side decides when to drain and leave
    lines = Lines([Channel(socket.socket(fileno=fd)) for fd in fds])
    first = lines.channels[0]
    start: wire.Message | None = None
    while start is None:
        found = lines.receive(IDLE_SECONDS)
        start = next((message for channel, message in found if channel is first), None)
        if not lines.is_open:
            return 0
    logs.set_up(*start["logs"])
    try:
        engine: Engine = resolve(start["factory"])(wire.load_config(start["config"]))
    except HunchError as error:
        return _fail(lines, error)
    gc.collect()
    gc.freeze()  # what is there now stays: looking through it again would stop steps
    info = _info(engine.capacity, start["config"])
    for index, channel in enumerate(lines.channels):
        channel.send({"op": "stats", "stats": engine.stats()})
        channel.send({"op": "ready", "info": {**info, "index": index}})
    try:
        Loop(engine, lines).run()
    except HunchError as error:
        return _fail(lines, error)
    engine.close()
    return 0


def _fail(lines: Lines, error: HunchError) -> int:
    lines.send({"op": "fatal", "message": str(error)})
    for channel in lines.channels:
        channel.flush(5.0)
    return 1


if __name__ == "__main__":
    sys.exit(main([int(word) for word in sys.argv[1:]]))
