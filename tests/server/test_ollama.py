"""Ollama's API, and llama.cpp's own paths, as their clients speak them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hunch.errors import HunchError
from hunch.server.middle import middle_of
from server.fake_engine import FakeText, expected_tokens
from server.live_server import LiveServer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]


def lines_of(answer: Any) -> list[dict[str, Any]]:
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in answer.text.splitlines()]


def test_a_chat_streamed_and_not(thinker: LiveServer) -> None:
    says = f"SAY[<think>Hm.</think>I look.\n{CALL}\n{CALL}]YAS"
    body = {
        "model": "bytes:latest",
        "messages": [{"role": "user", "content": says}],
        "tools": TOOLS,
    }
    whole = thinker.post("/api/chat", {**body, "stream": False}).json()
    message = whole["message"]
    assert (message["content"], message["thinking"]) == ("I look.", "Hm.")
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    assert message["tool_calls"] == [call, call]
    assert whole["done"] is True
    assert whole["eval_count"] > 100
    lines = lines_of(thinker.post("/api/chat", body))
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert "".join(line["message"]["content"] for line in lines) == "I look."
    assert "".join(line["message"].get("thinking", "") for line in lines) == "Hm."
    calls = [one for line in lines for one in line["message"].get("tool_calls", ())]
    assert calls == [call, call]
    assert lines[-1]["eval_count"] == whole["eval_count"]
    assert lines[-1]["done_reason"] == "stop"


def test_results_of_tools_and_options(thinker: LiveServer) -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_name": "f", "content": "SAY[abcdef]YAS"},
    ]
    options = {"num_predict": 3, "temperature": 0, "seed": 1, "num_ctx": 4096}
    body = {"model": "bytes", "messages": messages, "options": options, "stream": False}
    answer = thinker.post("/api/chat", body).json()
    assert (answer["message"]["content"], answer["done_reason"]) == ("abc", "length")


def test_generate(thinker: LiveServer) -> None:
    body = {"model": "bytes", "prompt": "SAY[Warm.]YAS", "system": "Be brief.", "stream": False}
    assert thinker.post("/api/generate", body).json()["response"] == "Warm."
    raw = {**body, "raw": True, "options": {"num_predict": 2}}
    assert thinker.post("/api/generate", raw).json()["response"] == "Wa"
    lines = lines_of(thinker.post("/api/generate", {**body, "stream": True}))
    assert "".join(line["response"] for line in lines) == "Warm."
    loaded = thinker.post("/api/generate", {"model": "bytes"}).json()
    assert loaded["done_reason"] == "load"
    leaving = {"model": "bytes", "keep_alive": 0}
    assert thinker.post("/api/generate", leaving).json()["done_reason"] == "unload"
    assert thinker.post("/api/chat", leaving).json()["done_reason"] == "unload"


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/api/chat", {"model": "llama3.2", "messages": []}, "this server has: bytes, alias"),
        ("/api/chat", {"model": "bytes", "messages": 3}, "messages: "),
        ("/api/pull", {"model": "llama3.2"}, "hunch pull"),
        ("/api/generate", {"model": "bytes", "prompt": "x", "logprobs": True}, "/v1/completions"),
        ("/api/generate", {"model": "bytes", "prompt": "x", "context": [1]}, "/api/chat"),
        ("/api/generate", {"model": "bytes", "prompt": "x", "template": "{{.Prompt}}"}, "raw"),
        ("/api/generate", {"model": "bytes", "prompt": "x", "images": ["AA"]}, "reads text"),
    ],
)
def test_errors_are_sentences(
    thinker: LiveServer, path: str, body: dict[str, Any], words: str
) -> None:
    answer = thinker.post(path, body)
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]


def test_bodies_of_no_named_type_unless_a_page_sends_them(thinker: LiveServer) -> None:
    body = json.dumps({"model": "bytes", "prompt": "SAY[Warm.]YAS", "stream": False}).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d says
    answer = thinker.post("/api/generate", content=body, headers=form)
    assert answer.json()["response"] == "Warm."
    for page in ({"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = thinker.post("/api/generate", content=body, headers={**form, **page})
        assert answer.status_code in (403, 415)
        assert isinstance(answer.json()["error"], str)


def test_rates_can_be_computed_from_durations(thinker: LiveServer) -> None:
    body = {"model": "bytes", "prompt": "SAY[Warm.]YAS", "stream": False, "logprobs": False}
    told = thinker.post("/api/generate", body).json()
    reading, writing = told["prompt_eval_duration"], told["eval_duration"]
    assert reading > 0
    assert writing > 0
    assert reading + writing == told["total_duration"]


def test_what_there_is(thinker: LiveServer) -> None:
    assert [m["name"] for m in thinker.get("/api/tags").json()["models"]] == ["bytes", "alias"]
    shown = thinker.post("/api/show", {"model": "bytes"}).json()
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    about = shown["model_info"]
    assert about[f"{about['general.architecture']}.context_length"] == 4096
    assert thinker.post("/api/show", {"model": "nobody"}).status_code == 404
    running = thinker.get("/api/ps").json()["models"]
    assert [m["name"] for m in running] == ["bytes", "alias"]
    version = thinker.get("/api/version").json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)  # VS Code takes no older one
    props = thinker.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert (props["tool_call_parser"], props["reasoning_parser"]) == ("hermes", "qwen3")
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    prompt = thinker.post("/apply-template", chat).json()["prompt"]
    assert prompt == "user: Hi\nassistant: "
    assert '"name": "get_weather"' in thinker.post(
        "/apply-template", {**chat, "tools": TOOLS}
    ).json()["prompt"]  # fmt: skip


def middle(prefix: str, suffix: str, seed: int, count: int) -> str:
    prompt = [0xF8, *prefix.encode(), 0xF9, *suffix.encode(), 0xFA]
    return bytes(expected_tokens(prompt, seed, count)).decode(errors="replace")


def test_the_middle_is_filled_in(thinker: LiveServer) -> None:
    wanted = middle("def f(", "return x", 3, 20)
    body = {"prompt": "def f(", "suffix": "return x", "seed": 3, "max_tokens": 20}
    answer = thinker.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == wanted
    infill: dict[str, Any] = {"input_prefix": "def ", "prompt": "f(", "input_suffix": "return x"}
    infill |= {"seed": 3, "n_predict": 20, "mirostat": 0}
    assert thinker.post("/infill", infill).json()["content"] == wanted
    whole = thinker.post("/infill", {**infill, "n_probs": 2, "return_tokens": True}).json()
    assert len(whole["completion_probabilities"]) == len(whole["tokens"]) == 20
    assert thinker.post("/infill", {**infill, "temprature": 1}).status_code == 400
    events = thinker.post("/infill", {**infill, "stream": True}).text.strip().split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert "".join(chunk["content"] for chunk in chunks) == wanted
    assert [chunk["stop"] for chunk in chunks][-2:] == [False, True]
    ollama = {"model": "bytes", "prompt": "def f(", "suffix": "return x", "stream": False}
    options = {"seed": 3, "num_predict": 20}
    assert (
        thinker.post("/api/generate", {**ollama, "options": options}).json()["response"] == wanted
    )


def test_a_vocabulary_without_the_marks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeText, "token_id", lambda self, name: None)
    with pytest.raises(HunchError, match="no tokens for filling in the middle"):
        middle_of(FakeText())
