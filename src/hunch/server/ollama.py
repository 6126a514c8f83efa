"""Ollama's API over the one chat: lines of JSON, streamed unless a body says otherwise."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

from fastapi import FastAPI, Request
from pydantic import ConfigDict
from starlette.responses import JSONResponse, Response

from hunch.chat.pieces import Call
from hunch.chat.turn import Turn, call_of
from hunch.config import say_once
from hunch.server.calls import loads_arguments
from hunch.server.cursor import Delta
from hunch.server.events import answer_of, checked, of_schema, only, parts_of
from hunch.server.problems import ProblemError, refusal
from hunch.server.schemas import OLLAMA_FAULTS, Body, ChatBody, CompletionBody, Many
from hunch.server.service import Service
from hunch.server.summary import Json
from hunch.types import RequestOutput

REFUSED = {  # of /api/generate
    "images": "images cannot be used: this model reads text",
    "template": "the model's own chat template is used; raw: true uses none",
    "context": "send the conversation to /api/chat: what was read before is found in the cache",
}
NEVER = "9999-12-31T23:59:59Z"  # when a model is unloaded
LOGPROBS = ("logprobs", "top_logprobs")
API_VERSION = "0.9.0"  # Ollama's, that knew what is known here: clients refuse those too old
_SHARED = ("temperature", "top_k", "top_p", "min_p", "seed", "stop")
OPTIONS = {  # Ollama's names for what a request may ask of sampling -> ours
    **{name: name for name in (*_SHARED, "presence_penalty", "frequency_penalty")},
    "num_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
}


class OllamaBody(Body):
    """What chat and generate have in common. Unknown options are left aside, as Ollama does."""

    model: str
    stream: bool = True
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: Any = None

    @classmethod
    def _renamed(cls, given: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
        for name in LOGPROBS:
            if given.get(name):
                text = "log-probabilities come with /v1/chat/completions and /v1/completions"
                raise refusal(name, text)
        found = {name: value for name, value in given.items() if name not in LOGPROBS}
        return found if known.issuperset(found) else super()._renamed(found, known)


class OllamaMessage(Body):
    model_config = ConfigDict(extra="ignore", strict=True)

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Many[Any] | None = None
    tool_calls: Many[dict[str, Any]] | None = None
    tool_name: str | None = None


class OllamaChatBody(OllamaBody):
    """POST /api/chat."""

    messages: Many[OllamaMessage] = []  # noqa: RUF012
    tools: Many[dict[str, Any]] | None = None


class GenerateBody(OllamaBody):
    """POST /api/generate."""

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool = False
    template: str | None = None
    context: Many[int] | None = None
    images: Many[Any] | None = None


class ShowBody(Body):
    """POST /api/show."""

    model: str | None = None
    name: str | None = None
    verbose: bool = False


def add_ollama(app: FastAPI, service: Service) -> None:
    _add_answers(app, service)
    _add_lists(app, service)


def name_of(service: Service, given: str) -> str:
    """Ollama's clients say `name:latest` where no version is meant."""
    is_known = given in service.settings.served_model_names
    name = given if is_known else given.removesuffix(":latest")
    service.check_model(name)
    return name


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/api/chat", response_class=Response, responses=OLLAMA_FAULTS)
    async def chat(body: OllamaChatBody, request: Request) -> Response:
        model = name_of(service, body.model)
        if not body.messages:  # how Ollama's clients ask for a model to be loaded
            return JSONResponse({**_head(model), "message": _reply(), **_without_prompt(body)})
        messages = [_message(message) for message in body.messages]
        fields = {"model": model, "messages": messages, "tools": body.tools, **_common(body)}
        return await service.chat(checked(ChatBody, fields), request, partial(_shape, model, True))

    @app.post("/api/generate", response_class=Response, responses=OLLAMA_FAULTS)
    async def generate(body: GenerateBody, request: Request) -> Response:
        model = name_of(service, body.model)
        for field_name, reason in REFUSED.items():
            if getattr(body, field_name):
                raise ProblemError(400, f"{field_name}: {reason}", param=field_name)
        if not body.prompt:
            return JSONResponse({**_head(model), "response": "", **_without_prompt(body)})
        common = {"model": model, **_common(body)}
        if body.raw or body.suffix:
            fields = {"max_tokens": -1, **common, "prompt": body.prompt, "suffix": body.suffix}
            fields.pop("chat_template_kwargs", None)
            fields.pop("reasoning_effort", None)
            plain = partial(_shape, model, False, None)
            return await service.complete(checked(CompletionBody, fields), request, plain)
        messages = [{"role": "user", "content": body.prompt}]
        if body.system:
            messages.insert(0, {"role": "system", "content": body.system})
        asked = checked(ChatBody, {**common, "messages": messages})
        return await service.chat(asked, request, partial(_shape, model, False))


