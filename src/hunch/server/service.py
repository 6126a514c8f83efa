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
from hunch.errors import GrammarError, HunchError
from hunch.server import logs
from hunch.server.answers import ChatShape, CompletionShape, Shape
from hunch.server.cursor import Cursor
from hunch.server.guard import ARRIVAL
from hunch.server.metrics import Metrics
from hunch.server.middle import middle_of
from hunch.server.origins import Painter
from hunch.server.params import chat_params, completion_params, is_scoring, sampling_defaults
from hunch.server.problems import ProblemError, at_most, from_error, no_model
from hunch.server.prompts import AnyEngine, PromptLog, Prompts, prompts_of
from hunch.server.remote_stream import RemoteStream
from hunch.server.schemas import ChatBody, CompletionBody, SamplingBody, StreamOptions
from hunch.server.settings import ServeConfig
from hunch.server.streaming import EventStream, beside, collect, scores_in, until, while_connected
from hunch.server.structured import check_tools, form_field
from hunch.server.summary import check_ends
from hunch.server.text import Text
from hunch.types import SamplingParams

MAX_RETRY_SECONDS = 60.0

T = TypeVar("T")
MakeShape = Callable[[Turn], Shape]


class Service(Prompts):
    """What the routes share."""

    def __init__(
        self,
        settings: ServeConfig,
        engine: AnyEngine,
        text: Text,
        *,
        chat_template: str | None = None,
        parsers: Parsers | None = None,
        paths: tuple[str, str] | None = None,  # of model and tokenizer, as they were given
    ) -> None:
        self.settings = settings
        self.chat_template = chat_template
        self.parsers = parsers or ModelConfig()
        self.chat_format = chat_format(self.parsers, text, chat_template)
        self.model_path, self.tokenizer_path = paths or settings.served_model_names[:1] * 2
        super().__init__(engine, text)
        self.metrics = Metrics(settings.name, engine, settings.workers)
        self.prompt_log = PromptLog(settings.prompt_log) if settings.prompt_log else None
        self.defaults = sampling_defaults(settings, text.generation_config)
        self.started = time.time()
        self.is_draining = False
        self._mean_seconds = 1.0  # of recent requests, for Retry-After
        engine.watcher = self

    def finished(self, stream: RemoteStream, reason: str) -> None:
        """A request ended, whichever way."""
        if reason == "refused":
            return
        output = stream.output
        lengths = [len(choice.token_ids) for choice in output.outputs]
        self.metrics.finished(len(output.prompt_token_ids), lengths, stream.params, reason)
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
            output_tokens=sum(lengths),
            first_token_seconds=first,
            seconds=seconds,
        )

    def retry_after(self) -> float:
        """Seconds until the queue has probably moved by a batch."""
        rounds = self.engine.num_open / self.engine.info.max_rows
        return min(MAX_RETRY_SECONDS, max(1.0, rounds * self._mean_seconds))

    def check_model(self, name: str | None) -> None:
        if name and name not in self.settings.served_model_names:  # none, as for vLLM: the first
            raise no_model(name, self.settings.served_model_names)

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
        body: CompletionBody | list[CompletionBody],
        request: Request,
        make_shape: Callable[[], Shape] | None = None,
    ) -> Response:
        """POST /v1/completions, or another API's: then `make_shape` gives its form.

        Several bodies of one prompt each, with as many answers, are one request of another API.
        """
        bodies = body if isinstance(body, list) else [body]
        work = partial(self._complete, bodies, make_shape)
        return await self.run(bodies[0].timeout, request, work)

    async def _complete(
        self, bodies: list[CompletionBody], make_shape: Callable[[], Shape] | None, deadline: float
    ) -> Response:
        body, limits = bodies[0], self.settings.limits
        self.check_model(body.model)
        self.check_speculation(body)
        counts = [len(prompts_of(one)) for one in bodies]
        at_most("prompt", sum(counts), limits.max_prompts, "prompts")
        num_sequences = sum(counts) * (body.best_of or body.n)
        at_most("n", num_sequences, limits.max_sequences, "sequences in all")
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        for one in bodies:
            asked, ids = await self._asked(one)
            prompts += ids
            params += [asked] * len(ids)
        self.engine.check_size(num_sequences)
        shape = self.completion_shape(body, params[0]) if make_shape is None else make_shape()
        return await self._answer(body, prompts, params, shape, deadline)

    async def _asked(self, body: CompletionBody) -> tuple[SamplingParams, list[list[int]]]:
        """The parameters of a body's prompts, and their tokens."""
        prompts, most = prompts_of(body), body.truncate_prompt_tokens
        max_len = self.engine.info.max_len
        params = completion_params(body, self.settings.limits, max_len, self.defaults)
        params = await self.with_prediction(params, body.prediction)
        if body.suffix is not None:
            marks = middle_of(self.text)
            ids = [
                self.truncated(await marks.fill(self, prompt, body.suffix), most)
                for prompt in prompts
            ]
            params = replace(params, stop_token_ids=(*params.stop_token_ids, *marks.ends))
        else:
            has_specials = body.add_special_tokens
            ids = [await self.encode(prompt, has_specials, most=most) for prompt in prompts]
        return params, ids

    def completion_shape(self, body: CompletionBody, params: SamplingParams) -> CompletionShape:
        """/v1/completions' own form."""
        echo = None
        if body.echo:
            echo = [
                prompt if isinstance(prompt, str) else self.text.decode(prompt)
                for prompt in prompts_of(body)
            ]
        return CompletionShape(
            **self._told("cmpl", body, params),
            num_answers=body.n,
            echo=echo,
            has_logprobs=body.logprobs is not None,
        )

    def _told(self, prefix: str, body: SamplingBody, params: SamplingParams) -> dict[str, Any]:
        """What OpenAI's two forms share."""
        asked = body.return_tokens_as_token_ids
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "model": body.model or self.settings.name,
            "text": self.text,
            "num_top": params.logprobs or 0,
            "has_token_ids": body.return_token_ids,
            "has_prompt_logprobs": body.prompt_logprobs is not None,
            "names_ids": self.settings.return_tokens_as_token_ids if asked is None else asked,
        }

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
        at_most("n", body.n, self.settings.limits.max_sequences, "sequences in all")
        params = chat_params(body, self.settings.limits, self.engine.info.max_len, self.defaults)
        params = await self.with_prediction(params, body.prediction)
        turn = await self.open_turn(body, params)
        shape = self.chat_shape(body, turn) if make_shape is None else make_shape(turn)
        return await self._answer(body, [turn.prompt_ids], [turn.params], shape, deadline)

    def chat_shape(self, body: ChatBody, turn: Turn) -> ChatShape:
        """/v1/chat/completions' own form."""
        return ChatShape(
            **self._told("chatcmpl", body, turn.params),
            turn=turn if turn.new_reader is not None else None,
            has_reasoning=body.include_reasoning is not False,
            echoed=body.echoed,
        )

    async def chat_ids(self, body: ChatBody) -> list[int]:
        """The prompt of a chat that is not answered."""
        return (await self.open_turn(body, SamplingParams())).prompt_ids

    async def open_turn(self, body: ChatBody, params: SamplingParams) -> Turn:
        """The prompt of a chat, and how its answer is held and read."""
        at_most("messages", len(body.messages), self.settings.limits.max_messages, "messages")
        check_tools(body, self.settings.limits)
        if body.continue_final_message and body.messages[-1].role != "assistant":
            message = "continue_final_message needs a last message of the assistant to go on with"
            raise ProblemError(400, message, param="continue_final_message")
        form = self.chat_format
        if body.chat_template is not None:
            if not self.settings.allow_request_chat_template:
                message = "this server takes no chat templates from requests"
                raise ProblemError(400, message, param="chat_template")
            form = chat_format(self.parsers, self.text, body.chat_template)
        most = body.truncate_prompt_tokens
        rendering = {
            "template": body.chat_template or self.chat_template,
            "add_generation_prompt": body.add_generation_prompt and not body.continue_final_message,
            "continue_final_message": body.continue_final_message,
            "max_tokens": self.engine.info.max_len if most is None else None,
        }
        plain = [message.plain() for message in body.messages]
        wish = body.wish(self.settings.template_values)
        turn = await asyncio.to_thread(open_turn, form, self.text, plain, params, wish, **rendering)
        ids = self.truncated(turn.prompt_ids, most)
        return replace(turn, prompt_ids=ids)

    async def _answer(
        self,
        body: SamplingBody,
        prompts: list[list[int]],
        params: list[SamplingParams],
        shape: Shape,
        deadline: float,
    ) -> Response:
        """All prompts with their parameters, which differ at most in how tokens are chosen."""
        streams = await self._submit(prompts, params, shape.id, body)
        if self.prompt_log is not None:
            for ids in prompts:
                self.prompt_log.write(ids, self.text.decode(ids, skip_special_tokens=False))
        if body.stream:
            return self._stream(body, streams, params[0], shape, deadline)
        outputs = await collect(streams)
        check_ends(outputs)
        num_scores = sum(map(scores_in, outputs))
        return await beside(num_scores, lambda: JSONResponse(shape.whole(outputs)))

    async def _submit(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        answer_id: str,
        body: SamplingBody,
    ) -> list[RemoteStream]:
        """All prompts or none."""
        options: dict[str, Any] = {"stream": body.stream, "is_scoring": is_scoring(body)}
        options |= {"priority": body.priority, "cache_salt": body.cache_salt or ""}
        streams: list[RemoteStream] = []
        try:
            for number, (ids, asked) in enumerate(zip(prompts, params, strict=True)):
                detokenizer = None
                if body.stream and _is_tokens_enough(asked):
                    detokenizer = self.text.detokenizer(
                        ids, skip_special_tokens=asked.skip_special_tokens
                    )
                opened = await self.engine.submit(
                    ids,
                    asked,
                    request_id=f"{answer_id}-{number}",
                    detokenizer=detokenizer,
                    **options,
                )
                streams.append(opened)
        except (HunchError, asyncio.CancelledError) as error:
            for opened in streams:
                opened.abort()
            if isinstance(error, GrammarError):
                problem = from_error(error)
                problem.param = form_field(body)
                raise problem from None
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
        cursors, settings = [], self.settings
        for number, stream in enumerate(streams):
            row = []
            for index in range(params.n):
                painter = None
                if params.speculation.trace:
                    ids, shows_guesses = stream.output.prompt_token_ids, not settings.hides_guesses
                    painter = Painter(
                        self.text, ids, params.skip_special_tokens, shows_guesses=shows_guesses
                    )
                new_reader = shape.turn.new_reader if shape.turn else None
                reader = new_reader() if new_reader else None
                row.append(Cursor(number * params.n + index, painter, reader))
            cursors.append(row)
        options = body.stream_options or StreamOptions(include_usage=settings.force_usage)
        silence = settings.sse_keep_alive_interval
        return EventStream(
            streams, shape, cursors, deadline=deadline, options=options, keep_alive=silence
        )

    def overview(self) -> dict[str, Any]:
        """What the page's charts and curious operators read."""
        return {
            "time": time.time(),
            "uptime_seconds": time.time() - self.started,
            "model": self.settings.name,
            "is_draining": self.is_draining,
            "num_open": self.engine.num_open,
            "engine": self.engine.stats(),
        }


def model_entry(name: str, root: str, service: Service | None) -> dict[str, Any]:
    """What a list of models says of one; without a service it was never loaded."""
    return {
        "id": name,
        "object": "model",
        "created": int(service.started) if service else 0,
        "owned_by": "hunch",
        "root": root,
        "max_model_len": service.engine.info.max_len if service else None,
    }


def _is_tokens_enough(params: SamplingParams) -> bool:
    """Whether the engine needs to say nothing but tokens; then their text is made here."""
    is_scored = params.logprobs is not None or params.prompt_logprobs is not None
    return params.n == 1 and not (params.stop or is_scored or params.speculation.trace)
