"""Streams of named events, as Anthropic's Messages and OpenAI's Responses are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

from pydantic import ValidationError

from hunch.chat.pieces import Answer, Piece, read
from hunch.chat.turn import Turn
from hunch.server.cursor import Delta
from hunch.server.problems import from_validation
from hunch.server.schemas import ChatBody, CompletionBody
from hunch.server.summary import Json
from hunch.types import CompletionOutput, RequestOutput

B = TypeVar("B", ChatBody, CompletionBody)


class NamedEvents:
    """A shape's part that is the same for both. One answer per request, never plain text alone."""

    media_type = "text/event-stream"
    last = b""
    is_plain = False
    needs_prompt = False

    def encode(self, chunk: Json) -> bytes:
        data = json.dumps(chunk, separators=(",", ":"))
        return f"event: {chunk['type']}\ndata: {data}\n\n".encode()


def parts_of(delta: Delta) -> Sequence[Piece]:
    """What came, told apart."""
    if delta.parts is not None:
        return delta.parts
    return [Piece("text", delta.text)] if delta.text else []


def answer_of(turn: Turn, choice: CompletionOutput) -> Answer:
    """A whole answer, told apart."""
    if turn.new_reader is None:
        return Answer(text=choice.text)
    return read(turn.new_reader(), choice.text)


def only(outputs: Sequence[RequestOutput]) -> CompletionOutput:
    """The one answer of such a request."""
    return outputs[0].outputs[0]


def of_schema(schema: Json) -> Json:
    """OpenAI's `response_format` for JSON of a schema."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def checked(body_class: type[B], fields: Json) -> B:
    """The body of ours that another API's asks for; fields that are None are left out."""
    try:
        return body_class.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_input=False)) from None
