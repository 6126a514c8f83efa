"""Tools and reasoning through the official client, streamed and not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from server.live_server import LiveServer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "?", "parameters": CITY},
    }
]


@pytest.fixture(scope="module")  # a client takes 60 ms to read certificates
def client(thinker: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=thinker.url + "/v1", api_key="EMPTY", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, says: str, *, stream: bool = False, **fields: Any) -> Any:
    messages: Any = fields.pop("messages", [{"role": "user", "content": f"SAY[{says}]YAS"}])
    return client.chat.completions.create(
        model="bytes", messages=messages, stream=stream, **{"tools": TOOLS, **fields}
    )


def joined(chunks: Any) -> tuple[str, str, list[dict[str, Any]], str]:
    """What a client that accumulates deltas has at the end: text, reasoning, calls, the ending."""
    text = reasoning = ending = ""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reasoning += (delta.model_extra or {}).get("reasoning_content") or ""
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                calls.append({"name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments
        ending = chunk.choices[0].finish_reason or ending
    return text, reasoning, calls, ending


@pytest.mark.parametrize("num_calls", [1, 2])
def test_calls_streamed_and_not(client: openai.OpenAI, num_calls: int) -> None:
    says = "<think>Hm.</think>\n\nI look.\n" + "\n".join([CALL] * num_calls)
    choice = ask(client, says).choices[0]
    wanted = [{"name": "get_weather", "arguments": '{"city": "Rome"}'}] * num_calls
    assert [call.function.model_dump() for call in choice.message.tool_calls] == wanted
    assert len({call.id for call in choice.message.tool_calls}) == num_calls
    assert (choice.message.content, choice.finish_reason) == ("I look.", "tool_calls")
    assert choice.message.model_extra == {"reasoning_content": "Hm.", "reasoning": "Hm."}
    streamed = joined(ask(client, says, stream=True))
    assert streamed == ("I look.", "Hm.", wanted, "tool_calls")


def test_arguments_are_streamed_as_they_come(client: openai.OpenAI) -> None:
    for _ in range(50):  # a server without a core for a while sends what came in one piece
        chunks = list(ask(client, CALL, stream=True))
        parts = [c.choices[0].delta.tool_calls for c in chunks if c.choices[0].delta.tool_calls]
        if len(parts) > 3:
            break
    assert len(parts) > 3
    assert parts[0][0].function.name == "get_weather"


def test_an_answer_without_a_call_is_text(client: openai.OpenAI) -> None:
    choice = ask(client, "2 < 3 <tool \n").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("2 < 3 <tool \n", "stop")
    assert choice.message.tool_calls is None
    assert joined(ask(client, "2 < 3 <tool \n", stream=True))[0] == "2 < 3 <tool \n"


def test_an_answer_that_is_cut_says_so(client: openai.OpenAI) -> None:
    choice = ask(client, CALL, max_tokens=60).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"ci')


def test_reasoning_can_be_hidden(client: openai.OpenAI) -> None:
    says = "<think>Hm.</think>Yes."
    hidden = {"include_reasoning": False}
    choice = ask(client, says, tools=None, extra_body=hidden).choices[0]
    assert choice.message.content == "Yes."
    assert choice.message.model_extra == {"reasoning": None}
    assert joined(ask(client, says, stream=True, extra_body=hidden))[:2] == ("Yes.", "")


def test_several_answers_are_read_apart(client: openai.OpenAI) -> None:
    choices = ask(client, "<think>a</think>" + CALL, n=3).choices
    assert [len(choice.message.tool_calls) for choice in choices] == [1, 1, 1]


def test_a_history_of_calls_reaches_the_model(client: openai.OpenAI, thinker: LiveServer) -> None:
    call = {"id": "call_1", "type": "function"}
    call["function"] = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}  # type: ignore[assignment]
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "SAY[It is warm.]YAS"},
    ]
    assert ask(client, "", messages=messages).choices[0].message.content == "It is warm."


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "no"}}}, "there is no tool"),
        ({"tools": None, "tool_choice": "required"}, "no tools are given"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": TOOLS * 200}, "at most 128"),
        ({"reasoning_effort": "much"}, "reasoning_effort must be one of"),
        ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "messages is none of them"),
        ({"extra_body": {"chat_template_kwargs": {"tools": 5}}}, "tools is none of them"),
        ({"extra_body": {"chat_template_kwargs": {"self": 5}}}, "self is none of them"),
        ({"extra_body": {"thinking_token_budget": -1}}, "thinking_token_budget"),
        ({"tool_choice": "perhaps"}, "tool_choice"),
    ],
)
def test_what_makes_no_sense_is_refused(
    client: openai.OpenAI, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=problem):
        ask(client, "x", **fields)


def test_a_form_and_no_tools(client: openai.OpenAI) -> None:
    """Empty tools are none."""
    choice = ask(client, "<tool_call>", tools=[]).choices[0]
    assert json.dumps(choice.message.content) == '"<tool_call>"'
