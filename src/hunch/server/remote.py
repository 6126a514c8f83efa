"""The HTTP side's end of the engine's process: submit, stream, abort, and notice its death."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from hunch.config import Config
from hunch.errors import EngineError, HunchError, QueueFullError, RequestError
from hunch.server import wire
from hunch.server.line import Line, ending_of
from hunch.server.remote_stream import RemoteStream
from hunch.types import Detokenizer, SamplingParams

KILL_SECONDS = 5.0  # how long a process that was asked to leave may take
SILENT_SECONDS = 3.5  # without a sign of life after which it counts as hung
LOOK_SECONDS = 0.5  # between two looks for a sign of life
STEP_SECONDS = 300.0  # that one step may take
COUNT_SECONDS = 2.0  # that /metrics waits for what other processes have counted


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineInfo:
    """What the engine has room for."""

    max_len: int
    max_rows: int
    num_blocks: int
    block_size: int
    methods: list[str]  # that a request may name
    pid: int
    index: int = 0  # of this process among those that share the engine
    model: Mapping[str, Any] = field(default_factory=dict)  # "architecture" and "bytes"


class Watcher(Protocol):
    """Who wants to know when requests end (metrics, logs)."""

    def finished(self, stream: RemoteStream, reason: str) -> None: ...


class RemoteEngine:
    """The engine in its own process. All methods belong to one event loop."""

    def __init__(
        self,
        config: Config,
        factory: str,
        *,
        max_queue: int = 256,
        num_others: int = 0,
        log_format: str = "text",
        log_level: str = "info",
        environ: Mapping[str, str] | None = None,  # for its process, beside this one's
    ) -> None:
        self._config = config
        self._environ = {**os.environ, **(environ or {})}
        self._factory = factory
        self._logs = (log_format, log_level)
        self._max_queue = max_queue
        self._num_others = num_others
        self.give_lines: Callable[[list[socket.socket]], None] = lambda lines: None
        self.counts: dict[int, Any] = {}  # what each process that shares the engine has counted
        self._streams: dict[str, RemoteStream] = {}
        self._by_handle: dict[int, RemoteStream] = {}
        self._last_handle = -1
        self._told: dict[RemoteStream, None] = {}  # an ordered set: streams with news
        self._stats: dict[str, Any] = {}
        self._resets: deque[asyncio.Future[bool]] = deque()  # that were asked for, in order
        self._shares: deque[asyncio.Future[None]] = deque()  # of counts, that were asked for
        self._fatal: str | None = None
        self._is_closing = False
        self._line: asyncio.Transport | None = None
        # Looks since the process was last heard of. Not seconds: if the machine was suspended, that
        # is one look, however long it took.
        self._num_looks = 0
        self._looking: asyncio.TimerHandle | None = None
        self._step_seconds = 0.0  # that its step had taken then
        self.watcher: Watcher | None = None
        # Is told of each stream that was open when the process died; True: it goes on elsewhere.
        self.on_lost: Callable[[RemoteEngine, RemoteStream], bool] | None = None
        self.num_open = 0  # sequences: a request with n = 3 is three
        self.info: EngineInfo
        self.died = asyncio.Event()
        self.death: str | None = None  # why, once it has died
        self.is_asleep = False  # it was ended on purpose, and is started when it is needed

    async def sleep(self) -> None:
        """End the process until `start` is called again."""
        self.is_asleep = True
        await self.close()

    async def start(self) -> None:
        """Start the process and wait until its model is loaded. After its death: another one."""
        self._fatal = None
        self._is_closing = False
        self.died.clear()
        pairs = [socket.socketpair() for _ in range(1 + self._num_others)]
        fds = [theirs.fileno() for _, theirs in pairs]
        command = [sys.executable, "-m", "hunch.server.engine_process", *map(str, fds)]
        # Its own session: Ctrl-C on the terminal is for the HTTP side, which drains first.
        self._process = subprocess.Popen(
            command,
            pass_fds=fds,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=self._environ,
        )
        for _, theirs in pairs:
            theirs.close()
        self.give_lines([ours for ours, _ in pairs[1:]])
        await self._join(pairs[0][0])
        config = asdict(self._config)
        start = {"op": "start", "factory": self._factory, "config": config, "logs": self._logs}
        self._send(start)
        await self._ready
        self.death = None
        self.is_asleep = False

    async def _join(self, line: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._buried: asyncio.Future[None] = loop.create_future()
        self._line, _ = await loop.create_unix_connection(
            lambda: Line(self._take, self._tell, self._lose), sock=line
        )
        self._num_looks = -1
        self._look()

    def _look(self) -> None:
        self._num_looks += 1
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(LOOK_SECONDS, self._look)

    @property
    def pid(self) -> int:
        return self.info.pid

    def trouble(self) -> str | None:
        """Why no request can be served now."""
        if self.death is not None:
            return self.death
        seconds = self.silent_seconds()
        if seconds > SILENT_SECONDS:
            return f"the engine has not answered for {seconds:.0f} s"
        return None

    def silent_seconds(self) -> float:
        """How long nothing was heard of the process; a step without end counts as silence."""
        if self.is_asleep:
            return 0.0
        stuck = max(0.0, self._step_seconds - STEP_SECONDS)
        return stuck + LOOK_SECONDS * self._num_looks

    def kill(self, reason: str) -> None:
        """End a process that is of no use any more; the rest goes as if it had died by itself."""
        self._fatal = reason
        self._process.kill()

    async def submit(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        stream: bool = True,
        is_scoring: bool = False,
        detokenizer: Detokenizer | None = None,
        **options: Any,
    ) -> RemoteStream:
        """Hand a request to the engine; raises if the engine does not take it.

        With stream=False the only news are the finished output. `options` are the engine's own
        (see `Intake.check`). With is_scoring, only the prompt's scores are of interest. With a
        detokenizer, text is made here, of a single answer that has no stops and no logprobs.
        """
        self._admit(prompt_ids, params)
        output = wire.empty_output(request_id, prompt_ids, params.n)
        opened = RemoteStream(
            output, params, self.abort, is_scoring=is_scoring, detokenizer=detokenizer
        )
        opened.options = {**options, "stream": stream}
        self._hand_over(opened)
        try:
            await opened.wait_accepted()
        except asyncio.CancelledError:
            self.abort(request_id)
            raise
        return opened

    def adopt(self, stream: RemoteStream) -> None:
        """Take over a stream whose engine died: it is generated again, and goes on."""
        stream.begin_again(self.abort)
        self._hand_over(stream)

    def _hand_over(self, stream: RemoteStream) -> None:
        options = dict(stream.options)
        if stream.has_detokenizer:
            self._last_handle += 1
            options["handle"] = stream.handle = self._last_handle
            self._by_handle[stream.handle] = stream
        self._streams[stream.id] = stream
        self.num_open += stream.num_sequences
        prompt_ids, params = stream.output.prompt_token_ids, wire.dump_params(stream.asked)
        message = {"op": "submit", "id": stream.id, "prompt_ids": prompt_ids, "params": params}
        self._send({**message, "options": options})

    def abort(self, request_id: str, error: HunchError | None = None) -> None:
        """Stop a request; its reader, if there is one, is told `error`."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        self._send({"op": "abort", "id": request_id})
        self._leave(stream, "abort")
        stream.fail(error or RequestError("the request was aborted"))

    async def reset_cache(self, *, is_held_too: bool = False) -> bool:
        """Forget cached prefixes; False: requests run, and nothing was forgotten.

        With `is_held_too` they are forgotten even so, and the requests go on.
        """
        if self.death is not None:
            raise EngineError(self.death)
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append(done)
        self._send({"op": "reset", "is_held_too": is_held_too})
        return await done

    def stats(self) -> dict[str, Any]:
        """The engine's last report, at most a second old while it works."""
        return self._stats

    async def drain(self, seconds: float, reason: str = "the server is shutting down") -> None:
        """Let open requests finish for so long; tell the rest `reason`."""
        end = time.monotonic() + seconds
        while self._streams and not self.died.is_set() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        for request_id in list(self._streams):
            self.abort(request_id, EngineError(reason))

    async def close(self) -> None:
        """Tell open requests, and end the process; one that still loads is not waited for."""
        if self._line is None:
            return  # it was never started
        await self.drain(0.0)
        self._is_closing = True
        self._send({"op": "close"})
        is_ready = self._ready.done() and not self._ready.cancelled()
        try:
            await asyncio.wait_for(self._buried, KILL_SECONDS if is_ready else 0.0)
        except TimeoutError:
            self._process.kill()
            self._process.wait()
        self._line.close()

    def check_size(self, num_sequences: int) -> None:
        """Refuse what no wait would make room for."""
        most = self.info.max_rows + self._max_queue
        if num_sequences > most:
            raise RequestError(
                f"{num_sequences} sequences asked for; this server runs and queues at most {most}"
            )

    def _admit(self, prompt_ids: list[int], params: SamplingParams) -> None:
        if self.death is not None:
            raise EngineError(self.death)
        if len(prompt_ids) >= self.info.max_len:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens; with at least one token of output it "
                f"must fit the context of {self.info.max_len}"
            )
        self.check_size(params.n)
        if self.num_open + params.n > self.info.max_rows + self._max_queue:
            raise QueueFullError(
                f"{self.num_open} sequences are running or waiting; try again later"
            )

    async def share_counts(self, families: Any) -> None:
        """Tell the others what this process has counted, and learn what they have told."""
        if self.death is not None:
            return
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shares.append(done)
        self._send({"op": "counts", "families": families})
        with suppress(TimeoutError, EngineError):  # then the last ones must do
            await asyncio.wait_for(done, COUNT_SECONDS)

    def _send(self, message: wire.Message) -> None:
        if self._line is not None and not self._line.is_closing():
            self._line.write(wire.pack(message))

    def _take(self, message: wire.Message) -> None:
        self._num_looks = 0
        match message["op"]:
            case "deltas":
                if message["tokens"]:
                    self._take_tokens(message["tokens"])
                for item in message["items"]:
                    self._take_delta(item)
            case "alive":
                self._step_seconds = message["step_seconds"]
            case "stats":
                self._stats = message["stats"]
            case "counts":
                self.counts |= message["by_process"]
                if not (share := self._shares.popleft()).done():
                    share.set_result(None)
            case "accepted":
                if stream := self._streams.get(message["id"]):
                    stream.accept()
            case "refused":
                if stream := self._streams.get(message["id"]):
                    self._leave(stream, "refused")
                    stream.fail(wire.load_error(message))
            case "reset":
                if not (done := self._resets.popleft()).done():  # else nobody waits any more
                    done.set_result(message["is_done"])
            case "ready":
                self.info = EngineInfo(**message["info"])
                if not self._ready.done():  # nobody waits if loading was interrupted
                    self._ready.set_result(None)
            case "fatal":
                self._fatal = message["message"]

    def _take_tokens(self, new_tokens: list[Any]) -> None:
        told, by_handle = self._told, self._by_handle
        pairs = iter(new_tokens)
        for handle, tokens in zip(pairs, pairs, strict=True):
            stream = by_handle.get(handle)
            if stream is not None:  # else: aborted while this was on its way
                stream.push(tokens)
                told[stream] = None

    def _tell(self) -> None:
        """Once for all messages that came together."""
        told, self._told = self._told, {}
        for stream in told:
            stream.tell()

    def _take_delta(self, item: wire.Message) -> None:
        stream = self._streams.get(item["id"])
        if stream is None:
            return  # aborted while this was on its way
        stream.update(item)
        self._told[stream] = None
        if stream.output.finished:
            self._leave(stream, stream.output.outputs[0].finish_reason or "stop")

    def _forget(self, stream: RemoteStream) -> None:
        del self._streams[stream.id]
        self._by_handle.pop(stream.handle, None)
        self.num_open -= stream.num_sequences

    def _leave(self, stream: RemoteStream, reason: str) -> None:
        self._forget(stream)
        if self.watcher is not None:
            self.watcher.finished(stream, reason)

    def _lose(self) -> None:
        """The socket closed: the process is gone, or about to be."""
        if self._looking is not None:
            self._looking.cancel()
        self._burial = asyncio.create_task(self._bury())

    async def _wait_process(self) -> str:
        """How it ended."""
        return f"the engine's process {await asyncio.to_thread(ending_of, self._process)}"

    async def _bury(self) -> None:
        ending = await self._wait_process()
        if not self._buried.done():  # closing may have given up on it
            self._buried.set_result(None)
        if self._is_closing:
            return
        self.death = self._fatal or ending
        for stream in list(self._streams.values()):
            self._forget(stream)
            if self.on_lost is not None and self.on_lost(self, stream):
                continue
            if self.watcher is not None:
                self.watcher.finished(stream, "error")
            stream.fail(EngineError(self.death))
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._resets, *self._shares]
        for one in waiting:
            if not one.done():
                one.set_exception(EngineError(self.death))
        self._resets.clear()
        self._shares.clear()
        self.died.set()
