"""MiniMax M3: every argument is an element, and so is all that is within it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hunch.chat.bodies import BodyForm
from hunch.chat.keyed import is_text_schema, text_value, value_of
from hunch.chat.lark import DEFINITIONS, Rules
from hunch.chat.tools import Tool

SIGN = "]<]minimax[>["  # stands before every mark
ITEM = "item"
_TAG = re.compile(re.escape(SIGN) + r"<(/?)([^>]*)>")
_NAME = re.compile(r'\s*"?([^">]+?)"?\s*>')


@dataclass(slots=True)
class Element:
    """What stands between two marks: text, or elements."""

    name: str
    text: str = ""
    parts: list[Element] = field(default_factory=list)


SECTION = f"{SIGN}<tool_call>", f"{SIGN}</tool_call>"


class NestedForm(BodyForm):
    """An object's values are elements by their keys, a list's are each an `item`."""

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end, *SECTION)

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, dict[str, Any]] | None:
        found = _NAME.match(text)
        if found is None:
            return None
        tool = next((tool for tool in tools if tool.name == found.group(1)), Tool(""))
        values = {
            part.name: _value(part, _of(tool.parameters, "properties", part.name), tool.parameters)
            for part in _elements(text[found.end() :])
        }
        return found.group(1), values

    def spell(self, calls: Sequence[tuple[str, Any]]) -> str:
        spelled = [f'{self.begin}"{name}">{_spelled(values)}{self.end}\n' for name, values in calls]
        return f"{SECTION[0]}\n{''.join(spelled)}{SECTION[1]}"

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        options = [
            f"{rules.mark(tool.name + chr(34) + '>')} {_fields(rules, tool.parameters, tool)}"
            for tool in tools
        ]
        begin, end = rules.mark(self.begin + chr(34)), rules.mark(self.end + "\n")
        one = rules.add("call", f"{begin} ({' | '.join(options)}) {end}")
        calls = f"{rules.mark(chr(10))} {one}{'+' if many else ''} {rules.mark(SECTION[1])}"
        return rules.sections(SECTION[0], calls, must_call, many=False)


MINIMAX_M3 = NestedForm(section=SECTION, begin=f"{SIGN}<invoke name=", end=f"{SIGN}</invoke>")


def _elements(text: str) -> list[Element]:
    """The whole elements of a text; one that is cut is left out, with all that it holds."""
    top = Element("")
    open_ones, place = [top], 0
    for tag in _TAG.finditer(text):
        open_ones[-1].text += text[place : tag.start()]
        place = tag.end()
        if not tag.group(1):
            open_ones.append(Element(tag.group(2)))
        elif open_ones[-1].name == tag.group(2) and len(open_ones) > 1:
            done = open_ones.pop()
            open_ones[-1].parts.append(done)
        else:
            break
    return top.parts


def _of(schema: Any, *keys: str) -> Any:
    for key in keys:
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _known(schema: Any, whole: Any) -> Mapping[str, Any]:
    """The schema itself: a reference is followed once, and of alternatives the first is taken."""
    for place in DEFINITIONS:
        reference = str(_of(schema, "$ref") or "")
        if reference.startswith(f"#/{place}/"):
            schema = _of(whole, place, reference.removeprefix(f"#/{place}/"))
    for word in ("anyOf", "oneOf"):
        others = [one for one in _of(schema, word) or () if _of(one, "type") != "null"]
        schema = others[0] if others else schema
    return schema if isinstance(schema, Mapping) else {}


def _value(element: Element, schema: Any, whole: Any) -> Any:
    known = _known(schema, whole)
    json_type = known.get("type")
    is_list = json_type == "array" or (
        json_type is None and bool(element.parts) and {p.name for p in element.parts} == {ITEM}
    )
    if is_list and (element.parts or not element.text.strip()):
        return [_value(part, known.get("items"), whole) for part in element.parts]
    if element.parts or (json_type == "object" and not element.text.strip()):
        fields = known.get("properties")
        return {part.name: _value(part, _of(fields, part.name), whole) for part in element.parts}
    return value_of(element.text, json_type if isinstance(json_type, str) else None)


def _spelled(value: Any) -> str:
    if isinstance(value, Mapping):
        pairs = [(key, part) for key, part in value.items() if part is not None]
        return "".join(f"{SIGN}<{key}>{_spelled(part)}{SIGN}</{key}>" for key, part in pairs)
    if isinstance(value, list):
        return "".join(f"{SIGN}<{ITEM}>{_spelled(part)}{SIGN}</{ITEM}>" for part in value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _fields(rules: Rules, schema: Any, tool: Tool) -> str:
    """The elements of an object, in any order."""
    pairs = {
        key: _element(rules, key, part, tool)
        for key, part in (_of(schema, "properties") or {}).items()
    }
    return rules.keys(pairs, [key for key in _of(schema, "required") or () if key in pairs])


def _element(rules: Rules, key: str, schema: Any, tool: Tool) -> str:
    begin, end = rules.mark(f"{SIGN}<{key}>"), f"{SIGN}</{key}>"
    if is_text_schema(schema):
        return f"{begin} {text_value(rules, schema, end)}"
    if _of(schema, "type") == "object" and _of(schema, "properties"):
        return f"{begin} {_fields(rules, schema, tool)} {rules.mark(end)}"
    if _of(schema, "type") == "array" and isinstance(_of(schema, "items"), Mapping):
        one = rules.add("item", _element(rules, ITEM, schema["items"], tool))
        return f"{begin} {one}* {rules.mark(end)}"
    return f"{begin} {rules.value(schema, tool.parameters)} {rules.mark(end)}"
