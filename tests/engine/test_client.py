"""The engine's thread: streams, aborts, slow readers, failures and the end."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.fake_runner import FakeCodec, FakeRunner, expected_tokens
from hunch.config import Config, ScheduleConfig
from hunch.engine.client import EngineClient
from hunch.engine.engine import Engine
from hunch.errors import EngineError, QueueFullError, RequestError
from hunch.types import SamplingParams, StepPlan

LONG = SamplingParams(max_tokens=150, ignore_eos=True, seed=1)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)


class Gate(FakeRunner):
    """Steps only while it is open."""

    def __init__(self, **options: int) -> None:
        super().__init__(num_blocks=400, **options)
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0
        self.fails_at: int | None = None

    def submit(self, plan: StepPlan) -> None:
        assert self.gate.wait(30)
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise RuntimeError("the device fell off")
        super().submit(plan)


def make(*, max_queue: int | None = None, **options: int) -> EngineClient:
    config = Config(schedule=ScheduleConfig(max_queue=max_queue))
    return EngineClient(Engine(config, Gate(**options), FakeCodec()))


@pytest.fixture(params=[0, 1], ids=["depth0", "depth1"])
def client(request):
    with make(depth=request.param, max_nodes=3) as client:
        yield client


def wanted(client: EngineClient, prompt: list[int], params: SamplingParams) -> list[int]:
    return expected_tokens(client.engine.check("x", prompt, params).requests[0])


def test_a_stream_grows_to_the_whole_answer(client):
    lengths = []
    for output in client.submit([1, 2, 3], LONG, prompt="abc"):
        lengths.append(len(output.outputs[0].token_ids))
    assert lengths == sorted(lengths)
    assert output.finished
    assert output.prompt == "abc"
    assert output.outputs[0].token_ids == wanted(client, [1, 2, 3], LONG)


def test_a_result_can_be_waited_for(client):
    stream = client.submit([1, 2, 3], SHORT, stream=False)
    assert stream.result(10).outputs[0].token_ids == wanted(client, [1, 2, 3], SHORT)
    client.engine.runner.gate.clear()
    late = client.submit([1, 2, 3], SHORT)
    with pytest.raises(TimeoutError):
        late.result(0.01)
    client.engine.runner.gate.set()
    assert late.result(10).finished


def test_many_threads_at_once(client):
    def ask(number: int) -> list[int]:
        params = SamplingParams(max_tokens=30, ignore_eos=True, seed=number)
        *_, last = client.submit([number, 2], params)
        return last.outputs[0].token_ids

    with ThreadPoolExecutor(12) as threads:
        answers = list(threads.map(ask, range(24)))
    for number, answer in enumerate(answers):
        params = SamplingParams(max_tokens=30, ignore_eos=True, seed=number)
        assert answer == wanted(client, [number, 2], params)


def test_asyncio_readers(client):
    async def ask(number: int) -> list[int]:
        params = SamplingParams(max_tokens=30, ignore_eos=True, seed=number)
        async for output in client.submit([number, 2], params):
            last = output
        return last.outputs[0].token_ids

    async def ask_all() -> list[list[int]]:
        return await asyncio.gather(*(ask(number) for number in range(24)))

    for number, answer in enumerate(asyncio.run(ask_all())):
        params = SamplingParams(max_tokens=30, ignore_eos=True, seed=number)
        assert answer == wanted(client, [number, 2], params)


def test_a_reader_whose_loop_is_gone_harms_nobody(client):
    async def leave_early() -> None:
        async for _ in client.submit([1], LONG):
            return

    asyncio.run(leave_early())
    assert client.submit([1, 2], SHORT).result(10).finished


def test_a_slow_reader_gets_the_newest_and_stalls_nobody(client):
    slow = client.submit([1, 2, 3], LONG)
    assert client.submit([4, 5], LONG).result(20).finished
    assert slow.result(20).finished
    (output,) = list(slow)
    assert output.outputs[0].token_ids == wanted(client, [1, 2, 3], LONG)


def test_an_abort_takes_effect_within_one_step():
    with make() as client:
        runner = client.engine.runner
        stream = client.submit([1], LONG)
        next(iter(stream))
        runner.gate.clear()
        time.sleep(0.05)
        stream.abort()
        num_steps = runner.num_steps
        runner.gate.set()
        output = stream.result(10)
        assert output.outputs[0].finish_reason == "abort"
        assert runner.num_steps <= num_steps + 1
        client.abort(stream.request_id)  # gone already: no error


def test_errors_of_a_request_are_raised_where_it_is_submitted(client):
    with pytest.raises(RequestError, match="empty"):
        client.submit([], SHORT)
    client.engine.runner.gate.clear()
    client.submit([1], SHORT, request_id="a")
    with pytest.raises(RequestError, match="in use"):
        client.submit([1], SHORT, request_id="a")
    client.engine.runner.gate.set()


def test_the_queue_is_bounded():
    with make(max_queue=2, max_rows=1) as client:
        client.engine.runner.gate.clear()
        for _ in range(3):
            client.submit([1], SHORT)
        with pytest.raises(QueueFullError):
            client.submit([1], SHORT)
        client.engine.runner.gate.set()


def test_a_failure_reaches_every_stream_and_later_submits():
    client = make()
    runner = client.engine.runner
    runner.gate.clear()
    streams = [client.submit([number + 1], LONG) for number in range(3)]
    runner.fails_at = 5
    runner.gate.set()
    for stream in streams:
        with pytest.raises(EngineError, match="the device fell off") as caught:
            list(stream)
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(EngineError):
            stream.result(1)
    with pytest.raises(EngineError, match="the device fell off"):
        client.submit([1], SHORT)
    assert not client.is_alive
    client.close()


def test_a_failure_reaches_asyncio_readers():
    client = make()
    client.engine.runner.fails_at = 3

    async def read() -> None:
        async for _ in client.submit([1], LONG):
            pass

    with pytest.raises(EngineError, match="fell off"):
        asyncio.run(read())
    client.close()


def test_an_engine_that_cannot_be_built_says_so():
    def build() -> Engine:
        raise RequestError("no such model")

    with pytest.raises(RequestError, match="no such model"):
        EngineClient(build)


def test_an_engine_is_built_in_its_own_thread():
    names = []

    def build() -> Engine:
        names.append(threading.current_thread().name)
        return Engine(Config(), Gate(), FakeCodec())

    with EngineClient(build) as client:
        assert client.submit([1], SHORT).result(10).finished
    assert names == ["hunch-engine"]


def test_closing_drains_then_aborts():
    client = make()
    done = client.submit([1], LONG)
    client.close(drain=30)
    assert done.result(0).outputs[0].finish_reason == "length"
    assert client.engine.runner.is_closed
    with pytest.raises(EngineError, match="closing"):
        client.submit([1], SHORT)

    client = make()
    client.engine.runner.gate.clear()
    cut = client.submit([1], LONG)
    threading.Timer(0.1, client.engine.runner.gate.set).start()
    client.close(drain=0)
    assert cut.result(0).outputs[0].finish_reason == "abort"
    assert client.engine.stats()["kv_usage"] == 0


def test_stats_can_be_read_while_it_runs(client):
    stream = client.submit([1, 2], LONG)
    while not stream._is_done:
        stats = client.stats()
        assert 0 <= stats["kv_usage"] <= 1
    assert client.stats()["generation_tokens"] == 150
