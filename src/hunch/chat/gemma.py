"""Gemma's calls: call:name{key:value,...}, with strings between marks of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hunch.chat.bodies import BodyForm
from hunch.chat.keyed import value_of
from hunch.chat.lark import Rules, quote
from hunch.chat.pieces import loads_loosely
from hunch.chat.tools import Tool, properties_of, required_of, schema_types

_NAME = re.compile(r"\s*call:\s*([^\s{]+)\s*\{")
_DEEPEST = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmaForm(BodyForm):
    quote: str  # before and after a string

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.quote, *self.ignored)

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, dict[str, Any]] | None:
        found = _NAME.match(text)
        if found is None:
            return None
        name = found.group(1)
        values = _Scanner(text.removesuffix(self.end), found.end(), self.quote).pairs(0)
        types = schema_types(tools, name)
        for key, value in values.items():
            if isinstance(value, str) and types.get(key, "string") != "string":
                values[key] = value_of(value, types[key])  # a number that was written as a string
        return name, values

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        options = []
        for tool in tools:
            value = self._object(rules, tool, properties_of(tool), required_of(tool))
            options.append(f"{quote(f'call:{tool.name}')} {value}")
        call = f"({' | '.join(options)}) {rules.mark(self.end)}"
        return rules.sections(self.begin, call, must_call, many)

    def _object(
        self, rules: Rules, tool: Tool, schemas: Mapping[str, Any], required: Sequence[str]
    ) -> str:
        pairs = {
            key: f"{quote(f'{key}:')} {self._value(rules, tool, schema)}"
            for key, schema in schemas.items()
        }
        return f"{quote('{')} {rules.keys(pairs, required, ',')} {quote('}')}"

    def _value(self, rules: Rules, tool: Tool, schema: Any) -> str:
        json_type = schema.get("type") if isinstance(schema, Mapping) else None
        if json_type == "string":
            mark = rules.mark(self.quote)
            known = " | ".join(quote(str(choice)) for choice in schema.get("enum", ()))
            return f"{mark} ({known}) {mark}" if known else f"{mark} {rules.after_text(self.quote)}"
        if json_type == "array" and isinstance(schema.get("items"), Mapping):
            item = rules.add("item", self._value(rules, tool, schema["items"]))
            return f'"[" ({item} ("," {item})*)? "]"'
        inner = schema.get("properties") if json_type == "object" else None
        if isinstance(inner, Mapping):
            return self._object(rules, tool, inner, schema.get("required", ()))
        return rules.value(schema, tool.parameters)


class _Scanner:
    """Reads values from a place on; what is cut is left out."""

    def __init__(self, text: str, at: int, mark: str) -> None:
        self._text, self._at, self._mark = text, at, mark

    def pairs(self, depth: int) -> dict[str, Any]:
        values = {}
        while self._text[self._at : self._at + 1] not in ("", "}"):
            key = self._string() if self._is_string() else self._until(":")
            self._skip(":")
            at = self._at
            value = self._value(depth)
            if self._at == len(self._text) and at == self._at:
                break  # cut before the value
            if key is not None and value is not _CUT:
                values[key.strip()] = value
            self._skip(",")
        self._skip("}")
        return values

    def _value(self, depth: int) -> Any:
        if self._is_string():
            found = self._string()
            return _CUT if found is None else found
        opening = self._text[self._at : self._at + 1]
        if opening == "{" and depth < _DEEPEST:
            self._skip("{")
            return self.pairs(depth + 1)
        if opening == "[" and depth < _DEEPEST:
            self._skip("[")
            return self._items(depth + 1)
        text = self._until(",}]")
        return _CUT if self._at == len(self._text) else value_of(text.strip(), None)

    def _items(self, depth: int) -> list[Any]:
        values = []
        while self._text[self._at : self._at + 1] not in ("", "]"):
            value = self._value(depth)
            if value is not _CUT:
                values.append(value)
            if not self._skip(",") and self._text[self._at : self._at + 1] != "]":
                break
        self._skip("]")
        return values

    def _is_string(self) -> bool:
        self._skip("")
        return self._text.startswith((self._mark, '"'), self._at)

    def _string(self) -> str | None:
        """A string between marks, or one of JSON; None where it is cut."""
        mark = self._mark if self._text.startswith(self._mark, self._at) else '"'
        begin = self._at + len(mark)
        if mark == '"':
            end = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL).match(self._text, begin)
            stop = end.end() if end else len(self._text)
            quoted = self._text[self._at : stop]
            self._at = stop
            return str(loads_loosely(quoted)) if end else None
        end_at = self._text.find(mark, begin)
        self._at = len(self._text) if end_at < 0 else end_at + len(mark)
        return None if end_at < 0 else self._text[begin:end_at]

    def _until(self, stops: str) -> str:
        begin = self._at
        while self._at < len(self._text) and self._text[self._at] not in stops:
            self._at += 1
        return self._text[begin : self._at]

    def _skip(self, char: str) -> bool:
        """Past white space and the character, if it comes."""
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        is_there = bool(char) and self._text.startswith(char, self._at)
        self._at += is_there
        return is_there


_CUT = object()
FUNCTION_GEMMA = GemmaForm(
    begin="<start_function_call>",
    end="<end_function_call>",
    quote="<escape>",
    ignored=("<start_function_response>",),
)
GEMMA_4 = GemmaForm(
    begin="<|tool_call>",
    end="<tool_call|>",
    quote='<|"|>',
    ignored=("<|tool_response>",),
)
