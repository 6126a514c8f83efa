"""Strangers: every limit is reached, every key checked, and nothing leaks in an error."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import socket
from dataclasses import fields
from typing import Any

import httpx
import pytest

from hunch.server.answers import ranked
from hunch.server.engine_process import _info
from hunch.server.params import completion_params
from hunch.server.schemas import CompletionBody
from hunch.server.settings import Limits
from hunch.types import Capacity, Logprob
from server.live_server import PATIENCE, LiveServer, Start

COMPLETE = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBED = "/v1/embeddings"
KEYS = ["first-key", "second-key"]
SMALL = {
    "max_body_bytes": 20_000,
    "max_prompts": 3,
    "max_messages": 4,
    "max_inputs": 2,
    "max_n": 3,
    "max_sequences": 5,
    "max_tokens": 30,
    "max_stop": 2,
    "max_stop_chars": 10,
    "max_bad_words": 2,
    "max_logit_bias": 3,
    "max_logprobs": 4,
    "max_grammar_bytes": 40,
    "max_tools": 2,
    "max_tools_bytes": 60,
}


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LARGE_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"title": "x" * 60}}}


@pytest.fixture(scope="module")
def small(start_server: Start) -> LiveServer:
    """A server with small limits and two keys."""
    return start_server(limits=SMALL, api_keys=KEYS, cors_origins=["https://site.example"])


def ask(server: LiveServer, path: str, **fields: Any) -> httpx.Response:
    base: dict[str, Any] = {"prompt": "x", "max_tokens": 2}
    if path == CHAT:
        base = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    if path == EMBED:
        base = {}
    headers = {"Authorization": f"Bearer {KEYS[0]}"}
    return server.post(path, {**base, **fields}, headers=headers)


def test_scores_of_all_tokens_where_the_operator_allows_them() -> None:
    body = CompletionBody(prompt="x", logprobs=-1, prompt_logprobs=3, echo=True)
    params = completion_params(body, Limits(max_logprobs=-1), 100)
    assert (params.logprobs, params.prompt_logprobs) == (-1, -1)
    entry = {3: Logprob(logprob=-2.0), 1: Logprob(logprob=-0.5)}
    assert [ranked(entry, count) for count in (-1, 1)] == [
        [(1, entry[1]), (3, entry[3])],
        [(1, entry[1])],
    ]


@pytest.mark.parametrize(
    ("path", "allowed", "too_much", "param"),
    [
        (COMPLETE, {"prompt": ["x"] * 3}, {"prompt": ["x"] * 4}, "prompt"),
        (EMBED, {"input": ["x"] * 2}, {"input": ["x"] * 3}, "input"),
        (CHAT, {"tools": [TOOL] * 2}, {"tools": [TOOL] * 3}, "tools"),
        (CHAT, {"tools": [TOOL]}, {"tools": [LARGE_TOOL]}, "tools"),
        (COMPLETE, {"n": 3}, {"n": 4}, "n"),
        (COMPLETE, {"prompt": ["x"] * 2, "n": 2}, {"prompt": ["x"] * 2, "n": 3}, "n"),
        (COMPLETE, {"max_tokens": 30}, {"max_tokens": 31}, "max_tokens"),
        (CHAT, {"max_tokens": 30}, {"max_tokens": 31}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 30}, {"max_completion_tokens": 31}, "max_tokens"),
        (COMPLETE, {"stop": ["zz", "yy"]}, {"stop": ["zz", "yy", "xx"]}, "stop"),
        (COMPLETE, {"stop": "z" * 10}, {"stop": "z" * 11}, "stop"),
        (COMPLETE, {"stop_token_ids": [1, 2]}, {"stop_token_ids": [1, 2, 3]}, "stop_token_ids"),
        (COMPLETE, {"bad_words": ["q", "w"]}, {"bad_words": ["q", "w", "e"]}, "bad_words"),
        (COMPLETE, {"bad_words": ["z" * 10]}, {"bad_words": ["z" * 11]}, "bad_words"),
        (
            COMPLETE,
            {"logit_bias": {"1": 1, "2": 2, "3": 3}},
            {"logit_bias": {"1": 1, "2": 2, "3": 3, "4": 4}},
            "logit_bias",
        ),
        (COMPLETE, {"logprobs": 4}, {"logprobs": 5}, "logprobs"),
        (COMPLETE, {"logprobs": 4}, {"logprobs": -1}, "logprobs"),
        (COMPLETE, {"prompt_logprobs": 4}, {"prompt_logprobs": -1}, "prompt_logprobs"),
        (COMPLETE, {"guided_regex": "a" * 40}, {"guided_regex": "a" * 41}, "guided_regex"),
        (
            COMPLETE,
            {"guided_choice": ["a" * 20, "b" * 20]},
            {"guided_choice": ["a" * 20, "b" * 21]},
            "guided_choice",
        ),
        (COMPLETE, {"guided_json": {}}, {"guided_json": {"title": "a" * 40}}, "guided_json"),
        (COMPLETE, {"guided_grammar": "a"}, {"guided_grammar": "a" * 41}, "guided_grammar"),
        (
            CHAT,
            {"structured_outputs": {"regex": "a" * 40}},
            {"structured_outputs": {"regex": "a" * 41}},
            "structured_outputs",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"enum": ["a" * 40]}},
                }
            },
            "response_format",
        ),
        (
            CHAT,
            {"logprobs": True, "top_logprobs": 4},
            {"logprobs": True, "top_logprobs": 5},
            "top_logprobs",
        ),
        (
            CHAT,
            {"logprobs": True, "top_logprobs": 4},
            {"logprobs": True, "top_logprobs": -1},
            "top_logprobs",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "x"}] * 4},
            {"messages": [{"role": "user", "content": "x"}] * 5},
            "messages",
        ),
    ],
)
def test_as_much_as_allowed_but_no_more(
    small: LiveServer, path: str, allowed: dict[str, Any], too_much: dict[str, Any], param: str
) -> None:
    assert ask(small, path, **allowed).status_code == 200
    answer = ask(small, path, **too_much)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "limit_exceeded"
    assert answer.json()["error"]["param"] == param


def test_a_body_that_is_too_large_is_refused_unread(small: LiveServer) -> None:
    assert ask(small, COMPLETE, prompt="x" * 20_000).status_code == 413
    headers = {"Authorization": f"Bearer {KEYS[0]}", "Content-Type": "application/json"}

    def endless() -> Any:
        for _ in range(10_000):
            yield b" " * 1000

    answer = small.client.post(small.url + COMPLETE, content=endless(), headers=headers)
    assert answer.status_code == 413


def test_who_sends_too_much_gets_the_answer_and_no_broken_connection(small: LiveServer) -> None:
    """A client that reads nothing before all is written, as asyncio's do: the body is read on."""

    async def post(size: int, key: str) -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            body = b'{"prompt": "' + b"x" * size + b'"}'
            return await client.post(small.url + COMPLETE, content=body, headers=headers)

    for _ in range(3):
        assert asyncio.run(post(6_000_000, KEYS[0])).status_code == 413
        assert asyncio.run(post(6_000_000, "wrong")).status_code == 401


