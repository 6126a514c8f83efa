"""Anthropic's Messages API, as its client speaks it (which the slow tests bring themselves)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.live_server import LiveServer, Start

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "get_weather", "description": "?", "input_schema": CITY}]
KEY = "secret-key"


@pytest.fixture(scope="module")
def thinker(start_server: Start) -> LiveServer:
    return start_server(reasoning_parser="qwen3", max_model_len=4096, api_keys=[KEY])


def ask(server: LiveServer, path: str = "/v1/messages", **fields: Any) -> Any:
    body = {"model": "bytes", "max_tokens": 500, **fields}
    if path.endswith("count_tokens"):
        del body["max_tokens"]
    headers = {"x-api-key": KEY, "anthropic-version": "2023-06-01"}
    return server.post(path + "?beta=true", body, headers=headers)


def user(text: str) -> list[dict[str, Any]]:
    block = {"type": "text", "text": f"SAY[{text}]YAS", "cache_control": {"type": "ephemeral"}}
    return [{"role": "user", "content": [block]}]


def events_of(answer: Any) -> list[dict[str, Any]]:
    events = []
    for frame in answer.text.strip().split("\n\n"):
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def test_a_message(thinker: LiveServer) -> None:
    answer = ask(thinker, messages=user("Warm."), system="Be brief.", metadata={"user_id": "1"})
    message = answer.json()
    assert message["content"] == [{"type": "text", "text": "Warm."}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "bytes")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    assert message["usage"]["output_tokens"] == 6


def test_fields_of_vllms_messages(thinker: LiveServer) -> None:
    notes = {"cache_salt": "s", "kv_transfer_params": {}, "mm_payload": "tensors"}
    fields = {"messages": user("Warm."), "chat_template_kwargs": {"enable_thinking": False}}
    assert ask(thinker, **fields, **notes).json()["content"][0]["text"] == "Warm."
    count = "/v1/messages/count_tokens"
    plain, without = ask(thinker, count, messages=user("a")), ask(thinker, count, **fields)
    assert (plain.status_code, without.status_code) == (200, 200)


def test_thinking_text_and_tool_use(thinker: LiveServer) -> None:
    says = user(f"<think>Hm.</think>I look.\n{CALL}")
    fields: dict[str, Any] = {"messages": says, "tools": TOOLS}
    message = ask(thinker, **fields, thinking={"type": "enabled", "budget_tokens": 1024}).json()
    thinking, text, use = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": ""}
    assert text["text"] == "I look."
    assert (use["name"], use["input"]) == ("get_weather", {"city": "Rome"})
    assert message["stop_reason"] == "tool_use"
    events = events_of(ask(thinker, **fields, stream=True))
    assert events[0]["type"] == "message_start"
    assert events[-1]["type"] == "message_stop"
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] == message["usage"]["output_tokens"]
    blocks: list[dict[str, Any]] = []
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({"kind": event["content_block"]["type"], "said": ""})
        elif event["type"] == "content_block_delta":
            delta = dict(event["delta"])
            assert event["index"] == len(blocks) - 1
            delta.pop("type")
            blocks[-1]["said"] += next(iter(delta.values()))
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == [0, 1, 2]
    assert blocks == [
        {"kind": "thinking", "said": "Hm."},
        {"kind": "text", "said": "I look."},
        {"kind": "tool_use", "said": '{"city": "Rome"}'},
    ]


def test_results_of_tools_go_back(thinker: LiveServer) -> None:
    history = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {
                    "type": "tool_use",
                    "id": "toolu_1",
                    "name": "get_weather",
                    "input": {"city": "R"},
                },
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "SAY[Warm.]YAS"},
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    message = ask(thinker, messages=history, tools=TOOLS).json()
    assert message["content"][0]["text"] == "Warm."
    count = ask(thinker, "/v1/messages/count_tokens", messages=history, tools=TOOLS)
    usage = message["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert count.json() == {"input_tokens": num_prompt}


def test_an_answer_can_be_begun_and_stopped(thinker: LiveServer) -> None:
    messages = [*user("abc. def"), {"role": "assistant", "content": "Well:"}]
    message = ask(thinker, messages=messages, stop_sequences=["."]).json()
    assert message["content"][0]["text"] == "abc"
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", ".")
    assert ask(thinker, messages=user("abcdef"), max_tokens=3).json()["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("fields", "status", "kind"),
    [
        ({"messages": []}, 400, "invalid_request_error"),
        ({"model": "nobody"}, 404, "not_found_error"),
        ({"temprature": 1}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, None),
        ({"tool_choice": {"type": "tool", "name": "x"}}, 400, None),
    ],
)
def test_errors_have_anthropics_form(
    thinker: LiveServer, fields: dict[str, Any], status: int, kind: str | None
) -> None:
    answer = ask(thinker, **{"messages": user("x"), **fields})
    assert answer.status_code == status
    error = answer.json()
    assert error["type"] == "error"
    assert error["error"]["type"] == (kind or "invalid_request_error")


def test_a_key_is_asked_for(thinker: LiveServer) -> None:
    body = {"model": "bytes", "max_tokens": 5, "messages": user("x")}
    refused = thinker.post("/v1/messages", body)
    assert (refused.status_code, refused.json()["type"]) == (401, "error")
    assert refused.json()["error"]["type"] == "authentication_error"
    wrong = {"x-api-key": "wrong"}
    assert thinker.post("/v1/messages", body, headers=wrong).status_code == 401
