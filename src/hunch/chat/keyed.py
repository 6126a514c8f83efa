"""Families that write arguments key by key between marks, in the manner of XML."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hunch.chat.bodies import BodyForm
from hunch.chat.lark import Rules, quote
from hunch.chat.tools import Tool, properties_of, required_of, schema_types


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What stands between the parts of a call, as the family was trained to write it."""

    name: str = ""  # before the function's name
    after_name: str = ""
    key: str = ""
    after_key: str = ""
    after_text_key: str = ""  # the same before a string, where that differs
    after_value: str = ""
    last: str = ""  # before the mark that ends the call
    between: str = ""  # two calls
    opening: str = ""  # within the marks around all calls
    closing: str = ""

    def before_value(self, is_text: bool) -> str:
        """What stands between a key and its value."""
        return (self.after_text_key if is_text else "") or self.after_key


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyedForm(BodyForm):
    """`name` and `pair` find a call's parts in the text after `begin`.

    A pair has groups `key` and `value`, and `type` where its marks say what the value is.
    """

    name: re.Pattern[str]
    pair: re.Pattern[str]
    layout: Layout

    @property
    def marks(self) -> tuple[str, ...]:
        layout = self.layout
        written = (layout.name, layout.after_name, layout.key, layout.after_key, layout.after_value)
        return (self.begin, self.end, *written, layout.last, *(self.section or ()), *self.ignored)

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, dict[str, Any]] | None:
        found = self.name.match(text)
        if found is None:
            return None
        name = found.group(1).strip()
        types = schema_types(tools, name)
        values = {}
        for pair in self.pair.finditer(text, found.end()):
            parts = pair.groupdict()
            key = parts["key"].strip()
            json_type = parts.get("type")
            if json_type is not None:
                json_type = "string" if json_type in ("true", "string") else "other"
            values[key] = value_of(parts["value"], json_type or types.get(key))
        return name, values

    def spell(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls of a history as text."""
        layout, parts = self.layout, []
        for name, values in calls:
            text = self.begin + layout.name + name + layout.after_name
            for key, value in values.items() if isinstance(values, Mapping) else ():
                text += self._spell_pair(key, value)
            parts.append(text + layout.last + self.end)
        begin, end = self.section or ("", "")
        return begin + layout.opening + layout.between.join(parts) + layout.closing + end

    def _spell_pair(self, key: str, value: Any) -> str:
        layout, is_text = self.layout, isinstance(value, str)
        shown = value if is_text else json.dumps(value, ensure_ascii=False)
        return layout.key + key + layout.before_value(is_text) + shown + layout.after_value

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        layout = self.layout
        options = [
            f"{rules.mark(t.name + layout.after_name)} {self._pairs(rules, t)}" for t in tools
        ]
        body = f"{rules.mark(layout.name)} ({' | '.join(options)}) {rules.mark(layout.last)}"
        call = f"{body} {rules.mark(self.end)}"
        if self.section is None:
            return rules.sections(self.begin, call, must_call, many, rules.mark(layout.between))
        one = rules.add("call", f"{rules.mark(self.begin)} {call}")
        calls = rules.series(one, rules.mark(layout.between), many)
        # Two literals: one may not begin as what stands between calls does.
        closing = f"{rules.mark(layout.closing)} {rules.mark(self.section[1])}"
        whole = f"{rules.mark(layout.opening)} {calls} {closing}"
        return rules.sections(self.section[0], whole, must_call, many=False)

    def _pairs(self, rules: Rules, tool: Tool) -> str:
        pairs = {
            key: self._pair(rules, key, schema, tool) for key, schema in properties_of(tool).items()
        }
        return rules.keys(pairs, required_of(tool))

    def _pair(self, rules: Rules, key: str, schema: Any, tool: Tool) -> str:
        layout, is_text = self.layout, is_text_schema(schema)
        before = rules.mark(layout.key + key + layout.before_value(is_text))
        if is_text:
            return f"{before} {text_value(rules, schema, layout.after_value)}"
        return f"{before} {rules.value(schema, tool.parameters)} {rules.mark(layout.after_value)}"


def is_text_schema(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def text_value(rules: Rules, schema: Mapping[str, Any], end: str) -> str:
    """A string as it is, one of those that the schema names if it names some, and what ends it."""
    choices = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())]
    known = " | ".join(quote(str(choice)) for choice in choices)
    return f"({known}) {rules.mark(end)}" if known else rules.after_text(end)


def value_of(text: str, json_type: str | None) -> Any:
    """What a value's text means: by the schema's type, else as JSON where it is some."""
    escaped = re.fullmatch(r"\s*<!\[CDATA\[(.*)\]\]>\s*", text, re.DOTALL)
    if escaped:
        return escaped.group(1)
    if json_type == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text, re.DOTALL)


QWEN_CODER = KeyedForm(
    begin="<tool_call>",
    end="</tool_call>",
    bare=("<function=", "</function>"),
    name=_pattern(r"\s*<function=([^>\n]+)>"),
    pair=_pattern(r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"),
    layout=Layout(
        name="\n<function=",
        after_name=">\n",
        key="<parameter=",
        after_key=">\n",
        after_value="\n</parameter>\n",
        last="</function>\n",
        between="\n",
    ),
)
SEED_OSS = replace(
    QWEN_CODER,
    begin="<seed:tool_call>",
    end="</seed:tool_call>",
    bare=None,
    pair=_pattern(r"<parameter=(?P<key>[^>\n]+)>(?P<value>.*?)</parameter>"),
    layout=replace(QWEN_CODER.layout, after_key=">", after_value="</parameter>\n"),
)


def _glm(gap: str) -> KeyedForm:
    """GLM-4.5 has a new line between the parts, 4.7 has none; both are read alike."""
    return KeyedForm(
        begin="<tool_call>",
        end="</tool_call>",
        name=_pattern(r"\s*([^\s<{]+)\s*(?=<arg_key>|</tool_call>)"),
        pair=_pattern(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
        layout=Layout(
            after_name=gap,
            key="<arg_key>",
            after_key=f"</arg_key>{gap}<arg_value>",
            after_value=f"</arg_value>{gap}",
            between=gap,
        ),
    )


def _invoke(mark: str, *, tag: str = "", is_typed: bool = False) -> KeyedForm:
    """<invoke name="..."><parameter name="...">, as MiniMax M2 and DeepSeek V3.2 write it."""
    after_keys = ('" string="false">', '" string="true">') if is_typed else ('">', "")
    attribute = ' string="(?P<type>true|false)"' if is_typed else ""
    return KeyedForm(
        section=(f"<{tag}{mark}>", f"</{tag}{mark}>"),
        begin=f'<{tag}invoke name="',
        end=f"</{tag}invoke>",
        name=_pattern(r'([^"]+)"\s*>'),
        pair=_pattern(
            rf'<{tag}parameter name="(?P<key>[^"]+)"{attribute}>'
            rf"(?P<value>.*?)</{tag}parameter>"
        ),
        layout=Layout(
            opening="\n",
            after_name='">\n',
            key=f'<{tag}parameter name="',
            after_key=after_keys[0],
            after_text_key=after_keys[1],
            after_value=f"</{tag}parameter>\n",
            between="\n",
            closing="\n",
        ),
    )


GLM_45, GLM_47 = _glm("\n"), _glm("")
MINIMAX_M2 = _invoke("minimax:tool_call")
DEEPSEEK_V32 = _invoke("function_calls", tag="｜DSML｜", is_typed=True)
DEEPSEEK_V4 = _invoke("tool_calls", tag="｜DSML｜", is_typed=True)
DEEPSEEK_V41 = _invoke("calls", tag="｜DSML｜ ", is_typed=True)
DOTS = _invoke("dots_function_call")
STEP_3 = KeyedForm(
    section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    begin="<｜tool_call_begin｜>",
    end="<｜tool_call_end｜>",
    name=_pattern(r'.*?<steptml:invoke name="([^"]+)">'),
    pair=_pattern(r'<steptml:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</steptml:parameter>'),
    layout=Layout(
        name='function<｜tool_sep｜><steptml:invoke name="',
        after_name='">',
        key='<steptml:parameter name="',
        after_key='">',
        after_value="</steptml:parameter>",
        last="</steptml:invoke>",
    ),
)
MINICPM_5 = KeyedForm(
    begin='<function name="',
    end="</function>",
    name=_pattern(r'([^"\n]+)">'),
    pair=_pattern(r'<param name="(?P<key>[^"]+)">(?P<value>.*?)</param>'),
    layout=Layout(
        after_name='">',
        key='<param name="',
        after_key='">',
        after_value="</param>",
        between="\n",
    ),
)


def _hunyuan(suffix: str) -> KeyedForm:
    marks = "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value"
    calls, call, sep, key, value = (f"{mark}{suffix}>" for mark in marks)
    return KeyedForm(
        section=(f"<{calls}", f"</{calls}"),
        begin=f"<{call}",
        end=f"</{call}",
        name=_pattern(rf"\s*([^\s<]+)\s*<{sep}"),
        pair=_pattern(rf"<{key}(?P<key>.*?)</{key}\s*<{value}(?P<value>.*?)</{value}"),
        layout=Layout(
            opening="\n",
            after_name=f"<{sep}\n",
            key=f"<{key}",
            after_key=f"</{key}\n<{value}",
            after_value=f"</{value}\n",
            between="\n",
            closing="\n",
        ),
    )


HUNYUAN_3 = _hunyuan(":opensource")