def test_a_prompt_longer_than_the_context_is_refused(server: LiveServer) -> None:
    ok = server.post(COMPLETE, {"prompt": "x" * 511, "max_tokens": 1})
    assert ok.status_code == 200
    message = {"role": "user", "content": "x" * 512}
    for path, field, value in (
        (COMPLETE, "prompt", "x" * 512),
        (CHAT, "messages", [message]),
        ("/v1/responses", "input", "x" * 512),
        ("/v1/embeddings", "input", "x" * 512),
    ):
        answer = server.post(path, {"model": "bytes", field: value})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)


def test_token_ids_that_are_unknown_name_their_field(server: LiveServer) -> None:
    for path, field in ((COMPLETE, "prompt"), ("/v1/embeddings", "input")):
        error = server.post(path, {"model": "bytes", field: [10**6]}).json()["error"]
        assert error["param"] == field


GET = ["/v1/models", "/v1/models/bytes", "/version", "/metrics", "/stats"]
GET += ["/openapi.json", "/no-such-path"]
POST = [COMPLETE, CHAT, "/tokenize", "/detokenize"]


@pytest.mark.parametrize("header", [None, "Bearer wrong", "first-key", "Basic first-key", "Bearer"])
def test_a_wrong_or_missing_key_gets_401_everywhere_else(
    small: LiveServer, header: str | None
) -> None:
    headers = {} if header is None else {"Authorization": header}
    for path in GET:
        assert small.get(path, headers=headers).status_code == 401, path
    for path in POST:
        answer = small.post(path, {}, headers=headers)
        assert answer.status_code == 401, path
        assert answer.json()["error"]["type"] == "authentication_error"
    for path in ("/health", "/ready", "/ping", "/", "/static/app.js", "/static/style.css"):
        assert small.get(path, headers=headers).status_code == 200, path


