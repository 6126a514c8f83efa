"""Kimi K3: an answer in channels, each an element whose marks are tokens of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hunch.chat.keyed import KeyedForm, Layout, is_text_schema, text_value
from hunch.chat.lark import Rules
from hunch.chat.tools import Tool

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
RESPONSE = f"{OPEN}response{SEP}", f"{CLOSE}response{SEP}"
LAST = f"{CLOSE}message{SEP}"
THINK = f"{OPEN}think{SEP}", f"{CLOSE}think{SEP}"
_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object",
          list: "array", type(None): "null"}  # fmt: skip
_JSON_TYPES = {"string": "string", "number": "number", "boolean": "boolean", "object": "object",
          "array": "array", "null": "null", "integer": "number"}  # fmt: skip


class ChannelForm(KeyedForm):
    """Calls are numbered from 1, and every argument says its type."""

    def spell(self, calls: Sequence[tuple[str, Any]]) -> str:
        text = super().spell(calls)
        for number in range(1, len(calls) + 1):
            text = text.replace(_INDEX, f'" index="{number}"{SEP}', 1)
        return text

    def _spell_pair(self, key: str, value: Any) -> str:
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        layout = self.layout
        return f"{layout.key}{key}{_typed(_TYPES[type(value)])}{shown}{layout.after_value}"

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        """Calls stand after the channel of text, and the message ends with a mark."""
        assert self.section is not None
        rules.lines.append("INDEX: /[0-9]{1,4}/")
        index = f"{rules.mark(chr(34) + ' index=' + chr(34))} INDEX {rules.mark(chr(34) + SEP)}"
        options = [f"{rules.mark(tool.name)} {index} {self._pairs(rules, tool)}" for tool in tools]
        one = rules.add(
            "call", f"{rules.mark(self.begin)} ({' | '.join(options)}) {rules.mark(self.end)}"
        )
        calls = rules.add("calls", f"{one}{'*' if many else ''} {rules.mark(self.section[1])}")
        if many:
            calls = f"{one} {calls}"
        begin, last = rules.mark(self.section[0]), rules.mark(LAST)
        first, response = map(rules.mark, RESPONSE)
        if must_call:
            return f"(({first})? {response})? {begin} {calls} ({last})?"
        whole = f"{rules.after_text(RESPONSE[1])} ({begin} {calls})? ({last})?"
        cut = f"{rules.after_text(self.section[0])} {calls} ({last})?"
        return f"({first})? (TEXT | {whole} | {cut})"

    def _pair(self, rules: Rules, key: str, schema: Any, tool: Tool) -> str:
        layout = self.layout
        if is_text_schema(schema):
            text = text_value(rules, schema, layout.after_value)
            return f"{rules.mark(layout.key + key + _typed('string'))} {text}"
        value = f"{rules.value(schema, tool.parameters)} {rules.mark(layout.after_value)}"
        json_type = (
            _JSON_TYPES.get(str(schema.get("type"))) if isinstance(schema, Mapping) else None
        )
        if json_type is not None:
            return f"{rules.mark(layout.key + key + _typed(json_type))} {value}"
        others = [rules.mark(layout.key + key + _typed(one)) for one in list(_JSON_TYPES)[1:-1]]
        text = rules.mark(layout.key + key + _typed("string"))
        return f"({' | '.join(others)}) {value} | {text} {rules.after_text(layout.after_value)}"


def _typed(json_type: str) -> str:
    return f'" type="{json_type}"{SEP}'


_INDEX = f'" index="0"{SEP}'
KIMI_K3 = ChannelForm(
    section=(f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}"),
    begin=f'{OPEN}call tool="',
    end=f"{CLOSE}call{SEP}",
    ignored=(*RESPONSE, LAST),
    name=re.compile(r'([^"]+)"[^<]*<\|sep\|>'),
    pair=re.compile(
        r'<\|open\|>argument key="(?P<key>[^"]+)" type="(?P<type>\w+)"<\|sep\|>'
        r"(?P<value>.*?)<\|close\|>argument<\|sep\|>",
        re.DOTALL,
    ),
    layout=Layout(
        after_name=_INDEX,
        key=f'{OPEN}argument key="',
        after_value=f"{CLOSE}argument{SEP}",
    ),
)
