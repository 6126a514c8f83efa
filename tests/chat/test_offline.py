"""LLM.chat with tools and reasoning: held to the form, read into messages, whatever drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from hunch import LLM, SamplingParams, Speculation
from hunch.errors import RequestError
from tiny_models import write_llama

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"kind": {"enum": ["cat", "dog"]}, "size": {"enum": [1, 20]}},
                "required": ["kind", "size"],
            },
        },
    }
    for name in ("find_pet", "feed_pet")
]
THINKING = (
    "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}"
)
ASK: list[dict[str, Any]] = [{"role": "user", "content": "a pet"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = write_llama(tmp_path_factory.mktemp("tiny"), max_len=2048)
    with LLM(str(path), speculate="ngram") as made:
        yield made


def message(llm: LLM, messages: Any = ASK, mode: str = "auto", **fields: Any) -> dict[str, Any]:
    speculation = Speculation(mode=mode)
    params = SamplingParams(max_tokens=120, temperature=0.8, seed=3, speculation=speculation)
    found = llm.chat(messages, params, **fields)[0].outputs[0].message
    assert found is not None
    return found


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "find_pet"}}]
)
def test_calls_keep_to_the_schema_and_do_not_depend_on_drafts(llm: LLM, choice: Any) -> None:
    fields: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    drafted = message(llm, **fields)
    assert drafted == message(llm, mode="off", **fields)
    (call,) = drafted["tool_calls"]
    assert call["function"]["name"] in ("find_pet", "feed_pet")
    if choice != "required":
        assert call["function"]["name"] == "find_pet"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["kind"] in ("cat", "dog")
    assert arguments["size"] in (1, 20)
    assert drafted["content"] is None


def test_without_a_wish_for_tools_nothing_changes(llm: LLM) -> None:
    plain = message(llm)
    assert message(llm, tools=TOOLS, tool_choice="none") == plain
    assert message(llm, tools=[]) == plain
    assert set(plain) == {"role", "content"}


def test_calls_and_results_of_earlier_turns_reach_the_prompt(llm: LLM) -> None:
    function = {"name": "find_pet", "arguments": '{"kind": "cat", "size": 1}'}
    history = [
        *ASK,
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "it sleeps"},
    ]
    output = llm.chat(history, SamplingParams(max_tokens=1), tools=TOOLS)[0]
    prompt = llm.tokenizer.decode(output.prompt_token_ids)
    said = json.dumps({"name": "find_pet", "arguments": {"kind": "cat", "size": 1}})
    assert f"<tool_call>\n{said}\n</tool_call>" in prompt
    assert "<tool_response>\nit sleeps\n</tool_response>" in prompt
    assert json.dumps(TOOLS[0]["function"]) in prompt


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_a_budget_and_a_form_after_reasoning(llm: LLM, mode: str) -> None:
    params = SamplingParams(
        max_tokens=80,
        seed=1,
        structured_outputs={"choice": ["yes", "no"]},  # type: ignore[arg-type]
        speculation=Speculation(mode=mode),
    )
    (output,) = llm.chat(ASK, params, chat_template=THINKING, thinking_token_budget=12)
    choice = output.outputs[0]
    assert choice.message is not None
    assert choice.message["content"] in ("yes", "no")
    assert 0 < len(llm.tokenizer.encode(choice.message["reasoning_content"])) <= 12
    quick = llm.chat(ASK, params, chat_template=THINKING, reasoning_effort="none")[0].outputs[0]
    assert quick.message == {"role": "assistant", "content": quick.text}
    assert quick.text in ("yes", "no")


@pytest.mark.parametrize(
    ("fields", "message_part"),
    [
        ({"tool_choice": "required"}, "no tools are given"),
        ({"tools": TOOLS, "tool_choice": {"function": {"name": "x"}}}, "there are: find_pet"),
        ({"tools": [{"name": "x"}]}, "a tool must be"),
        ({"reasoning_effort": "much"}, "must be one of none, minimal"),
    ],
)
def test_wishes_that_cannot_be_met(llm: LLM, fields: dict[str, Any], message_part: str) -> None:
    with pytest.raises(RequestError, match=message_part):
        llm.chat(ASK, **fields)
