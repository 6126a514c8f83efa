"""Structured answers of the default model through the official client, drafted and not."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from typing import Any

import openai
import pytest

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age", "pets"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "Describe a person as JSON."}]
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(default_server: str) -> Any:
    with openai.OpenAI(base_url=default_server, api_key="EMPTY", max_retries=0) as made:
        yield made


def chat(client: openai.OpenAI, **fields: Any) -> str:
    answer = client.chat.completions.create(
        model="smollm2-135m",
        messages=MESSAGES,
        **{"max_tokens": 80, "seed": 3, "temperature": 0.7, **fields},
    )
    return answer.choices[0].message.content or ""


def test_a_schema_is_kept_streamed_or_not_drafted_or_not(client: openai.OpenAI) -> None:
    texts = [
        chat(client, response_format=FORMAT, extra_body={"speculation": {"mode": mode}})
        for mode in ("auto", "off")
    ]
    chunks = client.chat.completions.create(
        model="smollm2-135m",
        messages=MESSAGES,
        max_tokens=80,
        seed=3,
        temperature=0.7,
        response_format=FORMAT,
        stream=True,
    )
    texts.append("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    assert texts[0] == texts[1] == texts[2]
    person = json.loads(texts[0])
    assert set(person) == {"name", "age", "pets"}
    assert 0 <= person["age"] <= 150
    assert set(person["pets"]) <= {"cat", "dog"}


def test_the_other_forms(client: openai.OpenAI) -> None:
    guided = chat(client, extra_body={"guided_json": SCHEMA})
    assert set(json.loads(guided)) == {"name", "age", "pets"}
    choice = chat(client, extra_body={"guided_choice": ["red", "green", "blue"]})
    assert choice in ("red", "green", "blue")
    date = chat(client, extra_body={"guided_regex": r"\d{4}-\d{2}-\d{2}"})
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", date)
    grammar = 'start: "yes" | "no" " "? NUMBER\nNUMBER: /[0-9]{1,3}/'
    assert re.fullmatch(r"yes|no ?\d{1,3}", chat(client, extra_body={"guided_grammar": grammar}))
    loose = chat(client, response_format={"type": "json_object"}, max_tokens=60)
    assert loose.startswith("{")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "("},
        {"guided_grammar": "start: start start start | nothing"},
        {"guided_grammar": "not a grammar at all {{{"},
        {"guided_json": "{"},
        {"guided_json": {"type": "no such type"}},
        {"guided_json": {"$ref": "https://example.com/schema.json"}},
        {"guided_json": {"$ref": "file:///etc/passwd"}},
    ],
)
def test_what_is_no_grammar_or_reaches_outside_is_refused(
    client: openai.OpenAI, fields: Any
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, extra_body=fields)
    assert caught.value.code == "invalid_grammar"
    assert "root:" not in caught.value.message
    assert "Traceback" not in caught.value.message


@pytest.mark.slow  # every day: the hostile ones below
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"},
        {"guided_regex": "(a|aa|aaa)*" * 500 + "b"},
        {"guided_json": {"type": "string", "pattern": "(a{1,5000}){1,5000}"}},
        {"guided_grammar": "start: a\na: a a a | " + " | ".join('"x"' for _ in range(2000))},
        {"guided_choice": [f"choice number {n}" for n in range(2500)]},
    ],
)
def test_costly_grammars_are_answered_or_refused_in_time(
    client: openai.OpenAI, fields: Any
) -> None:
    start = time.monotonic()
    code = None
    try:
        chat(client, extra_body=fields, max_tokens=24)
    except openai.BadRequestError as error:
        code = error.code
    assert code in (None, "invalid_grammar", "generation_failed")
    assert time.monotonic() - start < 300


HOSTILE: list[tuple[dict[str, Any], set[int]]] = [
    ({"guided_regex": "a" * 10_000_000}, {413}),
    ({"guided_json": {"enum": ["b" * 100_000]}}, {400}),
    ({"guided_grammar": "start: start start start | nothing"}, {400}),
    ({"guided_json": "{" * 20_000}, {400}),
    # Exponential: whether one is too much is for the compiler to say, within its limit.
    ({"guided_regex": "((((a{1,1000}){1,1000}){1,1000}){1,1000}){1,1000}"}, {200, 400}),
    ({"guided_json": {"type": "string", "pattern": "(a{1,5000}){1,5000}"}}, {200, 400}),
]


def status_of(client: openai.OpenAI, fields: dict[str, Any]) -> int:
    try:
        chat(client, extra_body=fields, max_tokens=8)
    except openai.APIStatusError as error:
        return error.status_code
    return 200


def test_hostile_grammars_are_refused_in_time_and_hinder_no_other_stream(
    default_server: str, client: openai.OpenAI
) -> None:
    """Each is refused within the compiler's limit, while a stream beside them goes on.

    How fast it goes on is measured by the stream alone, on the same machine.
    """
    arrivals: list[float] = []
    is_over = threading.Event()

    def read() -> None:
        chunks = client.completions.create(
            model="smollm2-135m",
            prompt="Once upon a time",
            max_tokens=100,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "speculation": {"mode": "off"}},
        )
        arrivals.extend(time.monotonic() for _ in chunks)

    def go_on() -> None:
        while not is_over.is_set():
            read()

    read()
    alone = (arrivals[-1] - arrivals[0]) / len(arrivals)  # seconds a token
    arrivals.clear()
    reader = threading.Thread(target=go_on)
    reader.start()
    start = time.monotonic()
    try:
        for fields, statuses in HOSTILE:
            began = time.monotonic()
            assert status_of(client, fields) in statuses, list(fields)
            assert time.monotonic() - began < 120
    finally:
        seconds = time.monotonic() - start
        num_arrived = len(arrivals)
        is_over.set()
        reader.join()
    gaps = [b - a for a, b in itertools.pairwise(arrivals[:num_arrived])]
    assert num_arrived * alone > 0.1 * seconds
    assert max(gaps) < max(5, 50 * alone)  # a compiler in the engine's way takes all of 5 s
