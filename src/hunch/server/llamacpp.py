"""llama.cpp's own paths, for the editors that call them: /infill, /props, /apply-template."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import FastAPI, Request
from pydantic import ConfigDict, Field
from starlette.responses import Response

from hunch.chat.turn import Turn
from hunch.server.cursor import Delta
from hunch.server.events import completion_body, only
from hunch.server.middle import middle_of
from hunch.server.problems import ProblemError
from hunch.server.schemas import MAX_COUNT, Body, ChatBody, Many, Message, Some, ToolBody
from hunch.server.service import Service
from hunch.server.summary import Json
from hunch.types import RequestOutput, SamplingParams


class ExtraFile(Body):
    filename: str = "file"
    text: str


class InfillBody(Body):
    """POST /infill. Samplers of llama.cpp that are not here are left aside."""

    model_config = ConfigDict(extra="ignore", strict=True)

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[Many[ExtraFile], Field(max_length=256)] | None = None
    prompt: str | None = None  # goes after the prefix
    n_predict: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: Many[str] | None = None
    stream: bool = False


class TemplateBody(Body):
    """POST /apply-template."""

    messages: Some[Message]
    tools: Many[ToolBody] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True


def add_llamacpp(app: FastAPI, service: Service) -> None:
    @app.post("/infill", response_class=Response)
    async def infill(body: InfillBody, request: Request) -> Response:
        marks = middle_of(service.text)
        prefix: list[int] = []
        for extra in body.input_extra or ():
            text = f"{extra.filename}\n{extra.text}\n"
            prefix += [marks.file] if marks.file is not None else []
            prefix += await service.tokens(text)
        prefix += await service.tokens(body.input_prefix + (body.prompt or ""))
        suffix = await service.tokens(body.input_suffix)
        fields: Json = {
            "prompt": marks.prompt(service.text, prefix, suffix),
            "max_tokens": -1 if body.n_predict is None else body.n_predict,
            "stop_token_ids": list(marks.ends),
        }
        for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "stream"):
            fields[name] = getattr(body, name)
        return await service.complete(completion_body(fields), request, InfillShape)

    @app.get("/props")
    async def props() -> dict[str, Any]:
        """What is served, as llama.cpp's server says it."""
        info = service.engine.info
        return {
            "default_generation_settings": {
                "n_ctx": info.max_len,
                "params": dict(service.defaults),
            },
            "total_slots": info.max_rows,
            "model_path": service.settings.served_model_names[0],
            "model_alias": service.settings.served_model_names[0],
            "chat_template": service.chat_template or service.text.chat_template or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"hunch {service.settings.version}",
            "tool_call_parser": service.chat_format.tool_parser,
            "reasoning_parser": service.chat_format.reasoning_parser,
        }

    @app.post("/apply-template")
    async def apply_template(body: TemplateBody) -> dict[str, str]:
        """The prompt a chat would be answered from, as text."""
        chat = ChatBody(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
        )
        turn = await service.open_turn(chat, SamplingParams())
        return {"prompt": service.text.decode(turn.prompt_ids, skip_special_tokens=False)}


@dataclass(kw_only=True)
class InfillShape:
    """`content`, whole or piece by piece."""

    id: str = field(default_factory=lambda: f"infill-{uuid.uuid4().hex}")
    turn: Turn | None = None
    media_type: str = "text/event-stream"
    last: bytes = b""
    is_plain: bool = False
    needs_prompt: bool = False

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choice = only(outputs)
        num_cached = outputs[0].num_cached_tokens
        return {
            "index": 0,
            "content": choice.text,
            "stop": True,
            "stop_type": {"length": "limit"}.get(choice.finish_reason or "", "eos"),
            "truncated": False,
            "tokens_predicted": len(choice.token_ids),
            "tokens_evaluated": len(outputs[0].prompt_token_ids) - num_cached,
            "tokens_cached": num_cached,
            "generation_settings": {"seed": choice.seed},
        }

    def opening(self, index: int, output: RequestOutput) -> Iterator[Json]:
        return iter(())

    def chunks(self, delta: Delta) -> list[Json]:
        return [{"index": 0, "content": delta.text, "stop": False}] if delta.text else []

    def closing(
        self, chunks: list[Json], outputs: Sequence[RequestOutput], has_usage: bool
    ) -> list[Json]:
        return [*chunks, {**self.whole(outputs), "content": ""}]

    def encode(self, chunk: Json) -> bytes:
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    def fault(self, problem: ProblemError) -> bytes:
        return self.encode(problem.body())
