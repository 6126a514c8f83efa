"""Calls in Python's syntax: [name(key=value), ...], bare or between marks."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hunch.chat.lark import Rules, quote
from hunch.chat.pieces import Marks, Piece, Reader
from hunch.chat.tools import MarkedReader, Tool, properties_of, required_of

PY_STRING = r"""PY_STRING: /"([^"\\\n]|\\.)*"|'([^'\\\n]|\\.)*'/"""
_WORDS = {"true": True, "false": False, "null": None}  # JSON's, which many models mix in
_MAY_BE_LIST = re.compile(r"\s*(\[\s*([A-Za-z_][\w.-]*\s*(\(|$)|$)|$)")


class PythonicReader(MarkedReader):
    """Holds calls until they are whole. Without a mark they are the whole answer."""

    def __init__(self, form: PythonicForm, specials: Iterable[str]) -> None:
        super().__init__(form.begin, {*specials, *form.end})
        self._start: str | None = "" if form.is_bare else None  # None: it is no bare list
        self._ends = Marks(form.end)
        self._mark = ""

    def feed(self, text: str) -> list[Piece]:
        if self._start is None:
            return super().feed(text)
        self._start += text
        if _MAY_BE_LIST.match(self._start):
            return []
        text, self._start = self._start, None
        return super().feed(text)

    def finish(self) -> list[Piece]:
        start, self._start = self._start or "", None
        pieces = [*super().feed(start), *super().finish()]
        calls = self._calls("".join(piece.text for piece in pieces)) if start else []
        return calls or pieces

    def _enter(self, mark: str) -> None:
        self._mark = mark

    def _read(self, text: str) -> tuple[list[Piece], str]:
        body, mark, rest = self._ends.split(text)
        if mark is None:
            return [], text
        self._is_inside = False
        return self._calls(body) or [Piece("text", self._mark + body + mark)], rest

    def _leave(self, held: str) -> list[Piece]:
        return self._calls(held) or [Piece("text", self._mark + held)]

    def _calls(self, text: str) -> list[Piece]:
        pieces = []
        for name, arguments in _parsed(text):
            number, self._num_calls = self._num_calls, self._num_calls + 1
            pieces.append(Piece("name", name, number))
            spelled = json.dumps(arguments, ensure_ascii=False)
            pieces.append(Piece("arguments", spelled, number))
        return pieces


def _parsed(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Calls in a list or on lines of their own; none where it is anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a string's escapes
            body = ast.parse(text.strip()).body
        calls: list[ast.expr] = []
        for line in body:
            value = line.value if isinstance(line, ast.Expr) else None
            calls += value.elts if isinstance(value, ast.List) else [value] if value else []
            if value is None:
                return []
        return [_call(call) for call in calls]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []  # it is no list of calls, or not a whole one


def _call(call: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(call, ast.Call):
        raise ValueError("no call")
    values = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    return ast.unparse(call.func), values


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [ast.literal_eval(key) if key else None for key in node.keys]
        return dict(zip(keys, map(_value, node.values), strict=True))
    value = ast.literal_eval(node)
    json.dumps(value)  # bytes and sets are no JSON
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonicForm:
    begin: tuple[str, ...] = ()  # marks around the calls; the first is the one to write
    end: tuple[str, ...] = ()
    is_bare: bool = True  # no marks are needed, and none are written
    layout: tuple[str, str, str] = ("[", ", ", "]")

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.begin, *self.end)

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        return PythonicReader(self, specials)

    def spell(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls of a history as text."""
        opening, between, closing = self.layout
        spelled = []
        for name, values in calls:
            pairs = values.items() if isinstance(values, Mapping) else ()
            spelled.append(f"{name}({', '.join(f'{key}={value!r}' for key, value in pairs)})")
        begin, end = ("", "") if self.is_bare else (self.begin[0], self.end[0])
        return begin + opening + between.join(spelled) + closing + end

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        rules.lines.append(PY_STRING)
        opening, between, closing = self.layout
        heads, rests = [], []
        for number, tool in enumerate(tools):
            pairs = {
                key: f"{quote(key + '=')} {_python(rules, schema, tool)}"
                for key, schema in properties_of(tool).items()
            }
            inner = rules.keys(pairs, required_of(tool), ", ")
            heads.append((f"head_{number}", quote(tool.name + "(")))
            rests.append(rules.add("rest", f"{inner} {quote(')')}"))
        calls = [f"{name} {rest}" for (_, name), rest in zip(heads, rests, strict=True)]
        call = rules.add("call", " | ".join(calls))
        more = f"({quote(between)} {call})* {quote(closing)}" if many else quote(closing)
        if not self.is_bare:
            whole = f"{quote(opening)} {call} {more} {rules.mark(self.end[0])}"
            return rules.sections(self.begin[0], whole, must_call, many=False)
        if must_call:
            return f"{quote(opening)} {call} {more}"
        rules.lines += [f"{head}[lazy]: {quote(opening)} {name}" for head, name in heads]
        first = [f"{head} {rest}" for (head, _), rest in zip(heads, rests, strict=True)]
        return f"TEXT | ({' | '.join(first)}) {more}"


def _python(rules: Rules, schema: Any, tool: Tool) -> str:
    json_type = schema.get("type") if isinstance(schema, Mapping) else None
    if json_type == "string":
        spellings = [(repr(str(one)), json.dumps(str(one))) for one in schema.get("enum", ())]
        known = " | ".join(quote(spelling) for pair in spellings for spelling in pair)
        return f"({known})" if known else "PY_STRING"
    if json_type == "boolean":
        return '("True" | "False")'
    return rules.value(schema, tool.parameters)
