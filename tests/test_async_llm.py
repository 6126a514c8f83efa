"""AsyncLLM: generators over one engine, beside a plain LLM's answers; and vLLM's ways to ask."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hunch import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    GuidedDecodingParams,
    RequestOutputKind,
    SamplingParams,
)
from hunch.arguments import Arguments
from hunch.compat import known_arguments
from hunch.errors import EngineError, RequestError
from tiny_models import write_llama

PROMPTS = ["the model", "a b a b a b", "one two three"]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL = {"max_num_seqs": 4, "kv_bytes": 4_000_000, "threads": 1}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = write_llama(tmp_path_factory.mktemp("async") / "model")
    with LLM(str(model), speculate="ngram", **SMALL) as made:
        yield made


@pytest.fixture(scope="module")
def llm(plain: LLM) -> Iterator[AsyncLLM]:
    with AsyncLLM.from_engine_args(AsyncEngineArgs(plain.config.model.model, **SMALL)) as made:
        yield made


async def _read(llm, prompt, params=GREEDY, **options):
    return [output async for output in llm.generate(prompt, params, **options)]


def test_requests_of_one_moment_get_the_answers_of_a_plain_llm(plain, llm):
    async def ask():
        return await asyncio.gather(*(_read(llm, prompt) for prompt in PROMPTS))

    expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, GREEDY)]
    for prompt, outputs, ids in zip(PROMPTS, asyncio.run(ask()), expected, strict=True):
        assert outputs[-1].finished
        assert outputs[-1].prompt == prompt
        assert outputs[-1].outputs[0].token_ids == ids
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        assert lengths == sorted(lengths)


def test_cached_prefixes_are_forgotten(llm):
    async def ask():
        prompt = {"prompt_token_ids": list(range(3, 43))}
        first, second = [(await _read(llm, prompt))[-1] for _ in range(2)]
        assert await llm.reset_prefix_cache(reset_running_requests=True)
        return [one.num_cached_tokens for one in (first, second, (await _read(llm, prompt))[-1])]

    first, second, third = asyncio.run(ask())
    assert first == third == 0 < second


def test_a_pause_that_keeps_requests(plain, llm):
    # So long that it still runs when the pause comes, also where others keep this thread waiting.
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    async def ask():
        outputs = []

        async def read():
            async for output in llm.generate(PROMPTS[0], long):
                outputs.append(output)

        running = asyncio.create_task(read())
        while not outputs:
            await asyncio.sleep(0.001)
        await llm.pause_generation(mode="keep")
        assert await llm.is_paused()
        late = asyncio.create_task(_read(llm, PROMPTS[1], long))
        await asyncio.sleep(0.05)
        count = len(outputs)
        await asyncio.sleep(0.1)
        assert len(outputs) == count
        assert not running.done()
        assert not late.done()
        await llm.resume_generation()
        await running
        return outputs[-1], (await late)[-1]

    texts = [output.outputs[0].text for output in asyncio.run(ask())]
    assert texts == [output.outputs[0].text for output in plain.generate(PROMPTS[:2], long)]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"mode": "wait"}, "length"),
        ({"mode": "abort"}, "abort"),
        ({"wait_for_inflight_requests": True}, "length"),  # vLLM's until 0.15
    ],
)
def test_a_pause_that_ends_requests_lets_others_wait(llm, how, reason):
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    async def ask():
        running = llm.generate(PROMPTS[0], long)
        await anext(running)
        pause = asyncio.create_task(llm.pause_generation(**how, clear_cache=False))
        last = [output async for output in running][-1]
        await pause
        assert last.outputs[0].finish_reason == reason
        left, late = llm.generate(PROMPTS[2], long), asyncio.create_task(_read(llm, PROMPTS[1]))
        gone = asyncio.create_task(anext(left))
        await asyncio.sleep(0.1)
        assert not late.done()
        gone.cancel()
        await asyncio.sleep(0.1)
        await llm.resume_generation()
        assert not await llm.is_paused()
        assert (await late)[-1].finished
        assert llm.stats()["num_running"] == 0  # nobody waited for it any more
        with pytest.raises(RequestError, match="abort, wait or keep"):
            await llm.pause_generation(mode="stop")

    asyncio.run(ask())


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_a_request_that_waits_for_a_pauses_end_can_be_aborted(llm, mode):
    async def ask():
        await llm.pause_generation(mode=mode, clear_cache=False)
        late = asyncio.create_task(_read(llm, PROMPTS[0], request_id="late"))
        await asyncio.sleep(0.1)
        await llm.abort("late")
        outputs = await asyncio.wait_for(late, 10)
        await llm.resume_generation()
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort"]
        assert not outputs[0].outputs[0].token_ids

    asyncio.run(ask())


def test_a_pause_that_nobody_waits_for_any_more_harms_no_request(llm):
    long = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    async def ask():
        running = llm.generate(PROMPTS[0], long)
        await anext(running)
        pause = asyncio.create_task(llm.pause_generation(mode="wait"))
        await asyncio.sleep(0)
        pause.cancel()
        last = [output async for output in running][-1]
        assert last.outputs[0].finish_reason == "length"
        await llm.resume_generation()
        assert (await _read(llm, PROMPTS[1]))[-1].finished

    asyncio.run(asyncio.wait_for(ask(), 20))


def test_outputs_hold_what_is_new_or_come_at_the_end(llm):
    asked = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 1, "n": 2}
    kinds = RequestOutputKind
    whole, news, last = (
        asyncio.run(_read(llm, PROMPTS[1], SamplingParams(**asked, output_kind=kind)))
        for kind in (kinds.CUMULATIVE, kinds.DELTA, kinds.FINAL_ONLY)
    )
    assert len(last) == 1 < min(len(whole), len(news))
    for at, answer in enumerate(last[0].outputs):
        assert answer.text == whole[-1].outputs[at].text
        parts = [output.outputs[at] for output in news]
        assert "".join(part.text for part in parts) == answer.text
        assert [one for part in parts for one in part.token_ids] == answer.token_ids
        assert sum(len(part.logprobs or ()) for part in parts) == len(answer.token_ids)
    with pytest.raises(RequestError, match="RequestOutputKind"):
        SamplingParams(output_kind=3)


def test_leaving_the_loop_ends_the_request(llm):
    async def ask():
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        generator = llm.generate("the model", params)
        await anext(generator)
        assert llm.stats()["num_running"] == 1
        await generator.aclose()
        for _ in range(30_000):
            if not llm.stats()["num_running"]:
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it still runs")

    asyncio.run(ask())


def test_an_abort_by_its_id_is_the_last_output(llm):
    async def ask():
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        reasons = []
        async for output in llm.generate("the model", params, request_id="mine"):
            reasons.append(output.outputs[0].finish_reason)
            await llm.abort("mine")
        return reasons

    assert asyncio.run(ask())[-1] == "abort"


def test_a_request_that_cannot_be_is_its_own_error_alone(llm):
    async def ask():
        wrong = llm.generate([10**9], GREEDY)
        with pytest.raises(RequestError):
            await anext(wrong)
        await llm.check_health()
        return await _read(llm, "the model", {"temperature": 0, "max_tokens": 2})

    assert asyncio.run(ask())[-1].finished


def test_a_second_request_of_an_id_leaves_the_first_alone(llm):
    async def ask():
        params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
        first = llm.generate("the model", params, request_id="mine")
        await anext(first)
        with pytest.raises(RequestError, match="in use"):
            await _read(llm, "one two three", request_id="mine")
        async with asyncio.timeout(60):
            return [output async for output in first]

    assert len(asyncio.run(ask())[-1].outputs[0].token_ids) == 200


def test_after_a_shutdown_it_says_so(plain):
    other = AsyncLLM.from_llm(plain.sibling("off"))
    other.shutdown()
    assert other.errored
    with pytest.raises(EngineError, match="shut down"):
        asyncio.run(_read(other, "the model"))


def test_a_request_that_comes_with_a_shutdown_hears_of_it(plain):
    other = AsyncLLM.from_llm(plain.sibling("off"))

    async def ask():
        reading = asyncio.create_task(_read(other, "the model"))
        await asyncio.sleep(0)  # its prompt is read in another thread
        other.shutdown()
        with pytest.raises(EngineError, match="shut down"):
            await asyncio.wait_for(reading, 20)

    asyncio.run(ask())


def test_vllms_ways_to_ask(plain):
    (output,) = plain.generate("the model", {"temperature": 0, "max_tokens": 4})
    assert len(output.outputs[0].token_ids) <= 4
    with pytest.raises(RequestError, match="temprature"):
        plain.generate("the model", {"temprature": 0})
    asked = SamplingParams(guided_decoding=GuidedDecodingParams(choice=["yes", "no"]), max_tokens=8)
    assert asked == SamplingParams(structured_outputs={"choice": ["yes", "no"]}, max_tokens=8)
    assert asked.clone() == asked
    assert asked.clone() is not asked
    (answer,) = plain.generate("is it?", asked)
    assert answer.outputs[0].text in ("yes", "no")
    with pytest.raises(RequestError, match="either structured_outputs or guided_decoding"):
        SamplingParams(guided_decoding={"regex": "a"}, structured_outputs={"regex": "a"})


def test_arguments_have_types():
    """A new argument of the config or of vLLM is also written down in arguments.py."""
    assert {"model", *Arguments.__annotations__} == known_arguments()


def test_a_script_may_end_while_answers_are_being_made(plain):
    """Nothing is closed: a thread that computes while Python shuts down would end in an abort."""
    script = f"""
import asyncio
from hunch import AsyncLLM, SamplingParams
llm = AsyncLLM({plain.config.model.model!r}, kernels="torch", max_model_len=512, threads=1)
answer = llm.generate("a", SamplingParams(max_tokens=400, ignore_eos=True))
asyncio.new_event_loop().run_until_complete(anext(answer))
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True)
    assert (done.returncode, done.stderr.decode()) == (0, "")
