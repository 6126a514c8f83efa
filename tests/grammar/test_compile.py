"""Grammars of every kind compile; broken and hostile ones get an error in time."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher

from hunch.errors import GrammarError, RequestError
from hunch.grammar.compile import GrammarCompiler, _Spelling
from hunch.grammar.source import choice_regex
from hunch.text.tokenizer import Tokenizer, load_tokenizer
from hunch.types import SamplingParams, StructuredOutput
from tiny_models import write_tokenizer
from tiny_text import byte_level, sentence_piece


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return load_tokenizer(path)


@pytest.fixture(scope="module")
def compile_grammar(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer)


def takes(compile_grammar: GrammarCompiler, tokenizer: Tokenizer, text: str, **asked) -> bool:
    """The grammar takes the whole text and then end-of-text."""
    tokens = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
    return compile_grammar(StructuredOutput(**asked)).matcher().consume(tokens) == len(tokens)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_vocabulary_that_begins_texts_with_a_space(
    is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SentencePiece's. A request with a schema was answered with nothing."""
    codec = sentence_piece()
    if is_own:  # a token of the byte 255 is no reason to ask the interpreter
        monkeypatch.setattr("hunch.grammar.compile.TokenizerWrapper", None)
    else:
        monkeypatch.setattr(codec, "definition", lambda: "{}")
    grammar = GrammarCompiler(codec)(StructuredOutput(json=SCHEMA))
    parser = grammar.matcher().parser
    for token in codec.encode('\n{"name": "hello"}', add_special_tokens=False)[2:]:
        mask = parser.compute_bitmask()
        assert not parser.is_error()
        assert mask[token // 8] >> token % 8 & 1, codec.token_bytes(token)
        assert parser.consume_token(token)


def test_a_tokenizer_that_the_engine_would_spell_otherwise_is_not_built_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Qwen's <tool_call> and Gemma's <table> are text; building both took seconds."""
    codec = byte_level()
    tool = codec.token_id("<tool>")
    assert codec.special_ids.isdisjoint({tool})
    monkeypatch.setattr(codec, "definition", lambda: pytest.fail("the engine's own was built"))
    grammar = GrammarCompiler(codec)(StructuredOutput(regex="<tool>[a-z]"))
    parser = grammar.matcher().parser
    assert parser.consume_token(tool)
    assert parser.consume_tokens(codec.encode("h"))
    assert parser.is_accepting()


@pytest.mark.parametrize("text", ["{", ' "a"', "hello</s>", "\u00e9", "e\u0301 world"])
def test_tokens_spell_what_the_engine_asks_for(text: str) -> None:
    for codec in (sentence_piece(), byte_level()):
        spelling = _Spelling(codec)
        ids = spelling(text.encode())
        spelled = b"".join(spelling.tokens[token] for token in ids)
        assert text.encode().startswith(spelled)
        assert spelled


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True}
KINDS = [
    ({"json": SCHEMA}, '{"name": "Ada", "age": 36}', '{"name": "Augusta"}'),
    ({"json": json.dumps(SCHEMA)}, '{"name": "é"}', '{"age": 36}'),
    ({"json": {"enum": ["café", 3]}}, '"café"', '"cafe"'),
    ({"grammar": '?start: a ","\n?a: "x" | "?y"'}, "?y,", "y,"),
    ({"json": SCHEMA, "whitespace": True}, '{ "name":\n"Ada"}', '{"nom": "Ada"}'),
    ({"json": SCHEMA}, '{"name": "A"}', '{ "name":\n"Ada"}'),
    ({"json_object": True}, '{"a": [1, {"b": null}]}', "[1]"),
    ({"regex": "[0-9]{4}-[0-9]{2}"}, "2024-05", "2024-5"),
    ({"choice": ["yes", 'no "maybe"', "é"]}, 'no "maybe"', "no"),
    (
        {"choice": [f"choice number {n}" for n in range(2500)]},
        "choice number 1234",
        "choice number",
    ),
    ({"choice": ["a", "ab", "abc\n(d)"]}, "abc\n(d)", "abc"),
    ({"json": {"oneOf": [{"type": "integer"}, {"minimum": 2}]}}, "1", "x"),
    ({"json": UNIQUE}, '["b", "a"]', '["b", "b"]'),
    ({"json": {**UNIQUE, "minItems": 2}}, '["c", "a", "b"]', '["b"]'),
    ({"json": {"items": {"type": "string"}, "uniqueItems": True}}, '["any"]', "[1]"),
    ({"grammar": 'start: "a" b+\nb: "x" | "yy"\n'}, "axyy", "ay"),
    ({"grammar": 'root ::= "q" [0-9]+ ("," [a-c])*\n'}, "q12,a,b", "q,a"),
]


def test_what_is_wrong_with_a_regex_is_said_in_a_line(compile_grammar):
    with pytest.raises(GrammarError, match=r'compiled: invalid regex "\(ab": unclosed group$'):
        compile_grammar(StructuredOutput(regex="(ab"))


@pytest.mark.parametrize("asked", [{"json": {"$ref": "#"}}, {"grammar": 'root ::= root "a"'}])
def test_a_grammar_that_nothing_fits_is_called_so(asked, compile_grammar):
    with pytest.raises(GrammarError, match="compiled: no text fits it"):
        compile_grammar(StructuredOutput(**asked))


def test_a_forced_text_that_is_too_long_is_found_while_compiling(compile_grammar):
    """Not in a step, which others wait for."""
    with pytest.raises(GrammarError, match="fixed text of 100009 bytes or more"):
        compile_grammar(StructuredOutput(regex="(a{10}){9999}b{19}"))


@pytest.mark.parametrize(("asked", "good", "bad"), KINDS)
def test_every_kind(asked, good, bad, compile_grammar, tokenizer):
    assert takes(compile_grammar, tokenizer, good, **asked)
    assert not takes(compile_grammar, tokenizer, bad, **asked)


@given(st.sets(st.text("ab(|?\\\n ", max_size=6), min_size=1), st.text("ab(|?\\\n ", max_size=6))
def test_a_choice_is_all_of_its_texts_and_no_other(texts, other):
    pattern = re.compile(choice_regex(sorted(texts)))
    assert all(pattern.fullmatch(text) for text in texts)
    assert bool(pattern.fullmatch(other)) == (other in texts)


def test_a_choice_that_nests_deeply_keeps_its_texts():
    pattern = re.compile(choice_regex(["a" * n for n in range(1, 300)]))
    assert pattern.fullmatch("a" * 299)
    assert not pattern.fullmatch("a" * 300)


@pytest.mark.parametrize(
    "asked",
    [
        {"json": "{"},
        {"json": {"type": "nothing known"}},
        {"json": {"$ref": "#/$defs/missing"}},
        {"json": {"pattern": "("}},
        {"json": {"enum": [object()]}},
        {"regex": "(a"},
        {"regex": "(?=a)b"},
        {"grammar": "start: nowhere"},
        {"grammar": 'root ::= "a" missing'},
        {"grammar": ""},
        {"choice": []},
    ],
)
def test_what_is_no_grammar_is_an_error(asked, compile_grammar):
    with pytest.raises(GrammarError):
        compile_grammar(StructuredOutput(**asked))


def chain_of_rules(count: int) -> str:
    rules = "\n".join(f'r{i}: "a{i}" r{i + 1}' for i in range(count))
    return f'start: r0\n{rules}\nr{count}: "z"\n'


def chain_of_references(count: int) -> dict:
    defs = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(count)
    }
    return {"$defs": {**defs, f"d{count}": {"type": "string"}}, "$ref": "#/$defs/d0"}


def nested(depth: int) -> dict:
    schema: dict = {"type": "integer"}
    for _ in range(depth):
        schema = {"anyOf": [{"properties": {"a": schema}}, {"properties": {"b": schema}}]}
    return schema


HOSTILE = {
    "10 MB of regex": {"regex": "|".join(["abcdefghi"] * 1_000_000)},
    "10 MB of schema": {"json": {"enum": [f"value {i}" for i in range(700_000)]}},
    "10 MB of GBNF": {"grammar": "root ::= " + '"a" | ' * 1_700_000 + '"a"'},
    "10 MB of choices": {"choice": [f"choice {i}" for i in range(600_000)]},
    "many regexes in one": {"regex": "|".join(f".*{chr(97 + i % 26)}.{{{i}}}" for i in range(99))},
    "exponential schema": {"json": nested(14)},
    "schema that is all of many": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(3)]}
                for i in range(14)
            ]
        }
    },
    "deep brackets": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "deep regex": {"regex": "(" * 20_000 + "a" + ")" * 20_000},
    "long chain of rules": {"grammar": chain_of_rules(9_000)},
    "long chain of references": {"json": chain_of_references(3_000)},
    "circle": {"grammar": "start: a\na: b\nb: a\n"},
    "schema of itself": {"json": {"$ref": "#"}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_end_in_time_and_other_threads_go_on(name, tokenizer):
    """An error, or a grammar whose steps stay bounded; never a crash, never a long silence.

    Silence is counted in this process's own time: that others keep it waiting is no fault of it.
    """
    asked = StructuredOutput(**HOSTILE[name])
    compile_grammar = GrammarCompiler(tokenizer, max_seconds=3)
    gaps, is_done = [0.0], threading.Event()

    def watch() -> None:
        last = time.process_time()
        while not is_done.wait(0.01):
            now = time.process_time()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, said = time.perf_counter(), ""
    try:
        matcher = compile_grammar(asked).matcher()
        assert len(matcher.forced(8)) <= 8
    except GrammarError as error:
        said = str(error)
    finally:
        is_done.set()
        watcher.join()
    assert time.perf_counter() - began < 120
    assert max(gaps) < 2.5
    assert len(said) < 500


def test_a_grammar_that_takes_too_long_is_given_up(tokenizer):
    with pytest.raises(GrammarError, match=r"more than 0\.001 s"):
        GrammarCompiler(tokenizer, max_seconds=0.001)(
            StructuredOutput(json=chain_of_references(1_500))
        )


def test_a_grammar_is_not_blamed_for_time_that_others_took(tokenizer, monkeypatch):
    def make(*args, **options):
        time.sleep(0.6)  # as a thread does on a machine that has no core for it
        return LLMatcher(*args, **options)

    monkeypatch.setattr("hunch.grammar.compile.LLMatcher", make)
    compile_grammar = GrammarCompiler(tokenizer, max_seconds=0.5)
    assert compile_grammar(StructuredOutput(regex="[a-f]{6}")).matcher()


def test_requests_with_the_same_grammar_share_it(compile_grammar):
    one = compile_grammar(StructuredOutput(regex="[a-f]{7}"))
    assert compile_grammar(StructuredOutput(regex="[a-f]{7}")) is one


@pytest.mark.parametrize(
    "asked",
    [{}, {"regex": "a", "choice": ["b"]}, {"regex": 5}, {"json": 5}, {"choice": "yes"},
     {"choice": [""]}, {"json_object": False}, {"jason": {}}],
)  # fmt: skip
def test_a_wish_that_is_none_is_refused_at_once(asked):
    with pytest.raises(RequestError):
        SamplingParams(structured_outputs=asked)


def test_a_model_without_an_end_of_text_token_is_named(tmp_path: Path):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.eos_ids = ()
    with pytest.raises(GrammarError, match="end-of-text"):
        GrammarCompiler(tokenizer)(StructuredOutput(regex="a"))


def test_ends_that_the_vocabulary_has_not_are_left_out(tmp_path):
    size = write_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [size + 3]}))
    codec = load_tokenizer(tmp_path)
    assert size + 3 in codec.eos_ids
    grammar = GrammarCompiler(codec)(StructuredOutput(regex="[0-9]{3}"))
    assert grammar.eos_ids == {size - 1}


def test_a_schema_inside_of_a_grammar_is_named_without_the_grammar(compile_grammar):
    asked = StructuredOutput(grammar='start: "a" b\nb: %json {"type": "objekt"}')
    with pytest.raises(GrammarError) as caught:
        compile_grammar(asked)
    assert str(caught.value) == "the grammar cannot be compiled: Invalid type: objekt"
