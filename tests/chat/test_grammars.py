"""A grammar takes what its family writes, and nothing that a tool's schema forbids."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken

from chat.spelled import ONE_CALL, SPELLED
from hunch.chat.families import TOOL_FORMS
from hunch.chat.format import ChatFormat
from hunch.chat.lark import closed
from hunch.chat.pieces import read
from hunch.chat.structural_tag import as_grammar
from hunch.chat.tools import Tool
from hunch.errors import RequestError
from hunch.grammar.compile import GrammarCompiler
from hunch.text.tokenizer import Tokenizer, load_tokenizer
from hunch.types import StructuredOutput
from tiny_models import write_tokenizer

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
NOW = Tool("now")
ARGUMENTS = {"city": "Rome", "days": 3}
SPECIALS = ["<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|call|>", "<|constrain|>",
            "[TOOL_CALLS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", "<|tool_call|>", "<escape>",
            "<start_function_call>", "<end_function_call>", "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
            "<|tool_calls_section_end|>", "<|tool_call>", "<tool_call|>", '<|"|>', "｜DSML｜",
            "<|START_ACTION|>", "<|END_ACTION|>", "<|tools_prefix|>", "<|tools_suffix|>",
            "<|action_start|>", "<|plugin|>", "<|action_end|>", "<|tool_call_start|>",
            "<|role_sep|>", "<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>",
            "<｜tool_call_end｜>", "<｜tool_calls_end｜>", "<minimax:tool_call>",
            "<seed:tool_call>", "</seed:tool_call>", "<arg_key:opensource>",
            "</arg_value:opensource>", "<|open|>", "<|close|>", "<|sep|>", "]<]minimax[>[",
            "<|channel>", "<channel|>", "[ARGS]"]  # fmt: skip
WRITTEN = {name: spell([("get_weather", ARGUMENTS)]) for name, spell in SPELLED.items()}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def special(plain: Tokenizer) -> Tokenizer:
    """The same, where marks are tokens of their own."""
    backend = type(plain.backend).from_str(plain.backend.to_str())
    backend.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    return Tokenizer(backend, eos_ids=plain.eos_ids)


@pytest.fixture(scope="module")
def compilers(plain: Tokenizer, special: Tokenizer) -> dict[str, tuple[Tokenizer, GrammarCompiler]]:
    return {
        "plain": (plain, GrammarCompiler(plain)),
        "special": (special, GrammarCompiler(special)),
    }


def chat_format(tokenizer: Tokenizer, parser: str, reasoning: str = "none") -> ChatFormat:
    reasoning = "openai_gptoss" if parser == "openai" else reasoning
    ids = tokenizer.special_tokens
    return ChatFormat("tools", ids, tool_parser=parser, reasoning_parser=reasoning)


def takes(compiler: Any, tokenizer: Tokenizer, asked: StructuredOutput | None, text: str) -> bool:
    assert asked is not None
    ids = tokenizer.encode(text, add_special_tokens=False)
    matcher = compiler(asked).matcher()
    return matcher.consume(ids) == len(ids) and matcher.may_end()


@pytest.mark.parametrize("parser", WRITTEN)
@pytest.mark.parametrize("kind", ["plain", "special"])
@pytest.mark.parametrize("must_call", [False, True])
def test_what_a_family_writes_is_allowed_and_read(
    compilers: Any, parser: str, kind: str, must_call: bool
) -> None:
    tokenizer, compiler = compilers[kind]
    if parser == "openai" and kind == "plain":
        pytest.skip("harmony's marks are always tokens of their own")
    formatted = chat_format(tokenizer, parser)
    asked = formatted.structured([WEATHER, NOW], "", must_call=must_call)
    text = WRITTEN[parser]
    assert takes(compiler, tokenizer, asked, text)
    reader = formatted.reader([WEATHER, NOW], "")
    assert reader is not None
    (call,) = read(reader, text).calls or ()
    assert (call.name, json.loads(call.arguments)) == ("get_weather", ARGUMENTS)
    if must_call or parser != "pythonic":  # nothing but its name tells a call from text there
        wrong = text.replace("get_weather", "get_whether")
        assert not takes(compiler, tokenizer, asked, wrong)
    assert not takes(compiler, tokenizer, asked, text.replace("days", "hours"))
    answer = "It is warm.\n"
    if parser == "openai":
        answer = f"<|channel|>final<|message|>{answer}"
    assert takes(compiler, tokenizer, asked, answer) is not must_call


@pytest.mark.parametrize("parser", sorted(SPELLED))
def test_one_call_or_several_and_only_of_the_named(compilers: Any, parser: str) -> None:
    tokenizer, compiler = compilers["special"]
    formatted = chat_format(tokenizer, parser)
    spell, calls = SPELLED[parser], [("get_weather", ARGUMENTS), ("now", {})]
    one = formatted.structured([WEATHER, NOW], "", must_call=True, many=False)
    assert takes(compiler, tokenizer, one, spell(calls[1:]))
    assert not takes(compiler, tokenizer, one, spell(calls))
    named = formatted.structured([WEATHER], "", must_call=True, many=False)
    assert takes(compiler, tokenizer, named, spell(calls[:1]))
    assert not takes(compiler, tokenizer, named, spell(calls[1:]))
    if parser not in (*ONE_CALL, "openai"):  # an answer of theirs ends with its first call
        many = formatted.structured([WEATHER, NOW], "", must_call=True)
        assert takes(compiler, tokenizer, many, spell(calls))


@pytest.mark.parametrize("parser", sorted(SPELLED))
@pytest.mark.parametrize("parameters", [{}, {"type": "object", "properties": {}}])
def test_a_tool_without_parameters_gets_none(
    compilers: Any, parser: str, parameters: dict[str, Any]
) -> None:
    tokenizer, compiler = compilers["special"]
    asked = chat_format(tokenizer, parser).structured(
        [Tool("now", parameters)], "", must_call=True, many=False
    )
    spell = SPELLED[parser]
    assert takes(compiler, tokenizer, asked, spell([("now", {})]))
    assert not takes(compiler, tokenizer, asked, spell([("now", {"city": "Rome"})]))


def test_a_template_for_one_call_at_a_time_gets_one(compilers: Any) -> None:
    tokenizer, compiler = compilers["plain"]
    template = "{{ tools }} <|python_tag|> This model only supports single tool-calls at once!"
    asked = ChatFormat(template, {}).structured([NOW], "")
    spell = SPELLED["llama3_json"]
    assert takes(compiler, tokenizer, asked, spell([("now", {})]))
    assert not takes(compiler, tokenizer, asked, spell([("now", {}), ("now", {})]))


def test_the_table_has_no_form_without_a_test() -> None:
    tested = {id(TOOL_FORMS[name]) for name in WRITTEN}
    for name, form in TOOL_FORMS.items():
        assert id(form) in tested, name


TRIP = Tool(
    "trip",
    {
        "type": "object",
        "properties": {
            "to": {"type": "string", "enum": ["Rome", "Oslo"]},
            "by": {"$ref": "#/$defs/Way"},
            "days": {"type": "integer"},
        },
        "required": ["to", "days"],
        "$defs": {"Way": {"type": "array", "items": {"type": "integer"}}},
    },
)
KEYED = [
    "qwen3_coder",
    "glm45",
    "minimax_m2",
    "deepseek_v32",
    "pythonic",
    "gemma4",
    "functiongemma",
]


@pytest.mark.parametrize("parser", KEYED)
@pytest.mark.parametrize("kind", ["plain", "special"])
def test_arguments_key_by_key_keep_to_the_schema(compilers: Any, parser: str, kind: str) -> None:
    tokenizer, compiler = compilers[kind]
    asked = chat_format(tokenizer, parser).structured([TRIP], "", must_call=True)

    def may_say(**values: Any) -> bool:
        return takes(compiler, tokenizer, asked, SPELLED[parser]([("trip", values)]))

    assert may_say(to="Rome", days=2)
    assert may_say(days=2, by=[1, 2], to="Oslo")  # in any order
    assert not may_say(to="Rome")
    assert not may_say(to="Rome", days="two")
    if parser != "pythonic":
        assert not may_say(to="Paris", days=2)
    twice = SPELLED[parser]([("trip", {"to": "Rome", "days": 2, "dayz": 2})])
    assert not takes(compiler, tokenizer, asked, twice.replace("dayz", "days"))


def test_many_keys_stay_few_rules(compilers: Any) -> None:
    tokenizer, compiler = compilers["plain"]
    properties = {f"key_{n}": {"type": "integer"} for n in range(30)}
    tool = Tool("many", {"type": "object", "properties": properties, "required": ["key_7"]})
    asked = chat_format(tokenizer, "qwen3_coder").structured([tool], "", must_call=True)
    spell = SPELLED["qwen3_coder"]
    for keys, is_allowed in ((["key_7"], True), (["key_3", "key_7"], True), (["key_3"], False)):
        text = spell([("many", dict.fromkeys(keys, 1))])
        assert takes(compiler, tokenizer, asked, text) is is_allowed


def test_text_calls_and_parallel_calls(compilers: Any) -> None:
    tokenizer, compiler = compilers["plain"]
    formatted = chat_format(tokenizer, "hermes")
    call = WRITTEN["hermes"]
    many = formatted.structured([WEATHER], "")
    assert takes(compiler, tokenizer, many, f"I see.\n{call}\n{call}\n")
    one = formatted.structured([WEATHER], "", many=False)
    assert takes(compiler, tokenizer, one, f"I see.\n{call}")
    assert not takes(compiler, tokenizer, one, f"{call}\n{call}")
    forced = formatted.structured([WEATHER], "", must_call=True, many=False)
    assert not takes(compiler, tokenizer, forced, "I see.")
    assert takes(compiler, tokenizer, forced, call)


PERSON = StructuredOutput(json={"type": "object", "properties": {"a": {"type": "integer"}},
                                "required": ["a"], "additionalProperties": False})  # fmt: skip


@pytest.mark.parametrize(
    "asked",
    [PERSON, StructuredOutput(regex=r'\{"a": \d+\}'), StructuredOutput(choice=['{"a": 5}', "no"]),
     StructuredOutput(grammar='start: "{\\"a\\": " N "}"\nN: /[0-9]+/')],
)  # fmt: skip
def test_a_form_begins_after_the_reasoning(compilers: Any, asked: StructuredOutput) -> None:
    tokenizer, compiler = compilers["plain"]
    formatted = chat_format(tokenizer, "hermes", "qwen3")
    opened = formatted.structured([], "<think>\n", asked=asked)
    assert takes(compiler, tokenizer, opened, 'so {"b": 1}\n</think>\n\n{"a": 5}')
    assert not takes(compiler, tokenizer, opened, '{"a": 5}')
    assert not takes(compiler, tokenizer, opened, 'so</think>{"b": 5}')
    free = formatted.structured([], "assistant\n", asked=asked)
    assert takes(compiler, tokenizer, free, '{"a": 5}')
    assert takes(compiler, tokenizer, free, '<think>x</think>\n\n{"a": 5}')
    assert formatted.structured([], "<think>\n\n</think>\n\n", asked=asked) == asked


@pytest.mark.parametrize("kind", ["plain", "special"])
def test_reasoning_whose_mark_is_a_token_and_text(compilers: Any, kind: str) -> None:
    tokenizer, compiler = compilers[kind]
    formatted = chat_format(tokenizer, "gemma4", "gemma4")
    asked = formatted.structured([WEATHER], "<|turn>model\n", must_call=True)
    call = WRITTEN["gemma4"]
    assert takes(compiler, tokenizer, asked, f"<|channel>thought\nHm.\n<channel|>{call}")
    assert takes(compiler, tokenizer, asked, call)
    assert not takes(compiler, tokenizer, asked, f"<|channel>thought\n{call}")


def test_calls_or_a_form(compilers: Any) -> None:
    tokenizer, compiler = compilers["plain"]
    formatted = chat_format(tokenizer, "hermes", "qwen3")
    asked = formatted.structured([WEATHER], "<think>", asked=PERSON)
    assert takes(compiler, tokenizer, asked, 'so</think>\n\n{"a": 5}')
    assert takes(compiler, tokenizer, asked, f"so</think>\n\n{WRITTEN['hermes']}")
    assert not takes(compiler, tokenizer, asked, "so</think>\n\nIt is warm.")


@pytest.mark.parametrize("prompt_end", ["<think>\n", "assistant\n"])
def test_a_budget_ends_the_reasoning(compilers: Any, prompt_end: str) -> None:
    tokenizer, compiler = compilers["plain"]
    formatted = chat_format(tokenizer, "hermes", "qwen3")
    asked = formatted.structured([], prompt_end, asked=PERSON, budget=12)
    assert asked is not None
    matcher = compiler(asked).matcher()
    start = "<think>" if prompt_end.startswith("a") else ""
    ids = tokenizer.encode(start + "a" * 12, add_special_tokens=False)[:12]
    end = tokenizer.encode("</think>", add_special_tokens=False)
    assert matcher.consume(ids[:-1]) == len(ids) - 1
    assert matcher.branch(ids[-1])  # looked at and taken back: nothing of it stays
    assert matcher.forced(30)[: len(end)] == end
    matcher.back(1)
    assert matcher.consume(ids[-1:]) == 1
    tokens = [*end[:2], ids[-1]]
    mask_MW = np.zeros((4, -(-tokenizer.vocab_size // 32)), dtype=np.int32)
    matcher.fill(tokens, [-1, 0, 1], mask_MW)
    mask_MV = np.unpackbits(mask_MW.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in mask_MV[:3]] == [[t] for t in end[:3]]
    assert not mask_MV[3].any()
    assert matcher.consume(tokenizer.encode("b")) == 0
    rest = tokenizer.encode('</think>\n{"a": 5}', add_special_tokens=False)
    assert matcher.consume(rest) == len(rest)
    assert matcher.may_end()


def test_a_budget_leaves_an_answer_without_reasoning_alone(compilers: Any) -> None:
    tokenizer, compiler = compilers["plain"]
    formatted = chat_format(tokenizer, "hermes", "qwen3")
    asked = formatted.structured([], "assistant\n", budget=4)
    assert takes(compiler, tokenizer, asked, "It is a warm day.")
    assert takes(compiler, tokenizer, asked, "<think>a</think>It is a warm day.") is False
    assert takes(compiler, tokenizer, asked, "<thin gs")


@pytest.mark.parametrize("parser", ["hermes", "deepseek_v3", "glm45", "minimax_m3"])
def test_a_schema_that_is_nested_too_deeply_is_refused(parser: str) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(600):
        schema = {"type": "object", "properties": {"a": schema}}
    chat = ChatFormat(None, {}, tool_parser=parser)
    with pytest.raises(RequestError, match="nested too deeply"):
        chat.structured([Tool("f", schema)], "", must_call=True)


def test_silent_schemas_are_closed() -> None:
    nested = {"properties": {"a": {"properties": {"b": {}}}, "c": {"items": [{"anyOf": []}]}}}
    assert closed(nested) == {
        "properties": {
            "a": {"properties": {"b": {}}, "additionalProperties": False},
            "c": {"items": [{"anyOf": []}]},
        },
        "additionalProperties": False,
    }
    assert "additionalProperties" not in closed({"properties": {}})
    assert closed({"properties": {"a": {}}, "additionalProperties": True})["additionalProperties"]


@pytest.mark.parametrize("kind", ["plain", "special"])
def test_channels_hold_text_and_then_calls(compilers: Any, kind: str) -> None:
    tokenizer, compiler = compilers[kind]
    formatted = chat_format(tokenizer, "kimi_k3", "kimi_k3")
    call, end = SPELLED["kimi_k3"]([("get_weather", ARGUMENTS)]), "<|close|>message<|sep|>"
    said = "I look.<|close|>response<|sep|>"
    thought = f"Hm.<|close|>think<|sep|><|open|>response<|sep|>{said}"
    for must_call in (False, True):
        asked = formatted.structured([WEATHER, NOW], "<|open|>response<|sep|>", must_call=must_call)
        assert takes(compiler, tokenizer, asked, f"<|close|>response<|sep|>{call}{end}")
        for text in (f"{said}{end}", f"{said}{call}{end}", said + call):
            assert takes(compiler, tokenizer, asked, text) is not must_call
        wrong = call.replace('type="number"', 'type="string"')
        assert not takes(compiler, tokenizer, asked, f"{said}{wrong}{end}")
    asked = formatted.structured([WEATHER], "<|open|>think<|sep|>")
    assert takes(compiler, tokenizer, asked, f"{thought}{call}{end}")


def test_nested_elements_keep_to_the_schema(compilers: Any) -> None:
    tokenizer, compiler = compilers["special"]
    point = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tool = Tool("go", {"properties": {"to": {"type": "array", "items": point}}, "required": ["to"]})
    asked = chat_format(tokenizer, "minimax_m3").structured([tool], "", must_call=True)
    spell = SPELLED["minimax_m3"]
    for values in ({"to": [{"x": 1}, {"x": -2}]}, {"to": []}):
        assert takes(compiler, tokenizer, asked, spell([("go", values)]))
    for values in ({}, {"to": [{}]}, {"to": [{"x": "a"}]}, {"to": [{"y": 1}]}):
        assert not takes(compiler, tokenizer, asked, spell([("go", values)]))


def test_an_answer_that_the_prompt_opened_for_a_recipient(compilers: Any) -> None:
    tokenizer, compiler = compilers["plain"]
    formatted = chat_format(tokenizer, "functionary_v32")
    call, both = 'get_weather\n{"city": "Rome"}', 'get_weather\n{"city": "Rome"}>>>now\n{}'
    for must_call in (False, True):
        asked = formatted.structured([WEATHER, NOW], ">>>", must_call=must_call)
        for text in (call, both):
            assert takes(compiler, tokenizer, asked, text)
            assert takes(compiler, tokenizer, asked, f"all\nI look.>>>{text}") is not must_call
        assert takes(compiler, tokenizer, asked, "all\nIt is warm.") is not must_call
        assert not takes(compiler, tokenizer, asked, call.replace("weather", "whether"))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "anyOf": [{"required": ["a"]}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "if": {"properties": {"a": {"const": 1}}}},
        {"properties": {"a": {"not": {"properties": {"b": {}}}}}},
        {"properties": {"a": {}}, "required": ["a", "b"]},
        {"const": {"properties": {"a": 1}}},
    ],
)
def test_schemas_that_closing_would_contradict_stay_open(schema: dict[str, Any]) -> None:
    assert closed(schema) == schema


def test_a_schema_that_names_its_properties_allows_no_others(compilers: Any) -> None:
    tokenizer, compiler = compilers["plain"]
    age = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    more = '{"age": 3, "name": "Anna"}'
    for schema in (age, json.dumps(age)):
        asked = as_grammar(StructuredOutput(json=schema), {})
        assert takes(compiler, tokenizer, asked, '{"age": 3}')
        assert takes(compiler, tokenizer, asked, more) is False
    wide = as_grammar(StructuredOutput(json=age | {"additionalProperties": True}), {})
    assert takes(compiler, tokenizer, wide, more)
    anything = as_grammar(StructuredOutput(json={"type": "object"}), {})
    assert takes(compiler, tokenizer, anything, more)
