"""One request's growing answer, on the HTTP side.

News are told once per turn of the event loop, however many of the engine's messages it brought.
Most readers want nothing but text: they leave a sink, which takes it without any task being woken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from hunch.errors import HunchError
from hunch.server import wire
from hunch.types import Detokenizer, RequestOutput, SamplingParams


class RemoteStream(AsyncIterator[RequestOutput]):
    """A reader that is slow gets several steps' news at once."""

    def __init__(
        self,
        output: RequestOutput,
        params: SamplingParams,
        abort: Callable[[str], None],
        *,
        is_scoring: bool = False,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        """With a detokenizer, the engine tells tokens, and their text is made here."""
        self.output = output
        self.params = params
        self.id = output.request_id
        self.num_sequences = params.n
        self.handle = -1  # of the tokens that are told under a number
        self.arrival = time.monotonic()
        self.first_token: float | None = None
        self.sink: Callable[[], bool] | None = None  # takes news; False: the reader must do it
        self._abort = abort
        self._is_scoring = is_scoring  # the answer itself is dropped
        self._detokenizer = detokenizer
        self._num_read = 0  # tokens whose text is made
        self._loop = asyncio.get_running_loop()
        self._has_news = False
        self._reader: asyncio.Future[None] | None = None  # somebody waits for news
        self._accepted: asyncio.Future[None] = self._loop.create_future()
        self._error: HunchError | None = None
        self._is_read = False
        self.options: dict[str, Any] = {}  # the engine's own, as they were given with the request
        self.asked = params  # what the engine is asked for: `params`, and what helps it
        self.num_moves = 0  # engines that died under it
        self._again: RequestOutput | None = None  # what an engine says that began again
        self._num_skipped = 0  # tokens it will say that are known

    async def __anext__(self) -> RequestOutput:
        if self._is_read:
            raise StopAsyncIteration
        if not self._has_news:
            self._reader = self._loop.create_future()
            await self._reader
        self._has_news = False
        if self._error is not None:
            raise self._error
        self._is_read = self.output.finished
        return self.read()

    def read(self) -> RequestOutput:
        """The output with all of its text."""
        if self._detokenizer is not None and not self.output.finished:
            choice = self.output.outputs[0]
            if self._num_read < len(choice.token_ids):
                choice.text += self._detokenizer.push_all(choice.token_ids[self._num_read :])
                self._num_read = len(choice.token_ids)
        return self.output

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.output.outputs)

    @property
    def salt(self) -> str:
        return str(self.options.get("cache_salt", ""))

    @property
    def has_detokenizer(self) -> bool:
        return self._detokenizer is not None

    def begin_again(self, abort: Callable[[str], None]) -> None:
        """Another engine generates it from the start; what is known already is not told twice."""
        self.num_moves += 1
        self._abort = abort
        tokens = self.output.outputs[0].token_ids
        self._num_skipped = len(tokens)
        self._again = wire.empty_output(self.id, self.output.prompt_token_ids, self.num_sequences)
        if self.num_sequences == 1 and tokens and self.params.prediction is None:
            self.asked = replace(self.params, prediction=tuple(tokens))  # which is soon checked

    def abort(self) -> None:
        """Stop generating; no more news come. Safe to call at any time."""
        self._abort(self.id)

    async def wait_accepted(self) -> None:
        await self._accepted

    def accept(self) -> None:
        if not self._accepted.done():
            self._accepted.set_result(None)

    def update(self, item: wire.Message) -> None:
        """Take in a difference; the reader learns of it by `tell`."""
        if self.first_token is None:
            self.first_token = time.monotonic()
        if self._is_scoring:
            wire.drop_answer(item)
        if self._again is None or self._detokenizer is not None:
            wire.apply_delta(self.output, item, is_whole=self._detokenizer is not None)
        else:
            wire.apply_delta(self._again, item)
            self._catch_up(self._again)

    def _catch_up(self, again: RequestOutput) -> None:
        """Take over what the second telling has beyond the first."""
        self.output.prompt_logprobs = again.prompt_logprobs or self.output.prompt_logprobs
        for place, choice in enumerate(again.outputs):
            is_ahead = len(choice.token_ids) > len(self.output.outputs[place].token_ids)
            if is_ahead or choice.finish_reason is not None:
                self.output.outputs[place] = choice
        self.output.stats, self.output.finished = again.stats, again.finished
        self.output.num_cached_tokens = again.num_cached_tokens

    def push(self, new_tokens: list[int]) -> None:
        """Take in tokens; the reader learns of them by `tell`."""
        if self._num_skipped:
            num_known = min(self._num_skipped, len(new_tokens))
            self._num_skipped -= num_known
            new_tokens = new_tokens[num_known:]
        tokens = self.output.outputs[0].token_ids
        if not tokens and new_tokens:
            self.first_token = time.monotonic()
        tokens += new_tokens

    def fail(self, error: HunchError) -> None:
        self._error = error
        self.tell()
        if not self._accepted.done():
            self._accepted.set_exception(error)
            self._accepted.exception()  # a reader that left will not ask

    def tell(self) -> None:
        """There are news."""
        reader = self._reader
        is_waiting = reader is not None and not reader.done()
        is_ordinary = self._error is None and not self.output.finished
        # While the reader waits, it is not in the middle of telling something itself.
        if is_waiting and is_ordinary and self.sink is not None and self.sink():
            return
        self._has_news = True
        if is_waiting:
            assert reader is not None
            reader.set_result(None)
