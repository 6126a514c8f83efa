"""Tells routers which prefixes are in the KV cache: events over ZeroMQ, in the form of vLLM's.

A message has three frames: the topic, a running number (8 bytes, big-endian), and a batch in
MessagePack: `[time, events, data_parallel_rank]` with events

    ["BlockStored", hashes, parent's hash or nil, token ids, block size, nil, "GPU", nil]
    ["BlockRemoved", hashes, "GPU"]

as Dynamo's and llm-d's routers read them. A router that missed some asks the replay endpoint for
everything from a number on.
"""

from __future__ import annotations

import logging
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from hunch.config import KVEvents
from hunch.errors import ConfigError

log = logging.getLogger("hunch")

END = (-1).to_bytes(8, "big", signed=True)  # the number after the last message of a replay
WAIT_SECONDS = 0.05  # between two looks for requests of a replay
LEAVE_SECONDS = 1.0
MEDIUM = "GPU"  # the name routers know for the memory a model computes with


class KVEventLog:
    """Collects what happens to blocks in a step, and publishes it when the step is over."""

    def __init__(self, publisher: Publisher, block_size: int) -> None:
        self._publisher, self._block_size = publisher, block_size
        self._events: list[list[Any]] = []
        self._last: bytes | None = None  # the block of the last event, if it stored one
        self._told: set[bytes] = set()  # blocks that can be found, as far as others know

    def stored(self, key: bytes, parent: bytes | None, token_ids: Sequence[int]) -> None:
        """A full block can be found from now on."""
        self._told.add(key)
        number = hash_of(key)
        if self._last is not None and parent == self._last:
            event = self._events[-1]
            event[1].append(number)
            event[3].extend(token_ids)
        else:
            before = None if parent is None else hash_of(parent)
            tokens = list(token_ids)
            self._events.append(
                ["BlockStored", [number], before, tokens, self._block_size, None, MEDIUM, None]
            )
        self._last = key

    def removed(self, key: bytes) -> None:
        """A block can no longer be found. Of one with a salt nobody was told."""
        if key not in self._told:
            return
        self._told.remove(key)
        if self._events and self._events[-1][0] == "BlockRemoved":
            self._events[-1][1].append(hash_of(key))
        else:
            self._events.append(["BlockRemoved", [hash_of(key)], MEDIUM])
        self._last = None

    def flush(self) -> None:
        if self._events:
            self._publisher.publish(self._events)
            self._events, self._last = [], None

    def close(self) -> None:
        self.flush()
        self._publisher.close()


def log_of(config: KVEvents | None, block_size: int) -> KVEventLog | None:
    """A log for this config; None: there is no publisher."""
    return None if config is None else KVEventLog(Publisher(config), block_size)


def hash_of(key: bytes) -> int:
    """A block's number for others: equal text from the first token on, equal number."""
    return int.from_bytes(key[:8], "big") >> 1  # some read it as a signed number


class Publisher:
    """Sends batches from a thread of its own; a step never waits for it."""

    def __init__(self, config: KVEvents) -> None:
        try:
            import zmq
        except ModuleNotFoundError as error:
            raise ConfigError("kv_events_config needs pyzmq: pip install pyzmq") from error
        self._config = config
        self._queue: queue.Queue[tuple[int, list[Any]] | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next, self._num_lost, self._is_over = 0, 0, False
        context: Any = zmq.Context.instance()
        self._pub, self._replay = context.socket(zmq.PUB), None
        self._pub.set_hwm(config.hwm)
        try:
            endpoint = config.endpoint
            if "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://")):
                self._pub.bind(config.endpoint)
            else:
                self._pub.connect(config.endpoint)
            if config.replay_endpoint:
                self._replay = context.socket(zmq.ROUTER)
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError as error:
            self._pub.close(linger=0)
            if self._replay is not None:
                self._replay.close(linger=0)
            raise ConfigError(f"kv_events_config: {config.endpoint}: {error}") from error
        self._thread = threading.Thread(target=self._run, daemon=True, name="kv-events")
        self._thread.start()

    def publish(self, events: list[Any]) -> None:
        """Queue a batch. If the queue is full, it is lost, and its number is missing."""
        try:
            self._queue.put_nowait(
                (self._next, [time.time(), events, self._config.data_parallel_rank])
            )
        except queue.Full:
            if not self._num_lost:
                log.warning("KV events come faster than they can be sent: some are left out")
            self._num_lost += 1
        self._next += 1

    def close(self) -> None:
        """Wait a moment for the queue to be sent, then close."""
        self._is_over = True
        self._thread.join(LEAVE_SECONDS)
        for socket in (self._pub, self._replay):
            if socket is not None and not self._thread.is_alive():
                socket.close(linger=100)

    def _run(self) -> None:
        while not (self._is_over and self._queue.empty()):
            if self._replay is not None and self._replay.poll(0):
                self._answer()
            try:
                item = self._queue.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                continue
            if item is not None:
                number, payload = item[0].to_bytes(8, "big"), pack(item[1])
                self._kept.append((number, payload))
                self._pub.send_multipart((self._config.topic.encode(), number, payload))

    def _answer(self) -> None:
        """Answer a request for everything from a number on, as far as it is kept."""
        assert self._replay is not None
        *envelope, first = self._replay.recv_multipart()
        if len(first) != 8 or len(envelope) != 2:
            return
        for number, payload in list(self._kept):
            if number >= first:  # big-endian: bytes compare as the numbers do
                self._replay.send_multipart((*envelope, number, payload))
        self._replay.send_multipart((*envelope, END, b""))


def pack(value: Any) -> bytes:
    """MessagePack of None, whole numbers, floats, texts and lists."""
    parts: list[bytes] = []
    _pack(value, parts)
    return b"".join(parts)


def _pack(value: Any, parts: list[bytes]) -> None:
    if value is None:
        parts.append(b"\xc0")
    elif isinstance(value, float):
        parts.append(struct.pack(">Bd", 0xCB, value))
    elif isinstance(value, str):
        data = value.encode()
        assert len(data) < 256
        parts.append(struct.pack(">BB", 0xD9, len(data)) + data)
    elif isinstance(value, list):
        parts.append(struct.pack(">BI", 0xDD, len(value)))
        for item in value:
            _pack(item, parts)
    else:
        assert value >= 0
        if value < 0x80:
            parts.append(bytes([value]))
        elif value < 1 << 32:
            parts.append(struct.pack(">BI", 0xCE, value))
        else:
            parts.append(struct.pack(">BQ", 0xCF, value))
