"""Every family's calls and reasoning are read the same however the text is cut into chunks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hunch.chat.families import TOOL_FORMS
from hunch.chat.format import ChatFormat
from hunch.chat.pieces import Answer, Piece
from hunch.chat.tools import Tool
from hunch.errors import ConfigError

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
ROME = ("get_weather", {"city": 'Ro"me } ]', "days": 3})
OSLO = ("get_weather", {"city": "Oslo"})
ROME_JSON = json.dumps(ROME[1])
Expected = tuple[str, str, list[tuple[str, Any]]]  # text, reasoning, calls

DS_CALL = "<｜tool▁call▁begin｜>"
HARMONY_CALL = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + ROME_JSON
)
CASES: dict[str, tuple[str, str, Expected]] = {
    "hermes": (
        "hermes",
        "I will look.\n\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {ROME_JSON}}}\n</tool_call>\n'
        '<tool_call>\n{"arguments": {"city": "Oslo"}, "name": "get_weather"}\n</tool_call>\n',
        ("I will look.", "", [ROME, OSLO]),
    ),
    "hermes text only": ("hermes", "a < b <tool_ x \n", ("a < b <tool_ x \n", "", [])),
    "hermes no JSON": ("hermes", "<tool_call>nonsense", ("<tool_call>nonsense", "", [])),
    "hermes no arguments": (
        "hermes",
        '<tool_call>{"name": "now"}</tool_call> done',
        ("done", "", [("now", {})]),
    ),
    "hermes arguments as a string": (
        "hermes",
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": [1]}"}</tool_call>',
        ("", "", [("f", {"a": [1]})]),
    ),
    "llama": (
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ROME_JSON}}}; '
        '{"name": "get_weather", "parameters": {"city": "Oslo"}}',
        ("", "", [ROME, OSLO]),
    ),
    "llama bare": (
        "llama3_json",
        f'\n{{"type": "function", "name": "get_weather", "parameters": {ROME_JSON}}}',
        ("", "", [ROME]),
    ),
    "llama text": ("llama3_json", "It is {warm}.", ("It is {warm}.", "", [])),
    "json fence": (
        "json",
        f'```json\n[{{"name": "get_weather", "arguments": {ROME_JSON}}}]',
        ("", "", [ROME]),
    ),
    "json data": ("json", '{"answer": 5}', ('{"answer": 5}', "", [])),
    "mistral list": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ROME_JSON}}}, '
        '{"name": "get_weather", "arguments": {"city": "Oslo"}}]',
        ("", "", [ROME, OSLO]),
    ),
    "mistral v11": (
        "mistral",
        f"ok[TOOL_CALLS]get_weather[ARGS]{ROME_JSON}"
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Oslo"}',
        ("ok", "", [ROME, OSLO]),
    ),
    "granite": (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ROME_JSON}}}]',
        ("", "", [ROME]),
    ),
    "phi": (
        "phi4_mini_json",
        f'functools[{{"name": "get_weather", "arguments": {ROME_JSON}}}]',
        ("", "", [ROME]),
    ),
    "deepseek v3": (
        "deepseek_v3",
        f"Well.<｜tool▁calls▁begin｜>{DS_CALL}function<｜tool▁sep｜>get_weather\n```json\n"
        f"{ROME_JSON}\n```<｜tool▁call▁end｜>\n{DS_CALL}function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ("Well.", "", [ROME, OSLO]),
    ),
    "deepseek v3.1": (
        "deepseek_v31",
        f"<｜tool▁calls▁begin｜>{DS_CALL}get_weather<｜tool▁sep｜>{ROME_JSON}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        ("", "", [ROME]),
    ),
    "pythonic": (
        "pythonic",
        '[get_weather(city=\'Ro"me } ]\', days=3), get_weather(city="Oslo")]',
        ("", "", [ROME, OSLO]),
    ),
    "pythonic text": ("gemma", "[1] says so", ("[1] says so", "", [])),
    "qwen coder": (
        "qwen3_coder",
        'Yes.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRo"me } ]\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        ("Yes.", "", [ROME]),
    ),
    "function gemma": (
        "functiongemma",
        '<start_function_call>call:get_weather{city:<escape>Ro"me } ]<escape>,days:3}'
        "<end_function_call>",
        ("", "", [ROME]),
    ),
    "harmony": (
        "openai",
        "<|channel|>analysis<|message|>Hm, the weather.<|end|><|start|>assistant"
        "<|channel|>commentary<|message|>I look it up.<|end|><|start|>assistant" + HARMONY_CALL,
        ("I look it up.", "Hm, the weather.", [ROME]),
    ),
    "harmony answer": (
        "openai",
        "<|channel|>final<|message|>It is <b>warm</b>.<|return|>",
        ("It is <b>warm</b>.", "", []),
    ),
    "harmony recipient first": (
        "openai",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{ROME_JSON}<|call|>",
        ("", "", [ROME]),
    ),
}
THINKING: dict[str, tuple[str, str, str, Expected]] = {
    "opened by the prompt": (
        "qwen3",
        "<|im_start|>assistant\n<think>\n",
        "I think <so>.\n</think>\n\nYes. ",
        ("Yes. ", "I think <so>.", []),
    ),
    "opened by the answer": (
        "qwen3",
        "assistant\n",
        "\n<think>\nso\n</think>\n\nYes",
        ("Yes", "so", []),
    ),
    "none": ("qwen3", "<think>\n\n</think>\n\n", " Yes <think", (" Yes <think", "", [])),
    "cut": ("qwen3", "", "<think>so and </th", ("", "so and </th", [])),
    "always": ("deepseek_r1", "assistant", "so</think>Yes", ("Yes", "so", [])),
    "granite": (
        "granite",
        "",
        "Here is my thought process: a b Here is my response: c",
        ("c", "a b", []),
    ),
    "mistral": ("mistral", "", "[THINK]a[/THINK]b", ("b", "a", [])),
    "with a call": (
        "qwen3",
        "<think>",
        'a <tool_call>?</think>\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        ("", "a <tool_call>?", [("f", {})]),
    ),
}


def summary(pieces: list[Piece]) -> Expected:
    answer = Answer()
    answer.add(pieces)
    calls = [(call.name, json.loads(call.arguments)) for call in answer.calls or ()]
    return answer.text, answer.reasoning, calls


def read_in(chunks: list[str], parser: str, reasoning: str = "none", end: str = "") -> Expected:
    if parser == "openai":
        reasoning = "openai_gptoss"
    formatted = ChatFormat("tools", {}, tool_parser=parser, reasoning_parser=reasoning)
    reader = formatted.reader([WEATHER], end)
    assert reader is not None
    pieces = [piece for chunk in chunks for piece in reader.feed(chunk)]
    return summary([*pieces, *reader.finish()])


def cuts_of(text: str) -> list[list[str]]:
    """The whole, every cut in two, and character by character."""
    return [[text], list(text), *([text[:n], text[n:]] for n in range(1, len(text)))]


@pytest.mark.parametrize("name", CASES)
def test_calls_are_read_alike_at_every_cut(name: str) -> None:
    parser, text, expected = CASES[name]
    for chunks in cuts_of(text):
        assert read_in(chunks, parser) == expected, chunks


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_is_read_alike_at_every_cut(name: str) -> None:
    parser, prompt_end, text, expected = THINKING[name]
    for chunks in cuts_of(text):
        assert read_in(chunks, "hermes", parser, prompt_end) == expected, chunks


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "functools", "<think>", "</think>",
         '{"name": "f", "arguments": {"a": "}"}}', "[f(a=1)]", "<|channel|>final", "<|message|>",
         "<|end|>", DS_CALL, "<｜tool▁call▁end｜>", "<function=f>", "```json", " ", "\n", "a", '"',
         "{", "}", "[", "]", "<"]  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.sampled_from(MARKS), max_size=12),
    parser=st.sampled_from(sorted(TOOL_FORMS)),
    reasoning=st.sampled_from(["none", "qwen3", "deepseek_r1"]),
    data=st.data(),
)
def test_no_cut_changes_what_is_read(parts: Any, parser: str, reasoning: str, data: Any) -> None:
    text = "".join(parts)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8).map(sorted))
    chunks = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    formatted = ChatFormat("tools", {}, tool_parser=parser, reasoning_parser=reasoning)
    answers = []
    for one in ([text], chunks, list(text)):
        reader = formatted.reader([WEATHER], "")
        assert reader is not None
        answer = Answer()
        for chunk in one:
            answer.add(reader.feed(chunk))
        answer.add(reader.finish())
        answers.append(answer)
    assert answers[0] == answers[1] == answers[2]


def test_arguments_come_as_they_are_written() -> None:
    reader = ChatFormat("tools <tool_call>", {}).reader([WEATHER], "")
    assert reader is not None
    pieces = reader.feed('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ro')
    assert pieces == [Piece("name", "get_weather", 0), Piece("arguments", '{"city": "Ro', 0)]


def test_names_of_special_tokens_are_no_text() -> None:
    formatted = ChatFormat("<think>", {"<|im_start|>": 1})
    reader = formatted.reader([], "<think></think>")
    assert reader is not None
    pieces = [piece for char in "a<|im_start|>b" for piece in reader.feed(char)]
    assert summary([*pieces, *reader.finish()]) == ("ab", "", [])
    kept = formatted.reader([], "<think></think>", keeps_specials=True)
    assert kept is not None
    assert summary([*kept.feed("a<|im_start|>b"), *kept.finish()])[0] == "a<|im_start|>b"


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ tools }}<tool_call>{{ x }}<think>", "hermes", "qwen3"),
        ("tools <|channel|> <|message|>", "openai", "openai_gptoss"),
        ("tools <｜tool▁calls▁begin｜> ```json", "deepseek_v3", "none"),
        ("tools [TOOL_CALLS] [THINK]", "mistral", "mistral"),
        ("tools <|python_tag|>", "llama3_json", "none"),
        ("tools <tool_call><function=f><parameter=x>", "qwen3_coder", "none"),
        ("no such thing", "hermes", "none"),
    ],
)
def test_the_form_is_chosen_from_the_template(template: str, tools: str, reasoning: str) -> None:
    formatted = ChatFormat(template, {})
    assert (formatted.tool_parser, formatted.reasoning_parser) == (tools, reasoning)
    assert ChatFormat(template, {}, reasoning_parser="none").has_reasoning is False


def test_an_unknown_parser_is_named_with_the_nearest_known() -> None:
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        ChatFormat("", {}, tool_parser="hermse")
    with pytest.raises(ConfigError, match="reasoning_parser='deep'"):
        ChatFormat("", {}, reasoning_parser="deep")
