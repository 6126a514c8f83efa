"""OpenAI's Responses API over the one chat: bodies in, and the store of earlier responses."""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Request
from pydantic import AfterValidator, Field
from starlette.responses import Response

from hunch.chat.turn import Turn, call_of
from hunch.config import say_once
from hunch.server.events import checked
from hunch.server.problems import ProblemError, refusal
from hunch.server.response_shape import ResponseShape
from hunch.server.schemas import MAX_COUNT, Body, ChatBody, ChoosingBody, Many
from hunch.server.service import Service
from hunch.server.summary import Json

MAX_STORED = 1000  # responses, and
MAX_STORED_BYTES = 64 * 1024 * 1024  # of conversation, of all of them together
MAX_ITEMS = 4096
FUNCTION = ("name", "description", "parameters", "strict")  # what a chat's tools say of one
SCHEMA = ("name", "description", "schema", "strict")

# Fields that are refused, and what to send in their place.
INSTEAD = {
    "conversation": "no conversations are kept: send previous_response_id",
    "prompt": "no prompts are kept: send instructions and input",
    "moderation": "this server does not moderate",
    "background": "an answer comes with its request: send false, or stream: true",
}


def _can_include(name: str) -> str:
    if name == "message.output_text.logprobs":
        reason = "log-probabilities come with /v1/chat/completions, and not with responses"
        raise refusal("include", reason)
    return name


Include = Annotated[str, AfterValidator(_can_include)]


class ReasoningBody(Body):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None


class TextBody(Body):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesOptions(Body):
    include_obfuscation: bool = False


class ResponsesBody(ChoosingBody):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_ITEMS)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningBody | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    text: TextBody | None = None
    previous_response_id: str | None = None
    store: bool = True
    stream: bool = False
    stream_options: ResponsesOptions | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    # Notes for the operator's books, and what has no meaning for a model that runs here.
    metadata: dict[str, str] | None = None
    user: str | None = None
    include: Many[Include] | None = None
    max_tool_calls: int | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    top_logprobs: Literal[0] | None = None
    client_metadata: dict[str, Any] | None = None
    prompt_cache_options: dict[str, Any] | None = None
    access_programs: Any = None
    context_management: Many[Any] | None = None
    image: dict[str, Any] | None = None

    @classmethod
    def _renamed(cls, given: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
        for name, reason in INSTEAD.items():
            if given.get(name) not in (None, False):
                raise refusal(name, reason)
        found = {name: value for name, value in given.items() if name not in INSTEAD}
        return found if known.issuperset(found) else super()._renamed(found, known)


class Stored:
    """Responses that later ones can refer to: the newest, within limits, in memory alone.

    One for all models of a server, as the path of a response names no model.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Json, list[Json], int]] = OrderedDict()
        self._num_bytes = 0

    def put(self, response: Json, items: Sequence[Json]) -> None:
        """Keep a response with the whole conversation up to and with it."""
        size = len(json.dumps([response, items]))
        self._kept[response["id"]] = (response, list(items), size)
        self._num_bytes += size
        while len(self._kept) > MAX_STORED or self._num_bytes > MAX_STORED_BYTES:
            self._num_bytes -= self._kept.popitem(last=False)[1][2]

    def response(self, response_id: str) -> Json:
        return self._find(response_id)[0]

    def drop(self, response_id: str) -> None:
        self._num_bytes -= self._find(response_id)[2]
        del self._kept[response_id]

    def conversation(self, response_id: str) -> list[Json]:
        return self._find(response_id)[1]

    def before(self, response_id: str) -> list[Json]:
        """What a request goes on with."""
        return self._find(response_id, 400, "previous_")[1]

    def _find(
        self, response_id: str, status: int = 404, prefix: str = ""
    ) -> tuple[Json, list[Json], int]:
        found = self._kept.get(response_id)
        if found is None:
            message = f"there is no response {response_id[:80]!r} here; older ones are forgotten"
            code, param = f"{prefix}response_not_found", f"{prefix}response_id"
            raise ProblemError(status, message, code=code, param=param)
        self._kept.move_to_end(response_id)
        return found


def add_responses(app: FastAPI, service: Service, stored: Stored) -> None:
    def conversation(body: ResponsesBody) -> list[Json]:
        """What was said before, and what the body adds to it."""
        items, before = _items(body.input), body.previous_response_id
        return items if before is None else [*stored.before(before), *items]

    @app.post("/v1/responses", response_class=Response)
    async def responses(body: ResponsesBody, request: Request) -> Response:
        items = conversation(body)
        echo = _echo(body, service.settings.name)

        def keep(response: Json) -> None:
            if body.store:
                stored.put(response, [*items, *response["output"]])

        def count(text: str) -> int:
            return len(service.text.encode(text, add_special_tokens=False))

        def shape(turn: Turn) -> ResponseShape:
            return ResponseShape(turn=turn, echo=echo, keep=keep, count=count, id=echo["id"])

        return await service.chat(_chat(body, items), request, shape)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens(body: ResponsesBody) -> dict[str, Any]:
        """How many tokens such a request would read."""
        service.check_model(body.model)
        ids = await service.chat_ids(_chat(body, conversation(body)))
        return {"object": "response.input_tokens", "input_tokens": len(ids)}

    @app.get("/v1/responses/{response_id}")
    async def one_response(response_id: str) -> dict[str, Any]:
        return stored.response(response_id)

    @app.get("/v1/responses/{response_id}/input_items")
    async def input_items(
        response_id: str, after: str = "", limit: int = 20, order: str = "desc"
    ) -> dict[str, Any]:
        """What a response answered: the conversation before it, the newest first."""
        found = list(_numbered(stored.conversation(response_id), stored.response(response_id)))
        if order != "asc":
            found.reverse()
        ids = [item["id"] for item in found]
        start = ids.index(after) + 1 if after in ids else 0
        page = found[start : start + max(1, min(limit, 100))]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        has_more = start + len(page) < len(found)
        return {"object": "list", "data": page, "has_more": has_more, **ends}

    @app.delete("/v1/responses/{response_id}")
    async def drop_response(response_id: str) -> dict[str, Any]:
        stored.drop(response_id)
        return {"id": response_id, "object": "response", "deleted": True}


def _numbered(items: Sequence[Json], response: Json) -> Iterator[Json]:
    """A response's input, each item with an id and its content as parts."""
    for number, item in enumerate(items[: len(items) - len(response["output"])]):
        content = item.get("content")
        if isinstance(content, str):
            part_type = "output_text" if item.get("role") == "assistant" else "input_text"
            item = {**item, "content": [{"type": part_type, "text": content}]}
        yield {"type": "message", "id": f"item_{number}_{response['id']}", **item}


def _items(given: str | list[Json]) -> list[Json]:
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": given}]
    return given


def _chat(body: ResponsesBody, items: Sequence[Json]) -> ChatBody:
    messages = list(_messages(items))
    if body.instructions:
        messages.insert(0, {"role": "system", "content": body.instructions})
    if not messages:
        raise ProblemError(400, "input: at least one item is needed", param="input")
    fields: Json = {
        "model": body.model,
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "tools": [{"type": "function", "function": _some(t, FUNCTION)} for t in _functions(body)],
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "response_format": _format(body.text),
        "truncate_prompt_tokens": -1 if body.truncation == "auto" else None,
    }
    own = {"stream", "chat_template_kwargs", *ChoosingBody.model_fields}
    for name in body.model_fields_set & own:
        fields[name] = getattr(body, name)
    return checked(ChatBody, fields)


def _functions(body: ResponsesBody) -> list[Json]:
    """The tools that the model is told of. Others run at OpenAI's: agents send them to every
    server, and go on without."""
    functions = [tool for tool in body.tools or () if tool.get("type") == "function"]
    if len(functions) == len(body.tools or ()):
        return functions
    say_once("/v1/responses: tools of other types than 'function' are passed by")
    others = [tool.get("type") for tool in body.tools or () if tool.get("type") != "function"]
    choice = body.tool_choice
    choice_type = choice.get("type") if isinstance(choice, dict) else None
    if choice_type in others or (not functions and choice == "required"):
        message = f"only tools of type 'function' are called here, not {others[0]!r:.50}"
        raise ProblemError(400, message, param="tool_choice")
    return functions


def _choice(choice: str | Json | None) -> str | Json | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: TextBody | None) -> Json | None:
    asked = text.format if text else None
    if not asked or asked.get("type") != "json_schema":
        return asked
    return {"type": "json_schema", "json_schema": _some(asked, SCHEMA)}


