"""What programs written for vLLM ask of requests, and read in their outputs."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hunch import LLM, AsyncLLM, EngineArgs, PoolingParams, SamplingParams, get_tokenizer
from hunch.errors import RequestError
from tiny_models import write_llama

PROMPTS = ["the model", "a b a b a b", "one two three"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {"max_num_seqs": 1, "kv_bytes": 4_000_000, "threads": 1}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = write_llama(tmp_path_factory.mktemp("programs") / "model")
    with LLM(str(model), speculate="ngram", **SMALL) as made:
        yield made


def in_order_of_start(outputs: list[Any]) -> list[str]:
    return [one.prompt for one in sorted(outputs, key=lambda o: o.metrics.first_scheduled_time)]


def test_requests_of_lower_priority_go_first(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, priority=[2, 0, 1])
    assert [one.prompt for one in outputs] == PROMPTS
    expected = [PROMPTS[1], PROMPTS[2], PROMPTS[0]]
    assert in_order_of_start(outputs) == expected
    engine, done = llm.llm_engine, []
    for prompt, priority in zip(PROMPTS, [2, 0, 1], strict=True):
        engine.add_request(prompt, prompt, GREEDY, priority=priority)
    while engine.has_unfinished_requests():
        done += [output for output in engine.step() if output.finished]
    assert in_order_of_start(done) == expected


def test_priorities_of_requests_of_one_loop(llm: LLM) -> None:
    async def last(engine: AsyncLLM, prompt: str, priority: int) -> Any:
        return [one async for one in engine.generate(prompt, GREEDY, priority=priority)][-1]

    async def ask() -> list[Any]:
        with AsyncLLM.from_llm(llm.sibling("off")) as engine:
            await engine.pause_generation(mode="keep")
            pairs = zip(PROMPTS, [2, 0, 1], strict=True)
            tasks = [asyncio.create_task(last(engine, *pair)) for pair in pairs]
            while engine.stats()["num_waiting"] < len(PROMPTS):
                await asyncio.sleep(0.01)
            await engine.resume_generation()
            return await asyncio.gather(*tasks)

    assert in_order_of_start(asyncio.run(ask())) == [PROMPTS[1], PROMPTS[2], PROMPTS[0]]


@pytest.mark.parametrize(
    ("priority", "words"),
    [([1], "3 prompts but 1 priorities"), (1, "a number for each"), (["1", 1, 1], "whole number")],
)
def test_priorities_that_are_none(llm: LLM, priority: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(PROMPTS, GREEDY, priority=priority)


def test_prefixes_are_cached_under_their_salt(llm: LLM) -> None:
    def num_cached(**salt: Any) -> int:
        prompt = {"prompt_token_ids": list(range(3, 43)), **salt}
        return llm.generate(prompt, GREEDY)[0].num_cached_tokens

    assert num_cached(cache_salt="a") == 0
    assert num_cached(cache_salt="a") > 0
    assert num_cached(cache_salt="b") == 0
    assert num_cached() == 0
    with pytest.raises(RequestError, match="cache_salt=3 must be a text"):
        num_cached(cache_salt=3)


def test_parts_of_a_prompt_that_are_nothing_ask_for_nothing(llm: LLM) -> None:
    nothing: dict[str, Any] = {
        "multi_modal_data": None,
        "mm_processor_kwargs": {},
        "prompt_token_ids": None,
    }
    (plain,) = llm.generate("the model", GREEDY)
    (other,) = llm.generate({"prompt": "the model", **nothing}, GREEDY)
    assert other.outputs[0].token_ids == plain.outputs[0].token_ids
    ids = numpy.array(plain.prompt_token_ids)
    (array,) = llm.generate({"prompt_token_ids": ids, "multi_modal_data": {}}, GREEDY)
    assert array.outputs[0].token_ids == plain.outputs[0].token_ids
    with pytest.raises(RequestError, match="text alone"):
        llm.generate({"prompt": "a", "multi_modal_data": {"image": 1}}, GREEDY)


def test_without_parameters_a_model_samples_as_its_makers_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_llama(tmp_path / "model")
    advice = {"temperature": 0.6, "top_k": 5, "max_new_tokens": 9}
    (model / "generation_config.json").write_text(json.dumps(advice))
    with LLM(str(model), **SMALL) as llm:
        usual = replace(llm.get_default_sampling_params(), seed=3)
        assert (usual.temperature, usual.top_k, usual.max_tokens) == (0.6, 5, 9)
        expected = llm.generate(PROMPTS, usual)
        asked: list[Any] = []
        answer = llm._answer

        def seeded(batch: Any, each: Any, *rest: Any) -> Any:
            asked.extend(each)
            return answer(batch, [replace(one, seed=3) for one in each], *rest)

        monkeypatch.setattr(llm, "_answer", seeded)
        assert ids_of(llm.generate(PROMPTS)) == ids_of(expected)
        assert len(ids_of(llm.generate(PROMPTS[0], {"temperature": 0}))[0]) == 16
        assert [one.temperature for one in asked] == [0.6] * 3 + [0]
    with LLM(str(model), generation_config="vllm", **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()
        with AsyncLLM.from_llm(llm) as engine:
            (output,) = asyncio.run(final(engine, PROMPTS[0]))
        assert len(output.outputs[0].token_ids) == 16


def ids_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


async def final(engine: AsyncLLM, prompt: str) -> list[Any]:
    return [one async for one in engine.generate(prompt) if one.finished]


def test_outputs_have_what_vllms_have(llm: LLM) -> None:
    (output,) = llm.generate("the model", GREEDY)
    (answer,) = output.outputs
    assert answer.finished()
    assert not replace(answer, finish_reason=None).finished()
    assert answer.lora_request is answer.routed_experts is None
    for name in ("lora_request", "encoder_prompt", "encoder_prompt_token_ids"):
        assert getattr(output, name) is None
    assert output.kv_transfer_params is None
    assert output.stats
    assert answer.stats
    assert "stats" not in repr(output)  # a program that prints it shows the answer
    (embedded,) = llm.embed("the model")
    assert embedded.outputs.hidden_size == len(embedded.outputs.embedding)
    assert embedded.num_cached_tokens == 0


def test_several_requests_are_aborted_by_their_ids(llm: LLM) -> None:
    async def last(engine: AsyncLLM, name: str) -> Any:
        params = SamplingParams(max_tokens=400, ignore_eos=True)
        return [one async for one in engine.generate(PROMPTS[0], params, name)][-1]

    async def ask() -> list[Any]:
        with AsyncLLM.from_llm(llm.sibling("off")) as engine:
            tasks = [asyncio.create_task(last(engine, name)) for name in ("a", "b")]
            while engine.stats()["num_running"] + engine.stats()["num_waiting"] < 2:
                await asyncio.sleep(0.01)
            await engine.abort(["a", "b"])
            return await asyncio.gather(*tasks)

    assert [one.outputs[0].finish_reason for one in asyncio.run(ask())] == ["abort"] * 2


def test_what_an_asynchronous_engine_says_of_itself(llm: LLM) -> None:
    async def ask() -> None:
        engine = AsyncLLM.from_llm(llm.sibling("off"))
        nothing = {"data_parallel_rank": None, "prompt_text": None, "trace_headers": None}
        assert [one async for one in engine.generate(PROMPTS[0], GREEDY, **nothing)]
        assert await engine.get_model_config() == engine.model_config == llm.model_config
        assert engine.tokenizer is await engine.get_tokenizer()
        assert (engine.is_running, engine.is_stopped, engine.errored) == (True, False, False)
        engine.shutdown()
        assert (engine.is_running, engine.is_stopped) == (False, True)
        assert "it was shut down" in str(engine.dead_error)

    asyncio.run(ask())


def test_vllms_other_arguments_of_embed_may_ask_for_nothing(llm: LLM) -> None:
    nothing = {"pooling_params": None, "truncate_prompt_tokens": None, "lora_request": None}
    assert llm.embed("the model", **nothing)[0].outputs == llm.embed("the model")[0].outputs
    assert llm.encode("the model", **nothing)[0].outputs.data.norm() == pytest.approx(1.0)


def test_vectors_by_vllms_pooling_params(llm: LLM) -> None:
    (whole,) = llm.embed("the model", normalize=False)
    states = torch.tensor(whole.outputs.embedding)
    for name in ("use_activation", "normalize"):
        asked = PoolingParams(**{name: False, "dimensions": len(states)})
        assert llm.encode("the model", asked)[0].outputs.data.equal(states)
        (same,) = llm.embed("the model", pooling_params=asked)
        assert same.outputs == whole.outputs
    (vector,) = llm.encode("the model", PoolingParams(), pooling_task="embed")
    assert vector.outputs.data.tolist() == pytest.approx((states / states.norm()).tolist())

    async def ask() -> Any:
        with AsyncLLM.from_llm(llm.sibling("off")) as engine:
            return [one async for one in engine.encode("the model")]

    (output,) = asyncio.run(ask())
    assert output.finished
    assert output.outputs.data.equal(vector.outputs.data)


def test_what_vectors_cannot_be(llm: LLM) -> None:
    with pytest.raises(RequestError, match="task='score' is not covered"):
        PoolingParams(task="score")
    with pytest.raises(RequestError, match="pooling_task='token_embed' is not covered"):
        llm.encode("the model", pooling_task="token_embed")
    with pytest.raises(RequestError, match="none of them can be left out"):
        llm.embed("the model", pooling_params=PoolingParams(dimensions=4))


def test_an_llm_by_its_engine_arguments(llm: LLM) -> None:
    with LLM.from_engine_args(EngineArgs(llm.config.model.model, **SMALL)) as other:
        assert ids_of(other.generate(PROMPTS, GREEDY)) == ids_of(llm.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("name", ["vllm_config", "add_lora", "is_sleeping", "reset_mm_cache"])
def test_what_engines_of_vllm_have_and_hunch_has_not(llm: LLM, name: str) -> None:
    with pytest.raises(AttributeError, match="is not covered: "):
        getattr(llm.llm_engine, name)


def test_a_tokenizer_alone_is_that_of_the_model(llm: LLM) -> None:
    alone = get_tokenizer(llm.config.model.model, trust_remote_code=True)
    assert alone.encode(PROMPTS[1]) == llm.get_tokenizer().encode(PROMPTS[1])
