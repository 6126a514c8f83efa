"""What a request asks for, written as a grammar the engine (llguidance) reads."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from itertools import groupby, permutations, takewhile
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from hunch.checks import MAX_GRAMMAR_BYTES, json_of
from hunch.errors import GrammarError
from hunch.types import StructuredOutput

MAX_NESTING = 100  # groups of a regex within each other
MAX_UNIQUE = 5  # values whose orders are spelt out: 326 of them

_INLINED = re.compile(r"^\?(?=[a-z_]\w*\s*:)", re.MULTILINE)  # ?rule: Lark's mark for its trees
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


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
        text = _bounded("json", schema) if isinstance(schema, str) else json_of(schema)
        if '"uniqueItems"' in text:
            text = json_of(_without_unique(json.loads(text)))
        # Where alternatives of a oneOf overlap, whatever fits one of them is let through.
        layout: dict[str, Any] = {"whitespace_flexible": whitespace, "coerce_one_of": True}
        if not whitespace:  # as most JSON in a model's training was written
            layout |= {"item_separator": ", ", "key_separator": ": "}
        return str(LLMatcher.grammar_from_json_schema(text, overrides=layout))
    except GrammarError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError(f"structured_outputs.json is no JSON schema: {error}") from None


def _from_choice(choice: Any) -> str:
    if not choice:
        raise GrammarError("structured_outputs.choice is empty")
    _bounded("choice", "".join(choice))
    return str(LLMatcher.grammar_from_regex(choice_regex(sorted(set(choice)))))


def choice_regex(texts: Sequence[str], depth: int = 0) -> str:
    """A regex for one of these sorted texts, common beginnings written once.

    A list of alternatives would keep thousands of them open at the first token, where the grammar
    engine gives up; here they part ways letter by letter.
    """
    if depth == MAX_NESTING:
        return f"(?:{'|'.join(map(_escaped, texts))})"
    first, last = texts[0], texts[-1]
    pairs = zip(first, last, strict=False)
    prefix = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    rest = [text[len(prefix) :] for text in texts]
    is_end = rest[0] == ""
    branches = [
        choice_regex(list(group), depth + 1)
        for _, group in groupby(rest[is_end:], key=lambda text: text[0])
    ]
    if not branches:
        return _escaped(prefix)
    tail = f"(?:{'|'.join(branches)})" if len(branches) > 1 or is_end else branches[0]
    return _escaped(prefix) + tail + "?" * is_end


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\g<0>", text)


def _without_unique(node: Any) -> Any:
    """The schema without `uniqueItems`: few possible items are spelt out in all their orders.

    A grammar cannot remember which of endlessly many items were there: of those it is not held.
    """
    if isinstance(node, list):
        return [_without_unique(one) for one in node]
    if not isinstance(node, dict):
        return node
    node = {name: _without_unique(one) for name, one in node.items()}
    # A property may have that name, too; then it holds a schema.
    if not isinstance(is_unique := node.get("uniqueItems"), bool):
        return node
    del node["uniqueItems"]
    values = _values(node.get("items"))
    if not is_unique or "prefixItems" in node or not 0 < len(values) <= MAX_UNIQUE:
        return node
    least, most = node.pop("minItems", 0), node.pop("maxItems", len(values))
    del node["items"]
    orders = [
        {
            "type": "array",
            "prefixItems": [{"const": value} for value in order],
            "items": False,
            "minItems": size,
        }
        for size in range(least, min(most, len(values)) + 1)
        for order in permutations(values, size)
    ]
    if not orders:
        raise GrammarError(f"structured_outputs.json: no {least} of {len(values)} items differ")
    return {**{name: one for name, one in node.items() if name != "type"}, "anyOf": orders}


def _values(items: Any) -> list[Any]:
    """What an item can be, where that is a list."""
    if not isinstance(items, dict):
        return []
    if isinstance(items.get("enum"), list):
        return [json.loads(text) for text in dict.fromkeys(map(json.dumps, items["enum"]))]
    if "const" in items:
        return [items["const"]]
    return [False, True] if items.get("type") == "boolean" else []


def _from_grammar(text: str) -> str:
    try:
        return str(LLMatcher.grammar_from_lark(any_to_lark(_INLINED.sub("", text))))
    except RecursionError:
        raise GrammarError("structured_outputs.grammar is nested too deeply") from None
    except Exception as error:  # the GBNF reader raises nothing narrower
        raise GrammarError(f"structured_outputs.grammar cannot be read: {error}") from None


def _bounded(name: str, text: str) -> str:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(
            f"structured_outputs.{name} has {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are "
            "allowed"
        )
    return text
