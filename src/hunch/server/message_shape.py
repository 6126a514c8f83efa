"""A `message` of Anthropic's API, whole or as events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hunch.chat.pieces import Piece
from hunch.chat.turn import Turn
from hunch.server.calls import loads_arguments
from hunch.server.cursor import Delta, ending_of
from hunch.server.events import NamedEvents, answer_of, only, parts_of
from hunch.server.problems import ANTHROPIC, ProblemError
from hunch.server.summary import Json
from hunch.types import CompletionOutput, RequestOutput

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


@dataclass(kw_only=True)
class MessageShape(NamedEvents):
    """A `message`, whole or as events."""

    turn: Turn
    model: str
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _open: str | None = None  # the type of the pieces in the block that is being written
    _num_blocks: int = 0
    _finish_reason: str | None = None

    def whole(self, outputs: Sequence[RequestOutput]) -> Json:
        choice = only(outputs)
        answer = answer_of(self.turn, choice)
        content: list[Json] = []
        if answer.reasoning:
            content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        for number, call in enumerate(answer.calls or ()):
            content.append(
                {
                    "type": "tool_use",
                    "id": self._new_id(call.name, number),
                    "name": call.name,
                    "input": loads_arguments(call.arguments),
                }
            )
        finish = ending_of(choice.finish_reason, bool(answer.calls))
        return {**self._message(content), **_ending(choice, finish), "usage": _usage(outputs)}

    def _message(self, content: list[Json]) -> Json:
        names = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**names, "content": content, "stop_reason": None, "stop_sequence": None}

    def opening(self, index: int, output: RequestOutput) -> Iterator[Json]:
        message = {**self._message([]), "usage": _usage([output])}
        yield {"type": "message_start", "message": message}

    def chunks(self, delta: Delta) -> list[Json]:
        self._finish_reason = delta.finish_reason
        return [event for part in parts_of(delta) for event in self._tell(part)]

    def _tell(self, part: Piece) -> Iterator[Json]:
        if part.piece_type == "name":
            yield from self._end_block()
            call_id = self._new_id(part.text, part.call)
            yield self._begin({"type": "tool_use", "id": call_id, "name": part.text})
            self._open = "arguments"
            return
        if self._open != part.piece_type:
            yield from self._end_block()
            yield self._begin(
                {"type": "thinking", "thinking": "", "signature": ""}
                if part.piece_type == "reasoning"
                else {"type": "text", "text": ""}
            )
            self._open = part.piece_type
        name, key = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "arguments": ("input_json_delta", "partial_json"),
        }[part.piece_type]
        news = {"type": name, key: part.text}
        yield {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": news}

    def _begin(self, block: Json) -> Json:
        self._num_blocks += 1
        if block["type"] == "tool_use":
            block["input"] = {}
        index = self._num_blocks - 1
        return {"type": "content_block_start", "index": index, "content_block": block}

    def _end_block(self) -> Iterator[Json]:
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._num_blocks - 1}
            self._open = None

    def _new_id(self, name: str, number: int) -> str:
        call_id = self.turn.call_ids.new(name, number)
        return f"toolu_{call_id[5:]}" if call_id.startswith("call_") else call_id

    def closing(
        self, chunks: list[Json], outputs: Sequence[RequestOutput], has_usage: bool
    ) -> list[Json]:
        end = {
            "type": "message_delta",
            "delta": _ending(only(outputs), self._finish_reason),
            "usage": _usage(outputs),
        }
        return [*chunks, *self._end_block(), end, {"type": "message_stop"}]

    def fault(self, problem: ProblemError) -> bytes:
        return self.encode(problem.body(ANTHROPIC))


def _ending(choice: CompletionOutput, finish_reason: str | None) -> Json:
    is_stop_text = finish_reason == "stop" and isinstance(choice.stop_reason, str)
    reason = "stop_sequence" if is_stop_text else STOP_REASONS.get(finish_reason or "")
    return {"stop_reason": reason, "stop_sequence": choice.stop_reason if is_stop_text else None}


def _usage(outputs: Sequence[RequestOutput]) -> Json:
    output = outputs[0]
    num_cached = output.num_cached_tokens
    return {
        "input_tokens": len(output.prompt_token_ids) - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": len(output.outputs[0].token_ids),
    }