def _some(given: Json, names: Sequence[str]) -> Json:
    return {name: given[name] for name in names if name in given}


def _messages(items: Sequence[Json]) -> Iterator[Json]:
    """Items as chat messages: what an assistant said and called in a row is one message."""
    reply: Json = {}
    for number, item in enumerate(items):
        item_type = item.get("type", "message")
        if item_type == "reasoning":
            parts = [*(item.get("content") or ()), *(item.get("summary") or ())]
            text = _text(parts, number)
            reply = {**reply, "role": "assistant", "reasoning_content": text or None}
        elif item_type == "function_call":
            call = call_of(item.get("call_id"), item.get("name"), item.get("arguments") or "{}")
            calls = [*reply.get("tool_calls", ()), call]
            reply = {**reply, "role": "assistant", "tool_calls": calls}
        elif item_type == "message" and item.get("role") == "assistant" and "content" not in reply:
            reply = {**reply, "role": "assistant", "content": _text(item.get("content"), number)}
        else:
            if reply:
                yield reply
            reply = {}
            if item_type == "message" and item.get("role") == "assistant":
                reply = {"role": "assistant", "content": _text(item.get("content"), number)}
            else:
                yield _message(item, item_type, number)
    if reply:
        yield reply


def _message(item: Json, item_type: str, number: int) -> Json:
    if item_type == "message":
        return {"role": item.get("role"), "content": _text(item.get("content"), number)}
    if item_type == "function_call_output":
        output = _text(item.get("output"), number)
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
    message = f"input[{number}]: items of type {str(item_type)[:40]!r} cannot be used here"
    raise ProblemError(400, message, param="input")


def _text(content: Any, number: int) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            message = f"input[{number}]: this model reads text, and no other content"
            raise ProblemError(400, message, param="input")
        texts.append(text)
    return "".join(texts)


def _echo(body: ResponsesBody, model: str) -> Json:
    """What a response repeats of its request."""
    asked = body.text.format if body.text else None
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "model": body.model or model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": body.reasoning.model_dump() if body.reasoning else None,
        "store": body.store,
        "temperature": body.temperature,
        "text": {"format": asked or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": _functions(body),
        "top_p": body.top_p,
        "truncation": body.truncation,
        "user": body.user,
        "service_tier": "default",
        "background": False,
    }
