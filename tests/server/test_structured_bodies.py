"""Forms of answers: which bodies are taken, and that a slow grammar holds up nobody else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from hunch.server.schemas import CompletionBody
from hunch.server.settings import Limits
from hunch.server.structured import structured_output
from hunch.types import StructuredOutput
from server.fake_engine import expected_text
from server.live_server import LiveServer, wait_for

COMPLETE = "/v1/completions"


def ask(server: LiveServer, **fields: Any) -> Any:
    body = {"prompt": "x", "max_tokens": 4, "seed": 1, **fields}
    return server.post(COMPLETE, body)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": True},
            }
        },
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        {"response_format": {"type": "json_schema", "schema": {"type": "object"}}},
        {"guided_json": {"type": "object"}},
        {"guided_json": '{"type": "object"}'},
        {"guided_regex": "[ab]+"},
        {"guided_choice": ["yes", "no"]},
        {"guided_grammar": 'start: "a"'},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"structured_outputs": {"json_object": True}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"structural_tag": {"format": {"type": "any_text"}}}},
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        {
            "response_format": {
                "type": "structural_tag",
                "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
                "triggers": ["<f>"],
            }
        },
        {"structural_tag": '{"format": {"type": "any_text"}}'},
        {"post_sampling_probs": False},
    ],
)
def test_every_known_way_to_ask_is_taken(server: LiveServer, fields: dict[str, Any]) -> None:
    answer = ask(server, **fields)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("name", ["json_object", "json_schema"])
def test_a_schema_in_llama_cpps_place_is_held_to(name: str) -> None:
    given = {"response_format": {"type": name, "schema": {"type": "integer"}}, "prompt": "x"}
    asked = structured_output(CompletionBody.model_validate(given), Limits())
    assert asked == StructuredOutput(json='{"type": "integer"}')


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"post_sampling_probs": True}, "post_sampling_probs"),
        ({"response_format": {"type": "json_schema"}}, "json_schema is missing"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "only one of"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "only one of"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_regex": "bad"}, "cannot be compiled"),
        ({"structured_outputs": {}}, "exactly one of"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "exactly one of"),
        ({"structured_outputs": {"structural_tags": "a"}}, "structural_tag"),
    ],
)
def test_what_cannot_be_is_refused(server: LiveServer, fields: dict[str, Any], words: str) -> None:
    answer = ask(server, **fields)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_a_body_nested_beyond_reason_is_refused(server: LiveServer) -> None:
    for depth in (300, 900, 990, 5000):
        nested = "[" * depth + "]" * depth
        body = f'{{"prompt": "x", "guided_json": {{"enum": {nested}}}}}'
        headers = {"Content-Type": "application/json"}
        answer = server.post(COMPLETE, content=body, headers=headers)
        assert answer.status_code in (200, 400)
        assert depth < 5000 or answer.status_code == 400


def test_a_slow_grammar_holds_up_nobody_else(server: LiveServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        with server.holding("grammars"):
            slow = pool.submit(ask, server, guided_regex="slow")
            wait_for(lambda: server.stats()["num_open"] > 0)
            for _ in range(5):
                answer = ask(server, max_tokens=20)
                assert answer.json()["choices"][0]["text"] == expected_text("x", 1, 20)
            assert not slow.done()
        assert slow.result().status_code == 200
    server.wait_idle()


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"guided_regex": "bad"}, "guided_regex"),
        (
            "/v1/chat/completions",
            {"structured_outputs": {"regex": "bad"}, "stream": True},
            "structured_outputs",
        ),
        (COMPLETE, {"prompt": "x", "guided_regex": "bad"}, "guided_regex"),
    ],
)
def test_a_grammar_that_does_not_compile_is_named_by_its_field(
    server: LiveServer, path: str, fields: dict[str, Any], param: str
) -> None:
    messages = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {}
    answer = server.post(path, {**messages, **fields})
    fault = answer.json()["error"]
    assert (answer.status_code, fault["code"]) == (400, "invalid_grammar")
    assert fault["param"] == param
