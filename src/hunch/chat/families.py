"""The families whose calls are not objects after a mark, and the table of all."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hunch.chat.harmony import HarmonyForm
from hunch.chat.lark import Rules, quote
from hunch.chat.pieces import Marks, Piece, Reader
from hunch.chat.tools import (
    BareForm,
    NamedReader,
    ObjectForm,
    ObjectReader,
    PlainReader,
    Tool,
    ToolForm,
    schema_types,
)


class MistralReader(ObjectReader):
    """[TOOL_CALLS] and a list of objects or, since v11, a name and its arguments."""

    def __init__(self, specials: Iterable[str]) -> None:
        specials = {*specials, "[ARGS]", "[CALL_ID]"}
        super().__init__(("[TOOL_CALLS]",), (), specials)
        self._by_name = NamedReader(("[TOOL_CALLS]",), (), (), _mistral_name)
        self._is_named: bool | None = None

    def _enter(self, mark: str) -> None:
        super()._enter(mark)
        self._by_name._enter(mark)
        self._is_named = None

    def _read(self, text: str) -> tuple[list[Piece], str]:
        if self._is_named is None:
            text = text.lstrip()
            if not text:
                return [], text
            self._is_named = text[0] not in "[{"
        if not self._is_named:
            return super()._read(text)
        self._by_name._is_inside, self._by_name._num_calls = True, self._num_calls
        pieces, text = self._by_name._read(text)
        self._is_inside, self._num_calls = self._by_name._is_inside, self._by_name._num_calls
        return pieces, text

    def _leave(self, held: str) -> list[Piece]:
        return self._by_name._leave(held) if self._is_named else super()._leave(held)


def _mistral_name(text: str) -> str:
    return re.split(r"\[|<", text)[0].strip()


class MistralForm(ObjectForm):
    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        return MistralReader(specials)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSeekForm:
    """DeepSeek V3 and R1 write arguments in a fence, V3.1 and later without."""

    is_fenced: bool

    @property
    def marks(self) -> tuple[str, ...]:
        names = ("calls▁begin", "call▁begin", "sep", "call▁end", "calls▁end")
        return tuple(f"<｜tool▁{name}｜>" for name in names)

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        calls, call, _, end, last = self.marks
        return NamedReader((call,), (end,), {*specials, calls, last}, self._name)

    @staticmethod
    def _name(text: str) -> str:
        before, _, after = text.partition("<｜tool▁sep｜>")
        fenced = after.partition("\n")[0].strip()  # function<sep>NAME, or NAME<sep>
        return fenced or before.strip()

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        _, call, sep, end, last = map(rules.mark, self.marks)
        options = []
        for tool in tools:
            arguments = rules.arguments(tool.parameters)
            if self.is_fenced:
                name, fence = quote(f"{tool.name}\n```json\n"), quote("\n```")
                options.append(f"{quote('function')} {sep} {name} {arguments} {fence}")
            else:
                options.append(f"{quote(tool.name)} {sep} {arguments}")
        one = rules.add("call", f"{call} ({' | '.join(options)}) {end}")
        between = quote("\n") if self.is_fenced else ""
        more = f"({between} {one})*" if many else ""
        return rules.sections(self.marks[0], f"{one} {more} {last}", must_call, many=False)


class PythonicReader:
    """[name(key=value), ...]: a list of calls in Python's syntax, which is the whole answer."""

    def __init__(self, specials: Iterable[str]) -> None:
        self._plain = PlainReader(specials)
        self._text: str | None = ""  # None once it is known to be no list of calls

    def feed(self, text: str) -> list[Piece]:
        if self._text is None:
            return self._plain.feed(text)
        self._text += text
        if re.match(r"\s*(\[\s*([A-Za-z_][\w.]*\s*(\(|$)|$)|$)", self._text):
            return []
        text, self._text = self._text, None
        return self._plain.feed(text)

    def finish(self) -> list[Piece]:
        text, self._text = self._text or "", None
        pieces: list[Piece] = []
        for number, (name, arguments) in enumerate(_pythonic_calls(text)):
            pieces.append(Piece("name", name, number))
            pieces.append(Piece("arguments", json.dumps(arguments), number))
        if not pieces:
            pieces = self._plain.feed(text)
        return [*pieces, *self._plain.finish()]


