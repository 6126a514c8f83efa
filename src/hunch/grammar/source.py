"""What a request asks for, written as a grammar the engine (llguidance) reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from hunch.errors import GrammarError
from hunch.types import StructuredOutput

MAX_BYTES = 256 * 1024  # of a schema, regex or grammar


def source_of(asked: StructuredOutput) -> str:
    """The grammar's text; raises GrammarError for what is not one, or is too large."""
    body = _body_of(asked)
    if asked.frame is None:
        return body
    inner = json.loads(body)["grammars"][0] if body.startswith("{") else {"lark_grammar": body}
    frame = {"name": "frame", "lark_grammar": _bounded("frame", asked.frame)}
    return json.dumps({"grammars": [frame, {**inner, "name": "body"}]})


def _body_of(asked: StructuredOutput) -> str:
    if asked.regex is not None:
        return str(LLMatcher.grammar_from_regex(_bounded("regex", asked.regex)))
    if asked.grammar is not None:
        return _from_grammar(_bounded("grammar", asked.grammar))
    if asked.choice is not None:
        return _from_choice(asked.choice)
    return _from_schema({"type": "object"} if asked.json_object else asked.json, asked.whitespace)


def _from_schema(schema: Any, whitespace: bool) -> str:
    try:
        text = schema if isinstance(schema, str) else json.dumps(_plain(schema))
        _bounded("json", text)
        layout: dict[str, Any] = {"whitespace_flexible": whitespace}
        if not whitespace:  # as most JSON in a model's training was written
            layout |= {"item_separator": ", ", "key_separator": ": "}
        return str(LLMatcher.grammar_from_json_schema(text, overrides=layout))
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError(f"structured_outputs.json is no JSON schema: {error}") from None


def _plain(schema: Any) -> Any:
    return dict(schema) if isinstance(schema, Mapping) else schema


def _from_choice(choice: Any) -> str:
    if not choice:
        raise GrammarError("structured_outputs.choice is empty")
    options = " | ".join(json.dumps(text) for text in choice)
    return str(LLMatcher.grammar_from_lark(_bounded("choice", f"start: {options}")))


def _from_grammar(text: str) -> str:
    try:
        return str(LLMatcher.grammar_from_lark(any_to_lark(text)))
    except RecursionError:
        raise GrammarError("structured_outputs.grammar is nested too deeply") from None
    except Exception as error:  # the GBNF reader raises nothing narrower
        raise GrammarError(f"structured_outputs.grammar cannot be read: {error}") from None


def _bounded(name: str, text: str) -> str:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_BYTES:
        raise GrammarError(
            f"structured_outputs.{name} has {size:,} bytes; at most {MAX_BYTES:,} are allowed"
        )
    return text
