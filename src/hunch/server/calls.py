"""Tool calls and reasoning in OpenAI's chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hunch.chat.ids import CallIds
from hunch.chat.pieces import Piece
from hunch.chat.turn import call_of

Json = dict[str, Any]


def delta_of(parts: Sequence[Piece], call_ids: CallIds) -> Json:
    """What a chunk's `delta` says of these pieces."""
    delta: Json = {}
    calls: dict[int, Json] = {}
    for part in parts:
        if part.piece_type == "text":
            delta["content"] = delta.get("content", "") + part.text
        elif part.piece_type == "reasoning":
            reasoning = delta.get("reasoning_content", "") + part.text
            delta |= {"reasoning_content": reasoning, "reasoning": reasoning}
        elif part.piece_type == "name":
            call_id = call_ids.new(part.text, part.call)
            calls[part.call] = {"index": part.call, **call_of(call_id, part.text, "")}
        else:
            begun = {"index": part.call, "function": {"arguments": ""}}
            calls.setdefault(part.call, begun)["function"]["arguments"] += part.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def without_reasoning(message: Json) -> Json:
    return {k: v for k, v in message.items() if k not in ("reasoning", "reasoning_content")}


def loads_arguments(arguments: str) -> Json:
    """Arguments as the object they are; a call that was cut has none."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
