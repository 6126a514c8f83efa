"""Anthropic's API over the one chat: bodies in, and the routes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from hunch.chat.turn import call_of
from hunch.server.events import checked, of_schema
from hunch.server.message_shape import MessageShape
from hunch.server.problems import ANTHROPIC_TYPES, ProblemError, faults
from hunch.server.schemas import (
    MAX_COUNT,
    Body,
    ChatBody,
    KnownElsewhere,
    Many,
    Some,
    SpeculationBody,
)
from hunch.server.service import Service
from hunch.server.summary import Json


class Block(BaseModel):
    """Part of a message; what its kind does not need is left aside, as Anthropic does."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Many[Any] | None = None
    source: dict[str, Any] | None = None


class Turned(Body):
    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]


class AnthropicTool(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: str | None = None  # another type than custom is a tool that Anthropic runs itself
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    display: str | None = None


class OutputConfig(Body):
    effort: str | None = None
    format: dict[str, Any] | None = None


class CountBody(KnownElsewhere):
    """POST /v1/messages/count_tokens."""

    model: str | None = None
    messages: Some[Turned]
    system: str | Many[Block] | None = None
    tools: Many[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # for templates, as in vLLM's server
    # Taken, and without effect here.
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    betas: Many[str] | None = None
    mcp_servers: Many[Any] | None = None


class MessagesBody(CountBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    stop_sequences: Many[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stream: bool = False
    seed: int | None = None  # ours, as are the next two
    speculation: SpeculationBody | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    container: Any = None
    inference_geo: str | None = None
    speed: str | None = None


class Fault(BaseModel):
    type: str
    message: str


class FaultBody(BaseModel):
    """Every answer that is not a success."""

    type: Literal["error"]
    error: Fault


FAULTS = faults(FaultBody, (*ANTHROPIC_TYPES, 408, 500))


def add_messages(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages", response_class=Response, responses=FAULTS)
    async def messages(body: MessagesBody, request: Request) -> Response:
        chat = _chat(body, max_len=service.engine.info.max_len)
        model = body.model or service.settings.name
        return await service.chat(chat, request, lambda turn: MessageShape(turn=turn, model=model))

    @app.post("/v1/messages/count_tokens", responses=FAULTS)
    async def count_tokens(body: CountBody) -> dict[str, int]:
        service.check_model(body.model)
        return {"input_tokens": len(await service.chat_ids(_chat(body)))}


def _chat(body: CountBody, max_len: int | None = None) -> ChatBody:
    shaped = [one for message in body.messages for one in _messages(message)]
    if body.system:
        shaped.insert(0, {"role": "system", "content": _text(body.system)})
    fields: Json = {"model": body.model, "messages": shaped, **_tools(body), **_thinking(body)}
    fields["continue_final_message"] = shaped[-1]["role"] == "assistant"
    if body.output_config is not None and body.output_config.format is not None:
        fields["response_format"] = of_schema(body.output_config.format.get("schema", {}))
    if isinstance(body, MessagesBody):
        assert max_len is not None
        fields |= {
            # A server of Anthropic's would take any number up to a model's limit.
            "max_tokens": min(body.max_tokens, max_len),
            "stop": body.stop_sequences,
            "stream": body.stream,
            "speculation": body.speculation,
            "top_p": body.top_p or None,
            **{
                name: getattr(body, name)
                for name in ("temperature", "top_k", "seed", "timeout", "cache_salt")
            },
        }
    return checked(ChatBody, fields)


def _messages(message: Turned) -> Iterator[Json]:
    """One of Anthropic's messages as one or several of OpenAI's."""
    blocks = message.content
    if isinstance(blocks, str):
        yield {"role": message.role, "content": blocks}
        return
    if message.role == "assistant":
        yield _assistant(blocks)
        return
    for block in blocks:
        if block.type == "tool_result":
            content = _text(block.content or "")
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    rest = [block for block in blocks if block.type != "tool_result"]
    if rest or not blocks:
        yield {"role": message.role, "content": _text(rest)}


def _assistant(blocks: Sequence[Block]) -> Json:
    texts = [block for block in blocks if block.type == "text"]
    shaped: Json = {"role": "assistant", "content": _text(texts) if texts else None}
    reasoning = [block.thinking or "" for block in blocks if block.type == "thinking"]
    if reasoning:
        shaped["reasoning_content"] = "".join(reasoning)
    calls = [block for block in blocks if block.type == "tool_use"]
    if calls:
        shaped["tool_calls"] = [
            call_of(block.id, block.name or "", json.dumps(block.input or {})) for block in calls
        ]
    return shaped


def _text(content: str | Sequence[Block | Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for given in content:
        block = given if isinstance(given, Block) else _block(given)
        source = block.source or {}
        if block.type == "document" and source.get("type") == "text":
            texts.append(str(source.get("data", "")))
        elif block.text is not None:
            texts.append(block.text)
        else:
            message = f"content of type {block.type[:40]!r} cannot be used: this model reads text"
            raise ProblemError(400, message, param="messages")
    return "\n".join(texts)


def _block(given: Any) -> Block:
    if not isinstance(given, Mapping) or not isinstance(given.get("type"), str):
        raise ProblemError(400, "content must be blocks with a type", param="messages")
    text = given.get("text")
    return Block(type=given["type"], text=text if isinstance(text, str) else None)


def _tools(body: CountBody) -> Json:
    own = [tool for tool in body.tools or () if tool.type in (None, "custom")]
    names = {"name": "name", "description": "description", "parameters": "input_schema"}
    functions = [{ours: getattr(tool, name) for ours, name in names.items()} for tool in own]
    fields: Json = {"tools": [{"type": "function", "function": one} for one in functions]}
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name}}
        choices: Json = {"auto": "auto", "any": "required", "none": "none", "tool": named}
        fields["tool_choice"] = choices[choice.type]
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields


def _thinking(body: CountBody) -> Json:
    fields: Json = {"chat_template_kwargs": body.chat_template_kwargs}
    if body.output_config is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None:
        is_on = body.thinking.type != "disabled"
        asked = {"enable_thinking": is_on, "thinking": is_on}
        fields["chat_template_kwargs"] = {**asked, **(body.chat_template_kwargs or {})}
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    return fields
