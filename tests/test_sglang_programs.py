"""What programs written for SGLang ask of its Engine, and read in its dicts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hunch.sglang as sgl
from hunch.errors import RequestError
from tiny_models import write_llama

PROMPTS = ["the model", "a b a b a b"]
GREEDY = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("programs") / "model")


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[sgl.Engine]:
    with sgl.Engine(model_path=str(model), context_length=128, kv_bytes=4_000_000) as made:
        yield made


def last_ones(chunks: list[Any]) -> list[str]:
    found = {chunk["index"]: chunk for chunk in chunks}
    assert all(found[at]["meta_info"]["finish_reason"] for at in found)
    return [found[at]["text"] for at in sorted(found)]


def test_several_answers_grow_each_under_its_index(engine: sgl.Engine) -> None:
    whole: Any = engine.generate(PROMPTS, GREEDY)
    chunks: Any = list(engine.generate(PROMPTS, GREEDY, stream=True))
    assert len(chunks) > len(PROMPTS)
    assert last_ones(chunks) == [one["text"] for one in whole]
    samples = {**GREEDY, "temperature": 1, "n": 2, "sampling_seed": 7}
    both: Any = engine.generate(PROMPTS, [samples, GREEDY])
    grown: Any = engine.generate(PROMPTS, [samples, GREEDY], stream=True)
    assert last_ones(list(grown)) == [one["text"] for one in both]
    alone: Any = list(engine.generate(PROMPTS[0], GREEDY, stream=True))
    assert "index" not in alone[-1]
    assert alone[-1]["text"] == whole[0]["text"]


def test_several_answers_grow_in_an_event_loop(model: Path) -> None:
    async def ask(engine: sgl.Engine, embedded: Any) -> None:
        whole: Any = await engine.async_generate(PROMPTS, GREEDY)
        chunks: Any = await engine.async_generate(PROMPTS, GREEDY, stream=True)
        assert last_ones([one async for one in chunks]) == [one["text"] for one in whole]
        vectors, alone = await asyncio.gather(
            engine.async_encode(PROMPTS, rid=["a", "b"]), engine.async_encode(PROMPTS[0])
        )
        assert [one["meta_info"]["id"] for one in vectors] == ["a", "b"]
        assert alone["embedding"] == vectors[0]["embedding"] == embedded["embedding"]
        long = {**GREEDY, "max_new_tokens": 100}
        left: Any = await engine.async_generate(PROMPTS, long, stream=True)
        async for _ in left:
            break
        await left.aclose()
        while engine.stats()["num_running"]:
            await asyncio.sleep(0.01)
        wrong: Any = await engine.async_generate(["a " * 500, "a"], GREEDY, stream=True)
        with pytest.raises(RequestError, match="context"):
            [one async for one in wrong]

    with sgl.Engine(model_path=str(model), context_length=128, kv_bytes=4_000_000) as engine:
        asyncio.run(ask(engine, engine.encode(PROMPTS[0])))


def test_names_and_salts_of_requests(engine: sgl.Engine) -> None:
    def ids(found: Any) -> list[str]:
        return [one["meta_info"]["id"] for one in found]

    assert ids([engine.generate(PROMPTS[0], GREEDY, rid="mine")]) == ["mine"]
    assert ids(engine.generate(PROMPTS, GREEDY, rid=["a", "b"], priority=3)) == ["a", "b"]
    assert ids(engine.generate(PROMPTS, GREEDY, rid="a")) == ["a_0", "a_1"]
    assert ids(engine.encode(PROMPTS, rid=["a", "b"])) == ["a", "b"]

    def num_cached(**salt: Any) -> int:
        found: Any = engine.generate(None, GREEDY, list(range(3, 43)), **salt)
        return int(found["meta_info"]["cached_tokens"])

    assert num_cached(cache_salt="s") == 0
    assert num_cached(cache_salt="s") > 0
    assert num_cached(cache_salt="t") == 0
    with pytest.raises(RequestError, match="one for each of the prompts"):
        engine.generate(PROMPTS, GREEDY, rid=["a"])


def test_other_arguments_may_ask_for_nothing(engine: sgl.Engine) -> None:
    plain: Any = engine.generate(PROMPTS, GREEDY)
    nothing = {"lora_path": [None, None], "external_trace_header": {}, "image_data": None}
    other: Any = engine.generate(PROMPTS, GREEDY, return_hidden_states=False, **nothing)
    assert [one["text"] for one in other] == [one["text"] for one in plain]
    assert len(engine.encode(PROMPTS, image_data=None, dimensions=None)) == 2
    for wrong, word in (
        ({"lora_path": [None, "a"]}, "merges one adapter"),
        ({"return_routed_experts": True}, "stay inside"),
        ({"bootstrap_host": "a"}, "one engine"),
        ({"foo": 1}, "foo: not known here"),
    ):
        with pytest.raises(RequestError, match=word):
            engine.generate(PROMPTS, GREEDY, **wrong)
    with pytest.raises(RequestError, match="length 1 again"):
        engine.encode("a", dimensions=8)


def test_its_arguments_are_told(engine: sgl.Engine, model: Path) -> None:
    assert engine.server_args.model_path == str(model)
    assert engine.tokenizer_manager.server_args.context_length == 128
    assert engine.tokenizer_manager.model_config.max_model_len == 128


def test_scores_of_a_prompt_alone(engine: sgl.Engine) -> None:
    """What programs do that compare texts by their likelihood."""
    asked = {"return_logprob": True, "logprob_start_len": 0}
    whole: Any = engine.generate(PROMPTS, GREEDY, **asked)
    alone: Any = engine.generate(PROMPTS, {"temperature": 0, "max_new_tokens": 0}, **asked)
    for one, other in zip(alone, whole, strict=True):
        about = one["meta_info"]
        scores = about["input_token_logprobs"]
        assert scores == other["meta_info"]["input_token_logprobs"]
        assert len(scores) > 1
        assert (one["text"], one["output_ids"], about["output_token_logprobs"]) == ("", [], [])
        assert about["completion_tokens"] == 0
        assert about["finish_reason"] == {"type": "length", "length": 0}
