"""Answers with the scores of whole vocabularies hold up nobody else."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from hunch.server.streaming import MANY, beside, scores_in
from hunch.types import CompletionOutput, Logprob, RequestOutput


def test_long_work_runs_beside_the_event_loop_and_short_work_in_it() -> None:
    async def main() -> None:
        loop_goes_on = threading.Event()

        def work() -> int:
            assert loop_goes_on.wait(60), "the event loop waited for the work"
            assert not gc.isenabled()
            return threading.get_ident()

        long = asyncio.ensure_future(beside(MANY, work))
        await asyncio.sleep(0)
        loop_goes_on.set()
        assert await long != threading.get_ident()
        assert await beside(MANY - 1, threading.get_ident) == threading.get_ident()

    assert gc.isenabled()
    asyncio.run(main())
    assert gc.isenabled()


def test_garbage_is_collected_again_once_all_long_work_has_ended() -> None:
    async def main() -> None:
        first, second = threading.Event(), threading.Event()
        a, b = (asyncio.ensure_future(beside(MANY, one.wait)) for one in (first, second))
        while gc.isenabled():
            await asyncio.sleep(0.01)
        first.set()
        await a
        assert not gc.isenabled()
        second.set()
        await b
        assert gc.isenabled()
        with pytest.raises(ZeroDivisionError):
            await beside(MANY, lambda: 1 // 0)
        assert gc.isenabled()

    asyncio.run(main())


def test_scores_of_answers_and_prompts_are_counted() -> None:
    some = {token: Logprob(-1.0) for token in range(3)}
    choice = CompletionOutput(index=0, token_ids=[1, 2], logprobs=[some, some])
    output = RequestOutput(
        request_id="x", prompt=None, prompt_token_ids=[1, 2], outputs=[choice],
        prompt_logprobs=[None, some],
    )  # fmt: skip
    assert scores_in(output) == 9
    choice.logprobs = output.prompt_logprobs = None
    assert scores_in(output) == 0
