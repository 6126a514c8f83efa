"""An LLM inside a user's program: forks, Ctrl-C, threads, other models, pickles, memory."""

import asyncio
import copy
import gc
import multiprocessing
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hunch import LLM, AsyncLLM, SamplingParams, Speculation
from hunch.errors import EngineError
from hunch.offline import held_interrupts
from tiny_models import write_llama

PROMPTS = ["the model", "a b a b a b", "one two three", "fast token fast token"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SMALL: dict[str, Any] = {"max_num_seqs": 4, "kv_bytes": 4_000_000, "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("programs") / "model")


@pytest.fixture
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), **SMALL) as made:
        yield made


def texts(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def streamed(llm: LLM) -> list[list[int]]:
    return [list(llm.stream(prompt, GREEDY))[-1].outputs[0].token_ids for prompt in PROMPTS]


def in_a_fork(llm: Any, pipe: Any) -> None:
    try:
        if isinstance(llm, AsyncLLM):
            asyncio.run(anext(llm.generate("the model", GREEDY)))
        else:
            with llm:  # its end must not end what the parent's engine needs
                llm.generate("the model", GREEDY)
    except EngineError as error:
        pipe.send(str(error))
    else:
        pipe.send("no error")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_async", [False, True])
def test_a_forked_child_is_told_what_to_do(llm: LLM, is_async: bool) -> None:
    before = texts(llm)
    served: Any = AsyncLLM.from_llm(llm.sibling("off")) if is_async else llm
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=in_a_fork, args=(served, there))
    child.start()
    assert here.poll(300), "the child hangs"
    words = here.recv()
    child.join(300)
    assert f"loaded in process {os.getpid()}" in words
    assert 'get_context("spawn")' in words
    if is_async:
        served.shutdown()
    assert texts(llm) == before


def interrupt_at(llm: LLM, number: int) -> None:
    """Ctrl-C in the middle of the step of this number from now."""
    runner, count = llm.engine.runner, 0
    submit = runner.submit

    def interrupted(plan: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            signal.raise_signal(signal.SIGINT)
        submit(plan)

    runner.submit = interrupted


@pytest.mark.parametrize("number", [1, 3])
def test_ctrl_c_leaves_the_engine_usable(llm: LLM, number: int) -> None:
    before = texts(llm)
    interrupt_at(llm, number)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, LONG)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.stats()["num_running"] == 0
    assert texts(llm) == before
    assert not llm._requests._kept
    pool = llm.engine._scheduler.pool
    assert pool.num_free == pool.num_blocks


def test_ctrl_c_ends_one_stream_and_not_the_other(llm: LLM) -> None:
    (expected,) = llm.generate("a b a b a b", GREEDY)
    other, broken = llm.stream("a b a b a b", GREEDY), llm.stream("the model", LONG)
    next(other)
    next(broken)
    interrupt_at(llm, 2)
    with pytest.raises(KeyboardInterrupt):
        list(broken)
    *_, last = other
    assert last.outputs[0].token_ids == expected.outputs[0].token_ids
    llm.generate("the model", GREEDY)
    assert not llm.engine.has_work()


def test_a_second_ctrl_c_does_not_wait_and_the_engine_says_so(llm: LLM) -> None:
    runner = llm.engine.runner
    submit = runner.submit

    def interrupted(plan: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        submit(plan)

    runner.submit = interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    runner.submit = submit
    with pytest.raises(EngineError, match="load the model again"):
        llm.generate(PROMPTS, GREEDY)


def test_a_users_own_handler_is_called_after_the_step() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            assert not calls
        assert calls == [signal.SIGINT]
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_held_once_for_all_steps_that_bring_nothing_new(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    before = signal.signal
    monkeypatch.setattr(signal, "signal", lambda *given: (calls.append(1), before(*given))[1])
    counts = []
    for size in (2, 12):
        calls.clear()
        llm.generate("the model", SamplingParams(temperature=0, max_tokens=size, ignore_eos=True))
        counts.append(len(calls))
    assert counts[0] == counts[1]


def test_threads_share_one_llm(llm: LLM) -> None:
    expected = texts(llm)
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(texts, llm) for _ in range(6)]
        asked += [threads.submit(streamed, llm) for _ in range(2)]
        found = [one.result(timeout=300) for one in asked]
    assert found[:6] == [expected] * 6
    assert found[6:] == [expected] * 2
    assert not llm.engine.has_work()


def test_two_models_at_the_same_time_in_two_threads(model: Path, tmp_path: Path) -> None:
    other = write_llama(tmp_path / "other", seed=5, layers=3)
    both = [LLM(str(path), **SMALL | {"threads": 2}) for path in (model, other)]
    both.append(both[0].sibling("ngram:adaptive=false"))
    alone = [texts(llm) for llm in both]
    with ThreadPoolExecutor(3) as threads:
        asked = [threads.submit(lambda llm: [texts(llm) for _ in range(3)], llm) for llm in both]
        assert [one.result(timeout=300) for one in asked] == [[one] * 3 for one in alone]
    assert alone[0] == alone[2] != alone[1]


def test_made_and_used_in_a_thread(model: Path, llm: LLM) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(texts(LLM(str(model), **SMALL))))
    thread.start()
    thread.join(300)
    assert found == [texts(llm)]


def test_inside_a_running_event_loop(llm: LLM) -> None:
    async def ask() -> list[list[int]]:
        return await asyncio.to_thread(texts, llm)

    async def directly() -> list[list[int]]:
        return texts(llm)

    assert asyncio.run(ask()) == asyncio.run(directly()) == texts(llm)


def test_a_model_that_was_deleted_gives_its_memory_back(model: Path) -> None:
    expected, held = None, []
    for _ in range(3):
        llm = LLM(str(model), **SMALL)
        found = texts(llm)
        expected = expected or found
        assert found == expected
        held.append((weakref.ref(llm), weakref.ref(llm.engine.runner.target)))
        del llm
    gc.collect()
    assert all(one() is None for pair in held for one in pair)


def test_parameters_and_outputs_can_be_pickled_and_copied(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0.7,
        seed=3,
        max_tokens=6,
        logprobs=2,
        prompt_logprobs=1,
        stop=["zz"],
        bad_words=["the"],
        logit_bias={3: 1.0},
        structured_outputs={"regex": "[a-z]{3,9}"},
        speculation=Speculation(max_nodes=2, trace=True),
    )
    (output,) = llm.generate("the model", params)
    for value in (params, output, EngineError("words")):
        for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
            assert type(again) is type(value)
            assert str(again) == str(value)
    assert pickle.loads(pickle.dumps(params)) == params
    assert pickle.loads(pickle.dumps(output)) == output
