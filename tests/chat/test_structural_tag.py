"""Structural tags: what they let through, in every form they are written in."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken

from hunch.chat.structural_tag import as_grammar
from hunch.errors import GrammarError
from hunch.grammar.compile import GrammarCompiler
from hunch.text.tokenizer import Tokenizer, load_tokenizer
from hunch.types import StructuredOutput
from tiny_models import write_tokenizer

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ROME = '{"city": "Rome"}'
SCHEMA = {"type": "json_schema", "json_schema": CITY | {"additionalProperties": False}}
TAG = {"type": "tag", "begin": "<f=a>", "content": SCHEMA, "end": "</f>"}
OTHER = {"type": "tag", "begin": "<f=b>", "content": {"type": "any_text"}, "end": ["</f>", "</g>"]}
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG, OTHER]}
LIST = {"type": "tags_with_separator", "tags": [TAG], "separator": ","}
OLD = {
    "structures": [{"begin": "<f=a>", "schema": CITY, "end": "</f>"}],
    "triggers": ["<f="],
}
X = {"type": "const_string", "value": "x"}
CALL = f"<f=a>{ROME}</f>"
CASES: list[tuple[Any, list[str], list[str]]] = [
    (OLD, ["", "hi", f"so {CALL} and {CALL}."], ["<f=b>", "<f=a>{}</f>"]),
    (CALLS, ["", f"a < b {CALL} then <f=b>hello</g> ok"], ["<f=c>", '<f=a>{"town": 1}</f>']),
    (CALLS | {"at_least_one": True}, [CALL, f"{CALL} and"], ["", f"so {CALL}"]),
    (CALLS | {"stop_after_first": True}, ["so", f"so {CALL}"], [f"{CALL} and"]),
    (
        CALLS | {"stop_after_first": True, "at_least_one": True},
        [CALL],
        ["", f"{CALL} and", f"{CALL}{CALL}"],
    ),
    (CALLS | {"excludes": ["no"]}, ["yes", f"yes {CALL}"], ["no", f"no {CALL}"]),
    (TAG, [CALL], [f"{CALL} ", "<f=a></f>"]),
    (OTHER, ["<f=b></f>", "<f=b>a < b</g>"], ["<f=b>a", "<f=b></f></f>"]),
    ({**TAG, "content": CALLS}, [f"<f=a>so {CALL} and</f>"], [f"<f=a>{CALL}"]),
    (LIST, ["", f"{CALL},{CALL}"], [f"{CALL},", f"{CALL}{CALL}"]),
    (LIST | {"at_least_one": True, "stop_after_first": True}, [CALL], ["", f"{CALL},{CALL}"]),
    ({"type": "sequence", "elements": [X, SCHEMA]}, [f"x{ROME}"], ["x", ROME]),
    ({"type": "or", "elements": [X, SCHEMA]}, ["x", ROME], ["", "xx"]),
    ({"type": "optional", "content": X}, ["", "x"], ["xx"]),
    ({"type": "plus", "content": X}, ["x", "xxx"], ["", "y"]),
    ({"type": "star", "content": X}, ["", "xxx"], ["y"]),
    ({"type": "repeat", "content": X, "min": 2, "max": 3}, ["xx", "xxx"], ["x", "xxxx"]),
    ({"type": "repeat", "content": X, "min": 1, "max": -1}, ["x", "xxxx"], [""]),
    ({"type": "regex", "pattern": "a/b|c"}, ["a/b", "c"], ["a"]),
]  # fmt: skip
TEXTS = [
    pytest.param(
        form if form is OLD else {"type": "structural_tag", "format": form},
        text,
        is_good,
        id=f"{number}-{text}",
    )
    for number, (form, good, bad) in enumerate(CASES)
    for texts, is_good in ((good, True), (bad, False))
    for text in texts
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return load_tokenizer(path)


def takes(compiler: GrammarCompiler, tokenizer: Tokenizer, tag: Any, text: str) -> bool:
    asked = as_grammar(StructuredOutput(structural_tag=tag), tokenizer.special_tokens)
    tokens = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
    return compiler(asked).matcher().consume(tokens) == len(tokens)


@pytest.fixture(scope="module")
def compiler(plain: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(plain)


@pytest.mark.parametrize(("tag", "text", "is_good"), TEXTS)
def test_a_tag_takes_what_it_means(
    compiler: GrammarCompiler, plain: Tokenizer, tag: Any, text: str, is_good: bool
) -> None:
    assert takes(compiler, plain, tag, text) == is_good
    assert takes(compiler, plain, json.dumps(tag), text) == is_good


def test_marks_that_are_tokens_of_their_own(plain: Tokenizer) -> None:
    backend = type(plain.backend).from_str(plain.backend.to_str())
    backend.add_special_tokens([AddedToken(name, special=True) for name in ("<call>", "</call>")])
    special = Tokenizer(backend, eos_ids=plain.eos_ids)
    tag = {"begin": '<call>{"name": "a", "args": ', "schema": CITY, "end": "}</call>"}
    compiler = GrammarCompiler(special)
    for trigger in ("<call>", "<ca"):
        given = {"structures": [tag], "triggers": [trigger]}
        call = f'<call>{{"name": "a", "args": {ROME}}}</call>'
        assert takes(compiler, special, given, f"so {call} and {call}")
        assert not takes(compiler, special, given, "so <call>{}")


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ("{", "no JSON"),
        ("[]", "an object with a format"),
        ({}, "format 'None' is none of const_string"),
        ({"format": {"type": "dispatch"}}, "format 'dispatch' is none of"),
        ({"format": {"type": "any_text", "max_tokens": 5}}, "max_tokens=5 is not supported"),
        ({"format": SCHEMA | {"style": "qwen_xml"}}, "style=qwen_xml is not supported"),
        ({"format": CALLS | {"triggers": ["<g"]}}, "no trigger does"),
        ({"format": {"type": "tag", "content": X}}, "begin is missing"),
        ({"format": {"type": "sequence", "elements": []}}, "list of formats"),
        ({"format": {"type": "repeat", "content": X, "min": 3, "max": 1}}, "from 3 to 1 times"),
        ({"structures": [{"begin": "<a>"}]}, "triggers is missing"),
    ],
)
def test_what_is_no_tag_is_an_error_that_says_why(tag: Any, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        as_grammar(StructuredOutput(structural_tag=tag), {})
    nested: dict[str, Any] = X
    for _ in range(100):
        nested = {"type": "star", "content": nested}
    with pytest.raises(GrammarError, match="too deeply"):
        as_grammar(StructuredOutput(structural_tag={"format": nested}), {})
