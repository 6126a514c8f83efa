"""An agent's loop with the default model: the same calls whatever drafts, served as offline."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from hunch import LLM, SamplingParams
from hunch.hub import ModelFiles
from server.live_server import api_server

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": text, "parameters": SCHEMA}}
    for name, text in (("get_weather", "Weather of a city."), ("get_events", "What is on there."))
]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n<think>\n"
)
SAMPLING: dict[str, Any] = {"max_tokens": 40, "temperature": 0.7, "seed": 5}
NUM_CALLS = 10


def loop(client: openai.OpenAI, mode: str) -> list[tuple[str, str]]:
    """Ten calls, each with the results of those before."""
    said: Any = [{"role": "user", "content": "Plan a week in Italy. Use the tools."}]
    calls: list[tuple[str, str]] = []
    for _ in range(NUM_CALLS):
        answer = client.chat.completions.create(
            model="smollm2-135m",
            messages=said,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
            extra_body={"speculation": {"mode": mode}},
            **SAMPLING,
        )
        message = answer.choices[0].message
        (call,) = message.tool_calls or ()
        arguments = json.loads(call.function.arguments)
        calls.append((call.function.name, call.function.arguments))
        result = f"{arguments['city']}: {arguments['days']} days of sun"
        said += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
    return calls


@pytest.mark.slow
def test_ten_calls_are_the_same_drafted_or_not(default_files: ModelFiles, tmp_path: Any) -> None:
    words = ["--model", "smollm2-135m", "--max-model-len", "4096"]
    with (
        api_server(words, tmp_path / "log") as url,
        openai.OpenAI(base_url=url, api_key="EMPTY") as client,
    ):
        plain = loop(client, "off")
        assert loop(client, "auto") == plain
    assert len(plain) == NUM_CALLS


def fields_of(number: int) -> dict[str, Any]:
    """One of 24 chats: calls, reasoning under a budget, or both left to the model."""
    content = f"Tell me about city number {number}."
    messages = [{"role": "user", "content": content}]
    kinds: list[dict[str, Any]] = [
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS},
        {"chat_template": THINKING, "thinking_token_budget": 20},
        {"chat_template": THINKING, "thinking_token_budget": 8, "tools": TOOLS},
    ]
    return {"messages": messages, **kinds[number % 4]}


def plain(message: dict[str, Any]) -> Any:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message.get("content") or "", message.get("reasoning_content") or "", calls


@pytest.mark.slow
def test_24_at_once_are_answered_as_offline(default_files: ModelFiles, tmp_path: Any) -> None:
    with LLM("smollm2-135m", speculate="off", max_model_len=2048) as llm:
        wanted: list[Any] = [None] * 24
        for kind in range(4):  # those that ask for the same are one batch
            numbers = range(kind, 24, 4)
            fields = [fields_of(number) for number in numbers]
            chats = [one.pop("messages") for one in fields]
            outputs = llm.chat(chats, SamplingParams(**SAMPLING), **fields[0])
            for number, output in zip(numbers, outputs, strict=True):
                assert output.outputs[0].message is not None
                wanted[number] = plain(output.outputs[0].message)
    assert any(calls for _, _, calls in wanted)
    assert any(reasoning for _, reasoning, _ in wanted)
    words = ["--model", "smollm2-135m", "--max-model-len", "2048", "--allow-request-chat-template"]
    with (
        api_server(words, tmp_path / "log") as url,
        openai.OpenAI(base_url=url, api_key="EMPTY") as client,
        ThreadPoolExecutor(24) as pool,
    ):

        def whole(number: int) -> Any:
            answer = client.chat.completions.create(**request(number))
            return plain(answer.choices[0].message.model_dump())

        def streamed(number: int) -> Any:
            chunks = client.chat.completions.create(**request(number), stream=True)
            message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
            for chunk in chunks:
                delta = chunk.choices[0].delta
                message["content"] += delta.content or ""
                more = delta.model_extra or {}
                message["reasoning_content"] += more.get("reasoning_content") or ""
                for call in delta.tool_calls or ():
                    if call.id:
                        message["tool_calls"].append({"function": call.function.model_dump()})
                    else:
                        told = message["tool_calls"][call.index]["function"]
                        told["arguments"] += call.function.arguments
            return plain(message)

        assert list(pool.map(whole, range(24))) == wanted
        assert list(pool.map(streamed, range(24))) == wanted


def request(number: int) -> dict[str, Any]:
    fields = fields_of(number)
    ours = {n: fields.pop(n) for n in ("chat_template", "thinking_token_budget") if n in fields}
    return {"model": "smollm2-135m", **fields, **SAMPLING, "extra_body": ours}