def _pythonic_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        assert isinstance(tree, ast.List)
        return [
            (ast.unparse(call.func), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords})
            for call in tree.elts
            if isinstance(call, ast.Call)
        ]
    except (SyntaxError, ValueError, AssertionError, RecursionError, MemoryError):
        return []  # it is no list of calls, or not a whole one


@dataclass(frozen=True, slots=True)
class PythonicForm:
    marks: tuple[str, ...] = ()

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        return PythonicReader(specials)

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        rules.lines.append('PY_STRING: /"([^"\\\\\\n]|\\\\.)*"/')
        heads, rests = [], []
        for number, tool in enumerate(tools):
            known = _properties(tool).items()
            pairs = [f"{quote(key + '=')} {_python(rules, schema)}" for key, schema in known]
            pair = rules.add("pair", " | ".join(pairs)) if pairs else ""
            inner = f"({pair} ({quote(', ')} {pair})*)?" if pair else ""
            heads.append((f"head_{number}", quote(tool.name + "(")))
            rests.append(rules.add("rest", f"{inner} {quote(')')}"))
        calls = [f"{name} {rest}" for (_, name), rest in zip(heads, rests, strict=True)]
        call = rules.add("call", " | ".join(calls))
        more = f"({quote(', ')} {call})* {quote(']')}" if many else quote("]")
        if must_call:
            return f"{quote('[')} {call} {more}"
        rules.lines += [f"{head}[lazy]: {quote('[')} {name}" for head, name in heads]
        first = [f"{head} {rest}" for (head, _), rest in zip(heads, rests, strict=True)]
        return f"TEXT | ({' | '.join(first)}) {more}"


def _python(rules: Rules, schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string" and "enum" not in schema:
        return "PY_STRING"
    if kind == "boolean":
        return '("True" | "False")'
    return rules.value(schema)


def _properties(tool: Tool) -> dict[str, Any]:
    known = tool.parameters.get("properties") if isinstance(tool.parameters, Mapping) else None
    return dict(known) if isinstance(known, Mapping) else {}


class KeyedReader:
    """Calls whose arguments are key by key between marks: each is JSON once it is whole."""

    def __init__(self, form: KeyedForm, specials: Iterable[str], tools: Sequence[Tool]) -> None:
        self._form = form
        self._tools = {tool.name: tool for tool in tools}
        self._outer = Marks({form.begin, *form.ignored, *specials})
        self._held = ""
        self._is_inside = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while True:
            if self._is_inside:
                body, end, rest = self._held.partition(self._form.end)
                if not end:
                    return pieces
                pieces += self._call(body)
                self._held, self._is_inside = rest, False
            safe, mark, self._held = self._outer.split(self._held)
            if safe:
                pieces.append(Piece("text", safe))
            if mark is None:
                return pieces
            self._is_inside = mark == self._form.begin

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._is_inside:
            return self._call(held)
        return [Piece("text", held)] if held else []

    def _call(self, body: str) -> list[Piece]:
        found = self._form.name.match(body)
        if found is None:
            return [Piece("text", self._form.begin + body)]
        name = found.group(1).strip()
        types = schema_types(self._tools.get(name))
        values = {
            key.strip(): _value(value, types.get(key.strip()))
            for key, value in self._form.pair.findall(body[found.end() :])
        }
        number, self._num_calls = self._num_calls, self._num_calls + 1
        return [Piece("name", name, number), Piece("arguments", json.dumps(values), number)]


def _value(text: str, kind: str | None) -> Any:
    """What a value's text means: by the schema's type, else as JSON where it is some."""
    escaped = re.fullmatch(r"<escape>(.*)<escape>", text, re.DOTALL)
    if escaped:
        return escaped.group(1)
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


@dataclass(frozen=True, kw_only=True)
class KeyedForm:
    """Qwen3-Coder's XML, and FunctionGemma."""

    begin: str
    end: str
    name: re.Pattern[str]
    pair: re.Pattern[str]
    ignored: tuple[str, ...] = ()
    layout: tuple[str, str, str, str, str, str]  # before and after name, key and value

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.end, "<escape>", *self.ignored)

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        return KeyedReader(self, specials, tools)

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        before, after, key_before, key_after, value_after, last = self.layout
        escape = "<escape>" if "<escape>" in self.pair.pattern else ""
        until = rules.after_text(escape or value_after)
        options = []
        for tool in tools:
            pairs = []
            for key, schema in _properties(tool).items():
                is_text = isinstance(schema, Mapping) and schema.get("type") == "string"
                value = until if is_text else f"{rules.value(schema)} {quote(value_after)}"
                if escape:
                    value = f"{rules.mark(escape)} {until}" if is_text else rules.value(schema)
                pairs.append(f"{quote(key_before + key + key_after)} {value}")
            inner = f"({' | '.join(pairs)})*" if pairs else ""
            if pairs and escape:
                pair = rules.add("pair", " | ".join(pairs))
                inner = f"({pair} ({quote(value_after)} {pair})*)?"
            options.append(f"{quote(tool.name + after)} {inner}")
        body = f"{quote(before)} ({' | '.join(options)}) {quote(last)} {rules.mark(self.end)}"
        return rules.sections(self.begin, body, must_call, many, quote("\n") if before else "")