@pytest.mark.parametrize("key", KEYS)
def test_each_key_opens_the_door(small: LiveServer, key: str) -> None:
    headers = {"Authorization": f"Bearer {key}"}
    assert small.get("/v1/models", headers=headers).status_code == 200
    other = {"Authorization": "Bearer of-a-gateway", "X-Api-Key": key}
    swapped = {"Authorization": f"Bearer {key}", "X-Api-Key": "of-a-gateway"}
    for both in (other, swapped):
        assert small.get("/v1/models", headers=both).status_code == 200


def test_a_wrong_key_is_told_from_a_missing_one(small: LiveServer) -> None:
    missing = small.get("/v1/models").json()["error"]
    wrong = small.get("/v1/models", headers={"Authorization": "Bearer no"}).json()["error"]
    assert missing["code"] == wrong["code"] == "invalid_api_key"
    assert "none of its keys" in wrong["message"]
    assert "none of its keys" not in missing["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "x", "max_tokens": 1e999}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "bad_words": ["\\uDFFF"]}',
        b'{"prompt": []}',
        b'{"prompt": [[]]}',
        b'{"prompt": [1, "a"]}',
        b'{"prompt": [99999]}',
        b'{"prompt": ""}',
        b'{"prompt": "x", "unknown_field": 1}',
        b'{"prompt": "x", "n": "2"}',
        b'{"prompt": "x", "n": 2, "best_of": 1}',
        b'{"prompt": "x", "stop": [""]}',
        b'{"prompt": "x", "logit_bias": {"a": 1}}',
        b'{"prompt": "x", "logit_bias": {"99999": 1}}',
        b'{"prompt": "x", "stream_options": {"include_usage": true}}',
        b'{"prompt": "x", "min_tokens": 9, "max_tokens": 2}',
        b'{"prompt": "x", "chat_template": "{{ 1 }}"}',
        b'{"prompt": "x", "seed": ' + b"9" * 400 + b"}",
        b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_malformed_bodies_get_a_plain_400(server: LiveServer, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    answer = server.post(COMPLETE, content=body, headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    for word in ("Traceback", "site-packages", "hunch/", "pydantic"):
        assert word not in answer.text


def test_templates_from_requests_are_refused_unless_allowed(
    server: LiveServer, start_server: Start
) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "chat_template": "{{ messages }}",
        "max_tokens": 2,
    }
    counted = {name: body[name] for name in ("messages", "chat_template")}
    asked = {CHAT: body, f"{CHAT}/input_tokens": body, "/tokenize": counted}
    allowing = start_server(allow_request_chat_template=True)
    for path, given in asked.items():
        refused = server.post(path, given)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "chat_template")
        assert allowing.post(path, given).status_code == 200


def test_a_form_post_from_another_site_is_not_taken(server: LiveServer) -> None:
    """Browsers send text/plain across origins without asking first."""
    body = json.dumps({"prompt": "x"})
    answer = server.post(COMPLETE, content=body, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415


def test_a_compressed_body_is_refused_by_name(server: LiveServer) -> None:
    body = gzip.compress(json.dumps({"prompt": "x", "max_tokens": 1}).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = server.post(COMPLETE, content=body, headers=headers)
    assert answer.status_code == 415
    assert "Content-Encoding" in answer.json()["error"]["message"]
    plain = server.post(
        COMPLETE, {"prompt": "x", "max_tokens": 1}, headers={"Content-Encoding": "identity"}
    )
    assert plain.status_code == 200


def test_cors_is_closed_unless_opened(server: LiveServer, small: LiveServer) -> None:
    headers = {"Origin": "https://site.example", "Access-Control-Request-Method": "POST"}
    closed = server.client.options(server.url + COMPLETE, headers=headers)
    assert "access-control-allow-origin" not in closed.headers
    answer = server.client.options(small.url + COMPLETE, headers=headers)
    assert answer.headers["access-control-allow-origin"] == "https://site.example"
    other = {**headers, "Origin": "https://other.example"}
    refused = server.client.options(small.url + COMPLETE, headers=other)
    assert "access-control-allow-origin" not in refused.headers


def test_request_ids_come_back_and_odd_ones_are_replaced(server: LiveServer) -> None:
    given = server.get("/health", headers={"X-Request-Id": "my-id.1"})
    assert given.headers["x-request-id"] == "my-id.1"
    odd = server.get("/health", headers={"X-Request-Id": 'a"b c'})
    assert len(odd.headers["x-request-id"]) == 32


def test_unknown_paths_and_methods_get_errors_in_the_same_form(server: LiveServer) -> None:
    assert server.get("/nothing").json()["error"]["type"] == "not_found_error"
    wrong = server.get(COMPLETE)
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["message"].endswith(": send POST")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{'prompt': 'a'}", "the body is not JSON: .*, at character 1$"),
        ('{"prompt": "a",}', "the body is not JSON: .*, at character 15$"),
        ("", "the body is missing: send JSON"),
        ('{"prompt": "a", "n": ' + "9" * 5000 + "}", "a number of too many digits"),
        ('{"prompt": ' + "[" * 20000 + "]" * 20000 + "}", "nested too deep"),
    ],
)
def test_what_is_wrong_with_a_body_is_said(server: LiveServer, body: str, words: str) -> None:
    how = {"Content-Type": "application/json"}
    answer = server.post(COMPLETE, content=body, headers=how)
    assert answer.status_code == 400
    assert re.search(words, answer.json()["error"]["message"])


def test_half_a_request_does_not_hold_up_others(server: LiveServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n")
        sock.sendall(b"Content-Type: application/json\r\n\r\n{")
        assert server.post(COMPLETE, {"prompt": "x"}).status_code == 200


def test_tokenize_and_detokenize(server: LiveServer) -> None:
    answer = server.post("/tokenize", {"prompt": "né"}).json()
    assert answer["tokens"] == list("né".encode())
    assert answer["count"] == 3
    assert answer["max_model_len"] == 512
    for text in ("prompt", "content"):  # that no request could hold
        assert server.post("/tokenize", {text: "ab " * 1000}).json()["count"] == 3000
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"] == "né"
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(chat["tokens"]).decode() == "user: x\nassistant: "
    assert server.post("/tokenize", {}).status_code == 400
    assert server.post("/detokenize", {"tokens": [9999]}).status_code == 400


@pytest.mark.parametrize(("window", "most"), [(None, 64), (60, 64), (24, 512)])
def test_the_longest_text_is_the_engines(window: int | None, most: int) -> None:
    """If all layers have a window, a text may be longer than its KV that is kept."""
    sizes = {"num_blocks": 16, "block_size": 4, "max_rows": 1, "max_nodes": 0}
    capacity = Capacity(**sizes, max_len=512, window=window)
    for given in (200, None):
        found = _info(capacity, {"model": {"max_model_len": given}})
        assert found["max_len"] == min(most, given or 512)


def test_every_limit_is_made_small_here() -> None:
    assert set(SMALL) == {field.name for field in fields(Limits)}


def test_a_request_cannot_outstay_the_servers_own_deadline(start_server: Start) -> None:
    server = start_server(env={"FAKE_STEP_SECONDS": "0.03"}, request_timeout=0.5)
    body = {"prompt": "x", "max_tokens": 300, "speculation": {"mode": "off"}, "timeout": 60}
    answer = server.post(COMPLETE, body)
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert server.wait_idle()["kv_usage"] == 0
