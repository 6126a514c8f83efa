"""What programs call of the official client today, and every field it can send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import openai
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from hunch.server.other_names import HINTS, INSTEAD, NAMES, NEUTRAL
from hunch.server.responses import INSTEAD as RESPONSES_INSTEAD
from hunch.server.responses import ResponsesBody
from hunch.server.schemas import Body, ChatBody, CompletionBody, Message
from server.live_server import LiveServer

CALL = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class Weather(BaseModel):
    """The weather of a city."""

    city: str


@pytest.fixture(scope="module")  # a client takes 60 ms to read certificates
def client(thinker: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=thinker.url + "/v1", api_key="EMPTY", max_retries=0) as made:
        yield made


def asks(text: str, role: str = "user") -> Any:
    return [{"role": role, "content": [{"type": "text", "text": f"SAY[{text}]YAS"}]}]


@pytest.mark.parametrize(
    ("params", "body", "others"),
    [
        (
            chat_create_params.CompletionCreateParamsBase,
            ChatBody,
            {*HINTS, *NEUTRAL, *INSTEAD, *NAMES},
        ),
        (response_create_params.ResponseCreateParamsBase, ResponsesBody, {*RESPONSES_INSTEAD}),
        (completion_create_params.CompletionCreateParamsBase, CompletionBody, set()),
    ],
)
def test_no_field_of_the_client_is_unknown(params: Any, body: type[Body], others: set[str]) -> None:
    """Each is honoured, or refused with what to do in its place."""
    assert get_type_hints(params).keys() - body.model_fields.keys() - others == set()


FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
SENT: dict[str, Any] = {  # field -> a value that asks for something
    "audio": {"format": "wav", "voice": "alloy"},
    "frequency_penalty": 0.5,
    "function_call": "auto",
    "functions": [FUNCTION],
    "logit_bias": {"65": -100},
    "logprobs": True,
    "max_completion_tokens": 5,
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "bye"}],
    "metadata": {"a": "b"},
    "modalities": ["text"],
    "model": "bytes",
    "moderation": {},
    "n": 2,
    "parallel_tool_calls": True,
    "prediction": {"type": "content", "content": "x"},
    "presence_penalty": 0.5,
    "prompt_cache_key": "k",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "reasoning_effort": "low",
    "response_format": {"type": "text"},
    "safety_identifier": "s",
    "seed": 7,
    "service_tier": "auto",
    "stop": ["zzz"],
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "tool_choice": "auto",
    "tools": [{"type": "function", "function": FUNCTION}],
    "top_logprobs": 2,
    "top_p": 0.5,
    "user": "u",
    "verbosity": "low",
    "web_search_options": {},
}
BESIDE: dict[str, dict[str, Any]] = {  # what a field needs beside it
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": SENT["tools"]},
}


def told_of_fields() -> dict[str, str]:
    """Field -> what docs/serving.md says of it."""
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    table = text.partition("Fields of `client.chat.completions.create`")[2].split("\n\n")[1]
    rows = [line.strip("|").split("|") for line in table.splitlines()[2:]]
    return {field.strip(" `"): told.strip() for names, told in rows for field in names.split(",")}


def test_every_field_of_a_chat_is_in_the_table() -> None:
    known = get_type_hints(chat_create_params.CompletionCreateParamsBase).keys() | {"stream"}
    assert told_of_fields().keys() == SENT.keys() == known


@pytest.mark.parametrize("field", SENT)
def test_the_table_of_fields_is_true(client: openai.OpenAI, field: str) -> None:
    told = told_of_fields()[field]
    plain = {"model": "bytes", "messages": asks("fine"), "max_tokens": 8, "seed": 1}
    sent = {**plain, **BESIDE.get(field, {}), field: SENT[field]}
    if told.startswith("refused"):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**sent)
        assert (refused.value.param, refused.value.status_code) == (field, 400)
        return
    made = client.chat.completions.create(**sent)
    if told.endswith("change nothing"):
        assert made.choices == client.chat.completions.create(**plain).choices
    elif "stream" in sent:
        assert len(list(made)) > 1
    else:
        assert len(made.choices) == sent.get("n", 1)


def test_parsed_answers_and_calls(client: openai.OpenAI) -> None:
    ask: Any = {"model": "bytes", "messages": asks('{"city": "Rome"}')}
    parsed = client.chat.completions.parse(**ask, response_format=Weather)
    assert parsed.choices[0].message.parsed == Weather(city="Rome")
    tools = [openai.pydantic_function_tool(Weather)]
    called = client.chat.completions.parse(
        model="bytes", messages=asks(f"<think>Hm.</think>{CALL}"), tools=tools
    )
    (call,) = called.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == Weather(city="Rome")
    history = [*asks("x"), called.choices[0].message]
    result = {"role": "tool", "tool_call_id": call.id, "content": "SAY[Rain.]YAS"}
    told = client.chat.completions.create(model="bytes", messages=[*history, result], tools=tools)
    assert told.choices[0].message.content == "Rain."


def test_what_a_client_made_of_a_calls_arguments_is_not_in_the_prompt() -> None:
    function = {"name": "look", "arguments": "{}", "parsed_arguments": {"city": "Rome"}}
    message = {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}
    assert "parsed_arguments" not in str(Message.model_validate(message).plain())


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # of the client's own class
def test_a_parsed_answer_may_be_sent_back(client: openai.OpenAI) -> None:
    ask: Any = {"model": "bytes", "messages": asks('{"city": "Rome"}')}
    message = client.chat.completions.parse(**ask, response_format=Weather).choices[0].message
    noted = {"role": "user", "content": "fine", "id": "7", "cache_control": {"type": "ephemeral"}}
    again = [*ask["messages"], message, noted, *asks("Yes.")]
    answer = client.chat.completions.create(model="bytes", messages=again)
    assert answer.choices[0].message.content == "Yes."


def test_the_streaming_helper_builds_calls(client: openai.OpenAI) -> None:
    ask: Any = {
        "model": "bytes",
        "messages": asks(f"<think>Hm.</think>I look.\n{CALL}\n{CALL}", "developer"),
        "tools": [openai.pydantic_function_tool(Weather)],
        "stream_options": {"include_usage": True},
        "store": True,
        "metadata": {"run": "1"},
        "prompt_cache_options": {"mode": "explicit"},
        "max_completion_tokens": 400,
    }
    with client.chat.completions.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [event.parsed_arguments for event in done] == [Weather(city="Rome")] * 2
    assert final.choices[0].message.content == "I look."
    assert final.choices[0].finish_reason == "tool_calls"
    assert final.usage is not None


def test_the_streaming_helper_builds_an_answer(client: openai.OpenAI) -> None:
    ask: Any = {"model": "bytes", "messages": asks('{"city": "Oslo"}'), "logprobs": True}
    with client.chat.completions.stream(**ask, response_format=Weather) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == Weather(city="Oslo")
    assert final.choices[0].logprobs is not None
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= kinds


def test_responses_are_parsed_and_their_input_is_kept(client: openai.OpenAI) -> None:
    ask: Any = {"model": "bytes", "input": 'SAY[{"city": "Rome"}]YAS'}
    first = client.responses.parse(**ask, text_format=Weather, metadata={"a": "b"}, store=True)
    assert first.output_parsed == Weather(city="Rome")
    second = client.responses.create(
        model="bytes", input="SAY[Yes.]YAS", previous_response_id=first.id, include=[]
    )
    kept = [
        {"role": "user", "content": "x"},
        *first.output,
        {"role": "user", "content": "SAY[a]YAS"},
    ]
    assert client.responses.create(model="bytes", input=kept).output_text == "a"  # type: ignore[arg-type]
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.content[0].text for item in items] == [  # type: ignore[union-attr]
        ask["input"],
        '{"city": "Rome"}',
        "SAY[Yes.]YAS",
    ]
    assert client.responses.input_items.list(first.id).data[0].role == "user"  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError) as refused:
        client.responses.input_items.list("resp_unknown")
    assert (refused.value.code, refused.value.param) == ("response_not_found", "response_id")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"conversation": "conv_1"}, "send previous_response_id"),
        ({"prompt": {"id": "pmpt_1"}}, "send instructions and input"),
        ({"include": ["message.output_text.logprobs"]}, "/v1/chat/completions"),
        ({"extra_body": {"temprature": 1}}, "did you mean temperature"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text"),
    ],
)
def test_what_responses_cannot_do_is_said(
    client: openai.OpenAI, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=problem):
        client.responses.create(**{"model": "bytes", "input": "x", **fields})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}},
        {"type": "input_audio", "input_audio": {"data": "aa", "format": "wav"}},
        {"type": "file", "file": {"file_id": "file_1"}},
    ],
    ids=lambda part: part["type"],
)
def test_parts_other_than_text_are_refused_by_name(client: openai.OpenAI, part: Any) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
    with pytest.raises(openai.BadRequestError, match=f"{part['type']} are not read"):
        client.chat.completions.create(model="bytes", messages=messages)


def test_parts_may_say_where_a_prompt_is_cached(client: openai.OpenAI) -> None:
    part = {"type": "text", "text": "SAY[Yes.]YAS", "cache_control": {"type": "ephemeral"}}
    messages: Any = [{"role": "user", "content": [{**part, "prompt_cache_breakpoint": {}}]}]
    made = client.chat.completions.create(model="bytes", messages=messages)
    assert made.choices[0].message.content == "Yes."


@pytest.mark.parametrize("is_shown", [True, False])
def test_every_message_has_vllms_field_of_reasoning(client: openai.OpenAI, is_shown: bool) -> None:
    for text in ("fine", CALL):
        made = client.chat.completions.create(
            model="bytes", messages=asks(text), extra_body={"include_reasoning": is_shown}
        )
        assert made.choices[0].message.reasoning is None  # type: ignore[attr-defined]


def test_held_back_text_loses_no_token(client: openai.OpenAI) -> None:
    """Tokens of text that may yet be a mark come with the text that settles it."""
    said = "<thin <b> "
    ask: Any = {"model": "bytes", "messages": asks(said), "stream": True}
    chunks = client.chat.completions.create(**ask, extra_body={"return_token_ids": True})
    extras = [chunk.choices[0].model_extra or {} for chunk in chunks]
    ids = [id_ for extra in extras for id_ in extra.get("token_ids", ())]
    assert bytes(id_ for id_ in ids if id_ < 256).decode() == said
