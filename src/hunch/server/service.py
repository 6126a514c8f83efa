"""A server's state, and how a checked body becomes a running request."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from hunch.chat.turn import Parsers, Turn, chat_format, open_turn
from hunch.config import ModelConfig
from hunch.errors import HunchError
from hunch.server import logs
from hunch.server.answers import ChatShape, CompletionShape, Shape
from hunch.server.cursor import Cursor
from hunch.server.guard import ARRIVAL
from hunch.server.metrics import Metrics
from hunch.server.middle import middle_of
from hunch.server.origins import Painter
from hunch.server.params import chat_params, completion_params, is_scoring, sampling_defaults
from hunch.server.problems import ProblemError, at_most
from hunch.server.prompt_log import PromptLog
from hunch.server.remote import RemoteEngine
from hunch.server.remote_stream import RemoteStream
from hunch.server.replicas import Replicas
from hunch.server.schemas import (
    ChatBody,
    CompletionBody,
    PredictionBody,
    SamplingBody,
    StreamOptions,
)
from hunch.server.settings import ServeConfig
from hunch.server.streaming import EventStream, collect, until, while_connected
from hunch.server.structured import check_tools
from hunch.server.summary import best, check_ends
from hunch.server.text import Text
from hunch.types import SamplingParams

INLINE_CHARS = 2048  # longer prompts are tokenized beside the event loop
MAX_RETRY_SECONDS = 60.0

AnyEngine = RemoteEngine | Replicas
T = TypeVar("T")
MakeShape = Callable[[Turn], Shape]


class Service:
    """What the routes share."""

    def __init__(
        self,
        settings: ServeConfig,
        engine: AnyEngine,
        text: Text,
        *,
        chat_template: str | None = None,
        parsers: Parsers | None = None,
    ) -> None:
        self.settings = settings
        self.chat_template = chat_template
        self.parsers = parsers or ModelConfig()
        self.chat_format = chat_format(self.parsers, text, chat_template)
        self.engine = engine
        self.text = text
        self.metrics = Metrics(settings.served_model_names[0], engine)
        self.prompt_log = PromptLog(settings.prompt_log) if settings.prompt_log else None
        self.defaults = sampling_defaults(settings.generation_config, text.generation_config)
        self.started = time.time()
        self.is_draining = False
        self._mean_seconds = 1.0  # of recent requests, for Retry-After
        engine.watcher = self

    def finished(self, stream: RemoteStream, reason: str) -> None:
        """A request ended, whichever way."""
        if reason == "refused":
            return
        output = stream.output
        num_tokens = sum(len(choice.token_ids) for choice in output.outputs)
        self.metrics.finished(len(output.prompt_token_ids), num_tokens, stream.params, reason)
        seconds = time.monotonic() - stream.arrival
        self._mean_seconds += 0.1 * (seconds - self._mean_seconds)
        first = output.stats.get("first_token_seconds")
        if first is None and stream.first_token is not None:
            first = stream.first_token - stream.arrival
        logs.event(
            logging.INFO,
            "request",
            id=stream.id,
            reason=reason,
            prompt_tokens=len(output.prompt_token_ids),
            output_tokens=num_tokens,
            first_token_seconds=first,
            seconds=seconds,
        )

    def retry_after(self) -> float:
        """Seconds until the queue has probably moved by a batch."""
        rounds = self.engine.num_open / self.engine.info.max_rows
        return min(MAX_RETRY_SECONDS, max(1.0, rounds * self._mean_seconds))

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.settings.served_model_names:
            known = ", ".join(self.settings.served_model_names)
            raise ProblemError(
                404,
                f"the model {name[:100]!r} does not exist here; this server has: {known}",
                code="model_not_found",
                param="model",
            )

    def check_speculation(self, body: SamplingBody) -> None:
        methods = dict.fromkeys(("auto", "off", *self.engine.info.methods))
        if body.speculation is not None and body.speculation.mode not in methods:
            raise ProblemError(
                400,
                f"speculation.mode must be one of {', '.join(methods)}: only these are loaded",
                param="speculation.mode",
            )

    async def run(
        self, timeout: float | None, request: Request, work: Callable[[float], Awaitable[T]]
    ) -> T:
        """`work`, given its deadline, within which all of it must be done, from the arrival on.

        A client that hangs up ends it, wherever it is.
        """
        seconds = min(timeout or self.settings.request_timeout, self.settings.request_timeout)
        deadline = request.scope["state"][ARRIVAL] + seconds
        async with until(deadline):
            return await while_connected(request.receive, work(deadline))

    async def complete(
        self,
        body: CompletionBody,
        request: Request,
        make_shape: Callable[[], Shape] | None = None,
    ) -> Response:
        """POST /v1/completions, or another API's: then `make_shape` gives its form."""
        return await self.run(body.timeout, request, partial(self._complete, body, make_shape))

    async def _complete(
        self, body: CompletionBody, make_shape: Callable[[], Shape] | None, deadline: float
    ) -> Response:
        self.check_model(body.model)
        self.check_speculation(body)
        prompts = _prompts(body)
        limits = self.settings.limits
        at_most("prompt", len(prompts), limits.max_prompts, "prompts")
        params = completion_params(body, limits, self.engine.info.max_len, self.defaults)
        at_most("n", len(prompts) * params.n, limits.max_sequences, "sequences in all")
        self.engine.check_size(len(prompts) * params.n)
        params = await self._with_prediction(params, body.prediction)
        if body.suffix is not None:
            marks = middle_of(self.text)
            ids = [await marks.fill(self, prompt, body.suffix) for prompt in prompts]
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *marks.ends))
        else:
            ids = [await self.encode(prompt, body.add_special_tokens) for prompt in prompts]
        ids = [self.truncated(one, body.truncate_prompt_tokens) for one in ids]
        echo = None
        if body.echo:
            echo = [
                prompt if isinstance(prompt, str) else self.text.decode(prompt)
                for prompt in prompts
            ]
        if make_shape is not None:
            return await self._answer(body, ids, params, make_shape(), deadline)
        shape = CompletionShape(
            id=f"cmpl-{uuid.uuid4().hex}",
            model=body.model or self.settings.served_model_names[0],
            text=self.text,
            num_top=params.logprobs or 0,
            num_answers=body.n,
            echo=echo,
            has_logprobs=body.logprobs is not None,
            has_token_ids=body.return_token_ids,
            has_prompt_logprobs=body.prompt_logprobs is not None,
        )
        return await self._answer(body, ids, params, shape, deadline)

    async def chat(
        self, body: ChatBody, request: Request, make_shape: MakeShape | None = None
    ) -> Response:
        """POST /v1/chat/completions, or another API's chat: then `make_shape` gives its form."""
        return await self.run(body.timeout, request, partial(self._chat, body, make_shape))

    async def _chat(
        self, body: ChatBody, make_shape: MakeShape | None, deadline: float
    ) -> Response:
        self.check_model(body.model)
        self.check_speculation(body)
        if body.chat_template is not None and not self.settings.allow_request_chat_template:
            raise ProblemError(
                400, "this server takes no chat templates from requests", param="chat_template"
            )
        at_most("n", body.n, self.settings.limits.max_sequences, "sequences in all")
        params = chat_params(body, self.settings.limits, self.engine.info.max_len, self.defaults)
        params = await self._with_prediction(params, body.prediction)
        turn = await self.open_turn(body, params)
        shape = self.chat_shape(body, turn) if make_shape is None else make_shape(turn)
        return await self._answer(body, [turn.prompt_ids], turn.params, shape, deadline)

    def chat_shape(self, body: ChatBody, turn: Turn) -> ChatShape:
        """/v1/chat/completions' own form."""
        return ChatShape(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            model=body.model or self.settings.served_model_names[0],
            text=self.text,
            num_top=turn.params.logprobs or 0,
            turn=turn if turn.new_reader is not None else None,
            has_reasoning=body.include_reasoning is not False,
            has_token_ids=body.return_token_ids,
            has_prompt_logprobs=body.prompt_logprobs is not None,
        )

    async def open_turn(self, body: ChatBody, params: SamplingParams) -> Turn:
        """The prompt of a chat, and how its answer is held and read."""
        at_most("messages", len(body.messages), self.settings.limits.max_messages, "messages")
        check_tools(body, self.settings.limits)
        if body.continue_final_message and body.messages[-1].role != "assistant":
            message = "continue_final_message needs a last message of the assistant to go on with"
            raise ProblemError(400, message, param="continue_final_message")
        form = self.chat_format
        if body.chat_template is not None:
            form = chat_format(self.parsers, self.text, body.chat_template)
        rendering = {
            "template": body.chat_template or self.chat_template,
            "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
            "continue_final_message": body.continue_final_message,
            "max_tokens": self.engine.info.max_len,
        }
        plain = [message.plain() for message in body.messages]
        turn = await asyncio.to_thread(
            open_turn, form, self.text, plain, params, body.wish(), **rendering
        )
        return replace(
            turn, prompt_ids=self.truncated(turn.prompt_ids, body.truncate_prompt_tokens)
        )

    async def tokens(self, text: str) -> list[int]:
        """Token ids of a part of a prompt."""
        return await self._encode(text, False) if text else []

    async def encode(
        self, prompt: str | list[int], add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """Token ids of a prompt; ids are checked instead."""
        if isinstance(prompt, str):
            ids = await self._encode(prompt, add_special_tokens)
        else:
            self.check_ids(prompt)
            ids = prompt
        if not ids:
            raise ProblemError(400, f"the {param} is empty", param=param)
        return ids

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) <= INLINE_CHARS:
            return self.text.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(
            self.text.encode,
            text,
            add_special_tokens=add_special_tokens,
            max_tokens=self.engine.info.max_len,
        )

    def truncated(self, ids: list[int], most: int | None) -> list[int]:
        """The prompt's end, where somebody says how much of it is enough; -1: what fits."""
        if most is None:
            return ids
        if most == 0:
            message = "truncate_prompt_tokens must be -1 (what fits) or 1 and more"
            raise ProblemError(400, message, param="truncate_prompt_tokens")
        most = self.engine.info.max_len - 1 if most == -1 else most
        return ids[-most:]

    async def _with_prediction(
        self, params: SamplingParams, prediction: PredictionBody | None
    ) -> SamplingParams:
        """What the client expects, as token ids: the engine's process has better to do."""
        if prediction is None:
            return params
        ids = await self._encode(prediction.plain(), False)
        return replace(params, prediction=ids[: self.engine.info.max_len])

    def check_ids(self, ids: Sequence[int]) -> None:
        if ids and max(ids) >= self.text.vocab_size:
            raise ProblemError(
                400, f"token ids must be below {self.text.vocab_size}, the vocabulary's size"
            )

    async def _answer(
        self,
        body: SamplingBody,
        prompts: list[list[int]],
        params: SamplingParams,
        shape: Shape,
        deadline: float,
    ) -> Response:
        streams = await self._submit(prompts, params, shape.id, body)
        if self.prompt_log is not None:
            for ids in prompts:
                self.prompt_log.write(ids, self.text.decode(ids, skip_special_tokens=False))
        if body.stream:
            return self._stream(body, streams, params, shape, deadline)
        outputs = await collect(streams)
        check_ends(outputs)
        if params.n > body.n:
            outputs = [best(output, body.n) for output in outputs]
        return JSONResponse(shape.whole(outputs))

    async def _submit(
        self, prompts: list[list[int]], params: SamplingParams, answer_id: str, body: SamplingBody
    ) -> list[RemoteStream]:
        """All prompts or none."""
        options: dict[str, Any] = {"stream": body.stream, "is_scoring": is_scoring(body)}
        options |= {"priority": body.priority, "cache_salt": body.cache_salt or ""}
        streams: list[RemoteStream] = []
        try:
            for number, ids in enumerate(prompts):
                detokenizer = None
                if body.stream and _is_tokens_enough(params):
                    detokenizer = self.text.detokenizer(
                        ids, skip_special_tokens=params.skip_special_tokens
                    )
                opened = await self.engine.submit(
                    ids,
                    params,
                    request_id=f"{answer_id}-{number}",
                    detokenizer=detokenizer,
                    **options,
                )
                streams.append(opened)
        except (HunchError, asyncio.CancelledError):
            for opened in streams:
                opened.abort()
            raise
        return streams

    def _stream(
        self,
        body: SamplingBody,
        streams: Sequence[RemoteStream],
        params: SamplingParams,
        shape: Shape,
        deadline: float,
    ) -> EventStream:
        cursors = []
        for number, stream in enumerate(streams):
            row = []
            for index in range(params.n):
                painter = None
                if params.speculation.trace:
                    ids = stream.output.prompt_token_ids
                    painter = Painter(
                        self.text,
                        ids,
                        params.skip_special_tokens,
                        shows_guesses=not self.settings.hides_guesses,
                    )
                new_reader = shape.turn.new_reader if shape.turn else None
                reader = new_reader() if new_reader else None
                row.append(Cursor(number * params.n + index, painter, reader))
            cursors.append(row)
        options = body.stream_options or StreamOptions()
        return EventStream(streams, shape, cursors, deadline=deadline, options=options)

    def overview(self) -> dict[str, Any]:
        """What the page's charts and curious operators read."""
        return {
            "time": time.time(),
            "uptime_seconds": time.time() - self.started,
            "model": self.settings.served_model_names[0],
            "is_draining": self.is_draining,
            "num_open": self.engine.num_open,
            "engine": self.engine.stats(),
        }


def _is_tokens_enough(params: SamplingParams) -> bool:
    """Whether the engine needs to say nothing but tokens; then their text is made here."""
    is_scored = params.logprobs is not None or params.prompt_logprobs is not None
    return params.n == 1 and not (params.stop or is_scored or params.speculation.trace)


def _prompts(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]  # one prompt, given as ids
    return list(prompt)