HERMES = ObjectForm(
    begin=("<tool_call>",),
    end=("</tool_call>",),
    opening=quote("\n"),
    closing=quote("\n"),
    is_repeated=True,
)
_LIST: dict[str, Any] = {"opening": '" "? "["', "between": quote(", "), "closing": quote("]")}
LLAMA = BareForm(begin=("<|python_tag|>",), arguments="parameters")
GRANITE = ObjectForm(begin=("<|tool_call|>", "<tool_call>"), **_LIST)
PHI = ObjectForm(begin=("functools", "<|tool_call|>"), **_LIST)
QWEN_CODER = KeyedForm(
    begin="<tool_call>",
    end="</tool_call>",
    name=re.compile(r"\s*<function=([^>\n]+)>"),
    pair=re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL),
    layout=("\n<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n"),
)
FUNCTION_GEMMA = KeyedForm(
    begin="<start_function_call>",
    end="<end_function_call>",
    name=re.compile(r"\s*call:([^{]+)\{"),
    pair=re.compile(r"([\w.-]+):(<escape>.*?<escape>|[^,}]*)", re.DOTALL),
    ignored=("<start_function_response>",),
    layout=("call:", "{", "", ":", ",", "}"),
)
TOOL_FORMS: dict[str, ToolForm] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "granite4": HERMES,
    "llama3_json": LLAMA,
    "llama4_json": LLAMA,
    "mistral": MistralForm(begin=("[TOOL_CALLS]",), **_LIST),
    "openai": HarmonyForm(),
    "deepseek_v3": DeepSeekForm(is_fenced=True),
    "deepseek_v31": DeepSeekForm(is_fenced=False),
    "pythonic": PythonicForm(),
    "llama4_pythonic": PythonicForm(),
    "gemma": PythonicForm(),
    "functiongemma": FUNCTION_GEMMA,
    "granite": GRANITE,
    "phi4_mini_json": PHI,
    "qwen3_coder": QWEN_CODER,
    "qwen3_xml": QWEN_CODER,
    "json": BareForm(),
}


def tools_of(template: str) -> str | None:
    """The name of the form that a chat template writes calls in; None where it knows no tools."""
    if "tools" not in template:
        return None
    if "<|channel|>" in template and "<|message|>" in template:
        return "openai"
    if "<｜tool▁calls▁begin｜>" in template:
        return "deepseek_v3" if "```json" in template else "deepseek_v31"
    if "<parameter=" in template:
        return "qwen3_coder"
    if "<start_function_call>" in template:
        return "functiongemma"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "functools" in template or "<|/tool_call|>" in template:
        return "phi4_mini_json"
    if "<|tool_call|>" in template:
        return "granite"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return "llama3_json"
    return "json"