def tag(name: str, service: Service | None) -> Json:
    """What Ollama's lists say of a model; without a service it was never loaded."""
    about = _about(service)
    made = datetime.fromtimestamp(service.started if service else 0, UTC).isoformat()
    return {"name": name, "model": name, "modified_at": made, "size": about.get("bytes", 0),
            "digest": "", "details": _details(about)}  # fmt: skip


def _about(service: Service | None) -> Json:
    return dict(service.engine.info.model) if service else {}


def _details(about: Json) -> Json:
    family = _family(about)
    return {"parent_model": "", "format": "", "family": family,
            "families": [family] if family else [], "parameter_size": "",
            "quantization_level": ""}  # fmt: skip


def _add_lists(app: FastAPI, service: Service) -> None:
    @app.get("/api/tags", responses=OLLAMA_FAULTS)
    async def tags() -> dict[str, Any]:
        return {"models": [tag(name, service) for name in service.settings.served_model_names]}

    @app.get("/api/ps", responses=OLLAMA_FAULTS)
    async def running() -> dict[str, Any]:
        known = (await tags())["models"]
        more = {"expires_at": NEVER, "size_vram": 0, "context_length": service.engine.info.max_len}
        return {"models": [{**one, **more} for one in known]}

    @app.post("/api/show", responses=OLLAMA_FAULTS)
    async def show(body: ShowBody) -> dict[str, Any]:
        name_of(service, body.model or body.name or service.settings.name)
        abilities = ["completion", "tools"]
        if service.chat_format.has_reasoning:
            abilities.append("thinking")
        return {
            "modelfile": "",
            "parameters": "",
            "template": service.chat_template or service.text.chat_template or "",
            "details": _details(_about(service)),
            "model_info": {
                "general.architecture": (name := _family(_about(service)) or "general"),
                f"{name}.context_length": service.engine.info.max_len,
            },
            "capabilities": abilities,
            "modified_at": datetime.fromtimestamp(service.started, UTC).isoformat(),
        }

    @app.get("/api/version", responses=OLLAMA_FAULTS)
    async def version() -> dict[str, str]:
        return {"version": API_VERSION}


def _family(about: Json) -> str:
    """Llama's is llama."""
    name, _, _ = str(about.get("architecture", "")).partition("For")
    return name.removesuffix("LMHeadModel").lower()


def _shape(model: str, is_chat: bool, turn: Turn | None) -> OllamaShape:
    return OllamaShape(model=model, turn=turn, is_chat=is_chat)


def _common(body: OllamaBody) -> Json:
    """Sampling, format and thinking under our names."""
    fields: Json = {"stream": body.stream}
    for theirs, ours in OPTIONS.items():
        value = (body.options or {}).get(theirs)
        if value is not None:
            fields[ours] = -1 if theirs == "num_predict" and value == -2 else value
    if isinstance(body.format, dict):
        fields["response_format"] = of_schema(body.format)
    elif body.format:
        fields["response_format"] = {"type": "json_object"}
    if isinstance(body.think, str):
        fields["reasoning_effort"] = body.think
    elif body.think is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.think, "thinking": body.think}
    return fields


def _without_prompt(body: OllamaBody) -> Json:
    """The end of an answer to a body without a prompt: such ask to load a model or to unload it."""
    is_leaving = str(body.keep_alive).rstrip("smh") == "0"
    if is_leaving:
        say_once("keep_alive 0 has no effect: --idle-unload says when models are unloaded")
    return {"done": True, "done_reason": "unload" if is_leaving else "load"}


