"""What routers are told of the KV cache, read by vLLM's published message types.

The types are those of vLLM's example of a subscriber; msgspec decodes them.
"""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

import msgspec
import zmq

from hunch import LLM, SamplingParams
from hunch.config import KVEvents
from hunch.engine.blocks import BlockPool, BlockTable
from hunch.engine.kv_events import END, KVEventLog, hash_of, pack
from hunch.errors import ConfigError
from hunch.server.replicas import as_replica
from tiny_models import write_llama


class Event(msgspec.Struct, array_like=True, tag=True):  # type: ignore[misc]
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):  # type: ignore[misc]
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Router:
    """What a router knows of one engine: the tokens of every prefix that is there."""

    def __init__(self) -> None:
        self.decoder = msgspec.msgpack.Decoder(Batch)
        self.prefixes: dict[int, list[int]] = {}

    def take(self, payload: bytes) -> None:
        for event in self.decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                parent, size = event.parent_block_hash, event.block_size
                before = [] if parent is None else self.prefixes[parent]
                for place, number in enumerate(event.block_hashes):
                    before = before + event.token_ids[place * size : (place + 1) * size]
                    self.prefixes[number] = before
            elif isinstance(event, BlockRemoved):
                for number in event.block_hashes:
                    del self.prefixes[number]


@pytest.fixture
def ends(tmp_path: Path) -> dict[str, Any]:
    return {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "topic": "kv@engine@tiny",
    }


def replayed(context: Any, endpoint: str) -> list[tuple[int, bytes]]:
    """All messages so far, by the endpoint for who came late."""
    found: list[tuple[int, bytes]] = []
    with context.socket(zmq.DEALER) as asking:
        asking.connect(endpoint)
        asking.send_multipart((b"", (0).to_bytes(8, "big")))
        while asking.poll(5000):
            _, number, payload = asking.recv_multipart()
            if number == END:
                break
            found.append((int.from_bytes(number, "big"), payload))
    return found


def test_a_router_knows_what_is_cached(ends: dict[str, Any], tmp_path: Path) -> None:
    model = str(write_llama(tmp_path / "model", width=32, layers=1))
    arguments: Any = {"num_blocks": 12, "block_size": 4, "max_model_len": 40, "speculate": "ngram"}
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    prompts = [[10 + n, 11, 12, 13, 14 + n, 15, 16, 17, 18] for n in range(6)]
    with zmq.Context() as context, LLM(model, kv_events_config=ends, **arguments) as llm:
        outs = [llm.generate([prompt], params)[0] for prompt in prompts]
        texts = [
            prompt + out.outputs[0].token_ids for prompt, out in zip(prompts, outs, strict=True)
        ]
        messages, router = replayed(context, ends["replay_endpoint"]), Router()
        for _, payload in messages:
            router.take(payload)
        with context.socket(zmq.SUB) as heard:
            heard.connect(ends["endpoint"])
            heard.setsockopt(zmq.SUBSCRIBE, b"kv@engine")
            for number in range(100):  # until the subscription is known to the other side
                llm.generate([[90 + number % 9, number, 3, 4, 5]], SamplingParams(max_tokens=1))
                if heard.poll(20):
                    break
            topic, number, payload = heard.recv_multipart()
        known = {hash_of(key) for key in llm.engine._scheduler.pool._by_key}
        late = Router()
        for _, payload in replayed(context, ends["replay_endpoint"]):
            late.take(payload)
    assert [number for number, _ in messages] == list(range(len(messages)))
    assert topic == b"kv@engine@tiny"
    assert int.from_bytes(number, "big") >= len(messages)
    assert set(late.prefixes) == known  # what was removed to make room is not in it
    found = router.prefixes.values()
    assert len(found) < sum(len(text) // 4 for text in texts)
    assert all(any(text[: len(one)] == one for text in texts) for one in found)


class Told:
    def __init__(self) -> None:
        self.batches: list[list[Any]] = []

    def publish(self, events: list[Any]) -> None:
        self.batches.append(events)

    def close(self) -> None: ...


def test_blocks_in_a_row_are_one_event() -> None:
    told = Told()
    log = KVEventLog(told, 2)  # type: ignore[arg-type]
    a, b, c = (bytes([n]) * 16 for n in (1, 2, 3))
    log.stored(a, None, [5, 6])
    log.stored(b, a, [7, 8])
    log.stored(c, None, [9, 9])
    log.removed(a)
    log.removed(c)
    log.stored(a, None, [5, 6])
    log.flush()
    log.flush()
    (events,) = told.batches
    assert [event[0] for event in events] == [
        "BlockStored", "BlockStored", "BlockRemoved", "BlockStored",
    ]  # fmt: skip
    assert events[0][1:5] == [[hash_of(a), hash_of(b)], None, [5, 6, 7, 8], 2]
    assert events[2][1] == [hash_of(a), hash_of(c)]
    Router().decoder.decode(pack([1.5, events, 0]))


def test_of_blocks_with_a_salt_nothing_is_told() -> None:
    """Neither that they are there nor that they are gone: others' are not theirs."""
    told = Told()
    pool = BlockPool(3, 2, events=KVEventLog(told, 2))  # type: ignore[arg-type]
    tables = {salt: BlockTable(salt=salt) for salt in (b"", b"mine", b"yours")}
    text = [5, 6, 7]
    for table in tables.values():
        hit = pool.find(table, text, 2)
        assert hit.num_computed == (0,)
        pool.open(table, hit, 2)
        pool.publish(table, text, (2,))
    for table in tables.values():
        pool.release(table)
    assert pool.reset()
    assert pool.events is not None
    pool.events.flush()
    number = hash_of(tables[b""].keys[0])
    assert told.batches == [
        [
            ["BlockStored", [number], None, [5, 6], 2, None, "GPU", None],
            ["BlockRemoved", [number], "GPU"],
        ]
    ]


def test_every_value_is_read_back() -> None:
    value = [None, 0, 127, 128, 2**31, 2**32, 2**64 - 1, 0.25, "", "GPU", [[1]], list(range(300))]
    assert msgspec.msgpack.decode(pack(value)) == value


def test_replicas_have_ports_of_their_own_and_mistakes_are_named(tmp_path: Path) -> None:
    from hunch.compat import config_from_vllm

    given = {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557"}
    config = config_from_vllm(model="m", kv_events_config=json.dumps(given))
    third = as_replica(config, 2).cache.kv_events
    assert third is not None
    assert (third.endpoint, third.data_parallel_rank) == ("tcp://*:5559", 2)
    assert KVEvents.parse('{"enable_kv_cache_events": false}') is None
    for text, word in (("{", "JSON"), ("[]", "dict"), ('{"enpoint": "a"}', "endpoint")):
        with pytest.raises(ConfigError, match=word):
            KVEvents.parse(text)
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        config_from_vllm(model="m", kv_events_config=given, enable_prefix_caching=False)
