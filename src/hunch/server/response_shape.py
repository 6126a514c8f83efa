"""A `response` of OpenAI's Responses API, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from hunch.chat.pieces import Piece
from hunch.chat.turn import Turn
from hunch.server.cursor import Delta
from hunch.server.events import NamedEvents, answer_of, only, parts_of
from hunch.server.problems import ProblemError
from hunch.server.summary import Json
from hunch.types import RequestOutput


@dataclass(kw_only=True)
class ResponseShape(NamedEvents):
    """Items are written one after another: reasoning, a message, calls."""

    id: str
    turn: Turn
    echo: Json  # what the response repeats of its request
    keep: Callable[[Json], None]  # called with the finished response
    count: Callable[[str], int]  # a text's tokens
    created: int = field(default_factory=lambda: int(time.time()))
    _items: list[Json] = field(default_factory=list)
    _piece_type: str = ""  # of the item that is being written; empty: none is
    _number: int = 0  # of the next event

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        answer = answer_of(self.turn, only(outputs))
        pieces = [Piece("reasoning", answer.reasoning)] if answer.reasoning else []
        if answer.text or not answer.calls:
            pieces.append(Piece("text", answer.text))
        for number, call in enumerate(answer.calls or ()):
            pieces.append(Piece("name", call.name, number))
            pieces.append(Piece("arguments", call.arguments, number))
        for piece in pieces:
            list(self._tell(piece))  # whole or in pieces, items are made in one way
        list(self._end_item())
        return self._finished(outputs)

    def _finished(self, outputs: Sequence[RequestOutput]) -> Json:
        is_cut = only(outputs).finish_reason == "length"
        response = self._response("incomplete" if is_cut else "completed", outputs)
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
            if self._items:
                self._items[-1]["status"] = "incomplete"
        self.keep(response)
        return response

    def _response(self, status: str, outputs: Sequence[RequestOutput] = ()) -> Json:
        return {
            **self.echo,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "output": list(self._items),
            "usage": self._usage(outputs[0]) if outputs else None,
        }

    def _usage(self, output: RequestOutput) -> Json:
        num_prompt, num_output = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
        details = {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0}
        thinking = [item for item in self._items if item["type"] == "reasoning"]
        num_thought = sum(self.count(item["content"][0]["text"]) for item in thinking)
        return {
            "input_tokens": num_prompt,
            "input_tokens_details": details,
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": num_thought},
            "total_tokens": num_prompt + num_output,
        }

    def opening(self, index: int, output: RequestOutput) -> Iterator[Json]:
        yield self._event("response.created", response=self._response("in_progress"))
        yield self._event("response.in_progress", response=self._response("in_progress"))

    def chunks(self, delta: Delta) -> list[Json]:
        return [event for part in parts_of(delta) for event in self._tell(part)]

    def closing(
        self, chunks: list[Json], outputs: Sequence[RequestOutput], has_usage: bool
    ) -> list[Json]:
        if not self._items:
            chunks += self._tell(Piece("text", ""))
        chunks += self._end_item()
        response = self._finished(outputs)
        return [*chunks, self._event(f"response.{response['status']}", response=response)]

    def fault(self, problem: ProblemError) -> bytes:
        facts = {"code": problem.code, "message": problem.message, "param": problem.param}
        error = self._event("error", **facts)
        code = "rate_limit_exceeded" if problem.status == 429 else "server_error"
        response = self._response("failed")
        response["error"] = {"code": code, "message": problem.message}
        return self.encode(error) + self.encode(self._event("response.failed", response=response))

    def _event(self, event_type: str, **fields: object) -> Json:
        event = {"type": event_type, "sequence_number": self._number, **fields}
        self._number += 1
        return event

    # --- items ----------------------------------------------------------------------------------

    def _tell(self, part: Piece) -> Iterator[Json]:
        if part.piece_type == "name":
            yield from self._end_item()
            call_id = self.turn.call_ids.new(part.text, part.call)
            call = {"call_id": call_id, "name": part.text, "arguments": ""}
            yield from self._begin("arguments", {"type": "function_call", **call})
            return
        if self._piece_type != part.piece_type:
            yield from self._end_item()
            yield from self._begin(part.piece_type, _empty_item(part.piece_type))
        item = self._items[-1]
        if part.piece_type == "arguments":
            item["arguments"] += part.text
            yield self._of_item("response.function_call_arguments.delta", delta=part.text)
            return
        item["content"][0]["text"] += part.text
        name = "output_text" if part.piece_type == "text" else "reasoning_text"
        logprobs: Json = {"logprobs": []} if part.piece_type == "text" else {}
        fields = {"content_index": 0, "delta": part.text, **logprobs}
        yield self._of_item(f"response.{name}.delta", **fields)

    def _begin(self, piece_type: str, item: Json) -> Iterator[Json]:
        prefix = {"text": "msg", "reasoning": "rs", "arguments": "fc"}[piece_type]
        item = {"id": f"{prefix}_{uuid.uuid4().hex}", **item, "status": "in_progress"}
        self._piece_type = piece_type
        self._items.append(item)
        shown = {**item, "content": []} if "content" in item else {**item}
        yield self._event("response.output_item.added", output_index=self._index, item=shown)
        if piece_type != "arguments":
            part = dict(item["content"][0])
            yield self._of_item("response.content_part.added", content_index=0, part=part)

    def _end_item(self) -> Iterator[Json]:
        if not self._piece_type:
            return
        item = self._items[-1]
        if self._piece_type == "arguments":
            facts = {"arguments": item["arguments"], "name": item["name"]}
            yield self._of_item("response.function_call_arguments.done", **facts)
        else:
            part = dict(item["content"][0])
            name = "output_text" if self._piece_type == "text" else "reasoning_text"
            logprobs: Json = {"logprobs": []} if self._piece_type == "text" else {}
            fields = {"content_index": 0, "text": part["text"], **logprobs}
            yield self._of_item(f"response.{name}.done", **fields)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        item["status"] = "completed"
        self._piece_type = ""
        yield self._event("response.output_item.done", output_index=self._index, item=dict(item))

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _of_item(self, event_type: str, **fields: object) -> Json:
        item_id = self._items[-1]["id"]
        return self._event(event_type, item_id=item_id, output_index=self._index, **fields)


def _empty_item(piece_type: str) -> Json:
    if piece_type == "reasoning":
        part = {"type": "reasoning_text", "text": ""}
        return {"type": "reasoning", "summary": [], "content": [part]}
    part_of_text: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "content": [part_of_text]}