def _message(message: OllamaMessage) -> Json:
    if message.images:
        raise ProblemError(400, "images cannot be used: this model reads text", param="images")
    shaped: Json = {"role": message.role, "content": message.content}
    if message.thinking:
        shaped["reasoning_content"] = message.thinking
    if message.tool_name:
        shaped["name"] = message.tool_name
    if message.tool_calls:
        functions = [call.get("function", {}) for call in message.tool_calls]
        shaped["tool_calls"] = [
            call_of(f"call_{number}", one.get("name"), json.dumps(one.get("arguments") or {}))
            for number, one in enumerate(functions)
        ]
    return shaped


def _head(model: str) -> Json:
    return {"model": model, "created_at": datetime.now(UTC).isoformat()}


def _reply(text: str = "") -> Json:
    return {"role": "assistant", "content": text}


@dataclass(kw_only=True)
class OllamaShape:
    """A line per piece of news; calls are told once they are whole."""

    model: str
    turn: Turn | None
    is_chat: bool = True
    id: str = field(default_factory=lambda: f"ollama-{uuid.uuid4().hex}")
    media_type: str = "application/x-ndjson"
    last: bytes = b""
    is_plain: bool = False
    needs_prompt: bool = False
    _began: float = field(default_factory=time.monotonic)
    _call: Call | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choice = only(outputs)
        if self.turn is None:
            return {**self._line(choice.text), **self._end(outputs)}
        answer = answer_of(self.turn, choice)
        line = self._line(answer.text, answer.reasoning, answer.calls or [])
        return {**line, **self._end(outputs)}

    def _line(self, text: str, thinking: str = "", calls: Sequence[Call] = ()) -> Json:
        line = {**_head(self.model), "done": False}
        if not self.is_chat:
            line["response"] = text
            return {**line, "thinking": thinking} if thinking else line
        message = _reply(text)
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = [
                {"function": {"name": c.name, "arguments": loads_arguments(c.arguments)}}
                for c in calls
            ]
        return {**line, "message": message}

    def _end(self, outputs: Sequence[RequestOutput]) -> Json:
        choice = only(outputs)
        nanoseconds = int((time.monotonic() - self._began) * 1e9)
        # From the arrival to the first token, as the engine measured it.
        reading = int((outputs[0].stats.get("first_token_seconds") or 0) * 1e9)
        reading = max(1, min(reading, nanoseconds - 1))
        return {
            "done": True,
            "done_reason": choice.finish_reason,
            "total_duration": nanoseconds,
            "load_duration": 0,
            "prompt_eval_count": len(outputs[0].prompt_token_ids),
            "prompt_eval_duration": reading,
            "eval_count": len(choice.token_ids),
            "eval_duration": max(1, nanoseconds - reading),
        }

    def opening(self, index: int, output: RequestOutput) -> Iterator[Json]:
        return iter(())

    def chunks(self, delta: Delta) -> list[Json]:
        lines: list[Json] = []
        for part in parts_of(delta):
            if part.piece_type == "arguments":
                assert self._call is not None
                self._call.arguments += part.text
                continue
            lines += self._end_call()
            if part.piece_type == "name":
                self._call = Call(part.text)
            elif part.piece_type == "reasoning":
                lines.append(self._line("", part.text))
            else:
                lines.append(self._line(part.text))
        return lines

    def _end_call(self) -> list[Json]:
        call, self._call = self._call, None
        return [] if call is None else [self._line("", calls=[call])]

    def closing(
        self, chunks: list[Json], outputs: Sequence[RequestOutput], has_usage: bool
    ) -> list[Json]:
        return [*chunks, *self._end_call(), {**self._line(""), **self._end(outputs)}]

    def encode(self, chunk: Json) -> bytes:
        return json.dumps(chunk).encode() + b"\n"

    def fault(self, problem: ProblemError) -> bytes:
        return self.encode({"error": problem.message})
