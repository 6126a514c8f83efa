"""Messages between the two processes arrive as they were sent."""

from __future__ import annotations

import asyncio
from dataclasses import asdict

import pytest

from hunch.config import Config, ModelConfig, SpecConfig
from hunch.errors import GrammarError, QueueFullError
from hunch.server import wire
from hunch.server.remote_stream import RemoteStream
from hunch.types import (
    CompletionOutput,
    DraftTrace,
    Logprob,
    RequestOutput,
    SamplingParams,
    Speculation,
)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_messages_survive_any_cutting(size: int) -> None:
    messages = [{"op": "a", "x": "é" * 50}, {"op": "b"}, {"op": "c", "y": list(range(500))}]
    data = b"".join(map(wire.pack, messages))
    unpacker = wire.Unpacker()
    got = []
    for start in range(0, len(data), size):
        got += unpacker.feed(data[start : start + size])
    assert got == messages


def test_params_and_config_come_back_equal() -> None:
    params = SamplingParams(
        n=3,
        temperature=0.5,
        logit_bias={5: -3.0, 70000: 1.0},
        stop=["a", "b"],
        stop_token_ids=[4],
        seed=2**63 - 1,
        speculation=Speculation(mode="off", max_nodes=3, trace=True),
    )
    unpacker = wire.Unpacker()
    (message,) = unpacker.feed(wire.pack(wire.dump_params(params)))
    assert wire.load_params(message) == params
    config = Config(
        model=ModelConfig(model="x", seed=4), spec=SpecConfig.parse("ngram:max_match=3")
    )
    (message,) = unpacker.feed(wire.pack(asdict(config)))
    assert wire.load_config(message) == config


@pytest.mark.parametrize("error", [QueueFullError("full"), GrammarError("bad")])
def test_errors_keep_their_class_and_text(error: Exception) -> None:
    back = wire.load_error(wire.dump_error(error))
    assert type(back) is type(error)
    assert str(back) == str(error)


def test_deltas_add_up_to_the_output() -> None:
    def choice(count: int, finish: str | None = None) -> CompletionOutput:
        return CompletionOutput(
            index=0,
            text="abcdef"[:count],
            token_ids=list(range(count)),
            logprobs=[{i: Logprob(logprob=-1.0 * i, rank=1)} for i in range(count)],
            finish_reason=finish,
            seed=9 if finish else 0,
            stats={"steps": 3} if finish else {},
            trace=[DraftTrace(tokens=[1], parents=[-1], accepted=[]) for _ in range(count)],
        )

    def output(count: int, finish: str | None = None) -> RequestOutput:
        return RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=[1, 2],
            outputs=[choice(count, finish)],
            finished=finish is not None,
            prompt_logprobs=[None, {2: Logprob(logprob=-2.0)}],
            stats={"steps": 3} if finish else {},
        )

    sent = wire.Sent()
    got = wire.empty_output("r", [1, 2], 1)
    for step in (output(1), output(4), output(4), output(6, "stop")):
        (item,) = wire.Unpacker().feed(wire.pack(wire.dump_delta(step, sent)))
        wire.apply_delta(got, item)
    assert got == output(6, "stop")


def test_tokens_that_were_told_before_are_not_told_again() -> None:
    async def told() -> list[int]:
        stream = RemoteStream(wire.empty_output("r", [1], 1), SamplingParams(), lambda name: None)
        stream.push([4, 5, 6])
        stream.begin_again(lambda name: None)
        for tokens in ([4, 5], [6, 7], [8]):
            stream.push(tokens)
        return stream.output.outputs[0].token_ids

    assert asyncio.run(told()) == [4, 5, 6, 7, 8]
