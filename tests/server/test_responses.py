"""OpenAI's Responses API through the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from server.live_server import LiveServer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": CITY, "strict": True}]

SEARCH: Any = {"type": "web_search"}


@pytest.fixture(scope="module")  # a client takes 60 ms to read certificates
def client(thinker: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=thinker.url + "/v1", api_key="EMPTY", max_retries=0) as made:
        yield made


def says(text: str) -> str:
    return f"SAY[{text}]YAS"


def test_text(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="bytes", input=says("It is warm."), instructions="Be brief."
    )
    assert answer.output_text == "It is warm."
    assert (answer.status, answer.object, answer.model) == ("completed", "response", "bytes")
    assert answer.usage is not None
    assert answer.usage.output_tokens == len("It is warm.") + 1
    assert client.responses.retrieve(answer.id).output_text == "It is warm."


def test_fields_of_vllms_responses(client: openai.OpenAI) -> None:
    def text(**more: Any) -> str:
        made = client.responses.create(
            model="bytes", input="hello", max_output_tokens=40, extra_body={"seed": 1, **more}
        )
        return made.output_text

    notes = {"request_id": "x", "priority": 1, "cache_salt": "s", "enable_response_messages": False}
    notes |= {"include_reasoning": True, "chat_template_kwargs": {"a": 1}, "mm_payload": "none"}
    assert text(**notes, min_p=0.0, ignore_eos=False, skip_special_tokens=True) == text()
    stop = text()[3:5]
    assert text(stop=stop) == text().partition(stop)[0]
    wrong: list[dict[str, Any]] = [
        {"min_p": 7},
        {"previous_input_messages": [{}]},
        {"structured_outputs": {"choice": [], "json": {}}},
    ]
    for given in wrong:
        with pytest.raises(openai.BadRequestError, match=next(iter(given))):
            text(**given)


def test_reasoning_text_and_calls_are_items(client: openai.OpenAI) -> None:
    text = says(f"<think>Hm.</think>I look.\n{CALL}\n{CALL}")
    answer = client.responses.create(model="bytes", input=text, tools=TOOLS)
    kinds = [item.type for item in answer.output]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    reasoning, message, call, other = answer.output
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == "I look."
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    assert call.call_id != other.call_id
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == len("Hm.")


def test_tools_that_run_elsewhere_are_passed_by_with_a_word(
    client: openai.OpenAI, thinker: LiveServer
) -> None:
    """The response names the tools that the model was told of."""
    answer = client.responses.create(
        model="bytes", input=says("It is warm."), tools=[SEARCH, *TOOLS]
    )
    assert answer.output_text == "It is warm."
    assert [tool.type for tool in answer.tools] == ["function"]
    assert "tools of other types than 'function' are passed by" in thinker.log_path.read_text()


def test_events_build_the_same_response(client: openai.OpenAI) -> None:
    text = says(f"<think>Hm.</think>I look.\n{CALL}")
    whole = client.responses.create(model="bytes", input=text, tools=TOOLS)
    with client.responses.stream(model="bytes", input=text, tools=TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"

    def plain(response: Any) -> list[Any]:
        ids = {"id", "call_id"}
        dumped = [item.model_dump(exclude_none=True) for item in response.output]
        extra = {"parsed", "parsed_arguments"}
        for item in dumped:
            for part in item.get("content") or ():
                part.pop("parsed", None)
        return [{k: v for k, v in item.items() if k not in ids | extra} for item in dumped]

    assert plain(final) == plain(whole)
    said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert said == "I look."
    arguments = [e for e in events if e.type == "response.function_call_arguments.delta"]
    assert arguments  # one or several: what has come meanwhile is sent together
    assert "".join(e.delta for e in arguments) == '{"city": "Rome"}'


def test_a_conversation_by_the_id_of_its_last_response(
    client: openai.OpenAI, thinker: LiveServer
) -> None:
    first = client.responses.create(model="bytes", input=says(CALL), tools=TOOLS)
    call = first.output[0]
    output: Any = {"type": "function_call_output", "call_id": call.call_id}
    second = client.responses.create(
        model="bytes",
        previous_response_id=first.id,
        input=[{**output, "output": says("It is warm.")}],
        tools=TOOLS,
    )
    assert second.output_text == "It is warm."
    items: Any = [{"role": "user", "content": says(CALL)}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    stateless = client.responses.create(
        model="bytes",
        input=[*items, {**output, "output": [{"type": "input_text", "text": says("It is warm.")}]}],
        tools=TOOLS,
        store=False,
    )
    assert stateless.usage.input_tokens == second.usage.input_tokens
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(stateless.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="there is no response"):
        client.responses.create(model="bytes", input="x", previous_response_id=first.id)


def test_an_answer_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="bytes", input=says("abcdef"), max_output_tokens=3, background=False
    )
    assert (answer.status, answer.output_text) == ("incomplete", "abc")
    assert answer.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(
        model="bytes", input=says("abcdef"), max_output_tokens=3
    ) as stream:
        assert list(stream)[-1].type == "response.incomplete"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"input": [{"type": "item_reference", "id": "x"}]}, "cannot be used here"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "role"),
        ({"input": []}, "input: at least one item is needed"),
        ({"input": "x", "temperature": -1}, "temperature"),
        ({"input": "x", "tool_choice": {"type": "function", "name": "f"}}, "no tools"),
        ({"input": "x", "model": "nobody"}, "does not exist"),
        ({"input": "x", "background": True}, "background: an answer comes with its request"),
        (
            {"input": "x", "tools": [SEARCH], "tool_choice": {"type": "web_search"}},
            "only tools of type 'function' are called here, not 'web_search'",
        ),
        ({"input": "x", "tools": [SEARCH], "tool_choice": "required"}, "tools of type 'function'"),
    ],
)
def test_bodies_that_cannot_be_answered(
    client: openai.OpenAI, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(openai.APIStatusError, match=problem) as caught:
        client.responses.create(**{"model": "bytes", **fields})
    assert caught.value.status_code in (400, 404)
