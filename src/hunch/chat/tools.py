"""How families write tool calls: marks around JSON, for the most part. Names are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hunch.chat.lark import Rules, quote
from hunch.chat.pieces import CallObject, JsonSpan, Marks, Piece, Reader
from hunch.errors import RequestError


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] | bool = field(default_factory=dict)

    @staticmethod
    def read(given: Mapping[str, Any]) -> Tool:
        """From OpenAI's form, {"type": "function", "function": {...}}."""
        function = given.get("function")
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError('a tool must be {"type": "function", "function": {"name": ...}}')
        return Tool(function["name"], function.get("parameters") or {})


class ToolForm(Protocol):
    """One family's way."""

    @property
    def marks(self) -> tuple[str, ...]:
        """That must not be dropped where they are special tokens."""

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        """For one answer; `specials` are names of tokens that are not text."""

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        """The Lark expression of an answer that may, or must, call these tools."""


class MarkedReader:
    """Text up to a mark; what follows it is for the subclass, which says where it ends.

    Without marks that begin something all is text, but for special tokens' names.
    """

    def __init__(self, begin: Sequence[str], specials: Iterable[str]) -> None:
        self._begin = frozenset(begin)
        self._marks = Marks({*begin, *specials})
        self._held = ""
        self._is_inside = False
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while True:
            if self._is_inside:
                more, self._held = self._read(self._held)
                pieces += more
                if self._is_inside:
                    return pieces
                continue
            safe, mark, self._held = self._marks.split(self._held)
            if safe:
                pieces.append(Piece("text", safe))
            if mark is None:
                return pieces
            if mark in self._begin:
                self._is_inside = True
                self._enter(mark)

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._is_inside:
            return self._leave(held)
        return [Piece("text", held)] if held else []

    def _enter(self, mark: str) -> None:
        raise NotImplementedError

    def _read(self, text: str) -> tuple[list[Piece], str]:
        """Pieces and the text that is left; sets `_is_inside` to False after the section's end."""
        raise NotImplementedError

    def _leave(self, held: str) -> list[Piece]:
        raise NotImplementedError


class ObjectReader(MarkedReader):
    """Marks, then call objects, bare or in a list, until `end` or something else comes."""

    def __init__(
        self,
        begin: Sequence[str],
        end: Sequence[str],
        specials: Iterable[str] = (),
        new_object: Callable[[int], CallObject] = CallObject,
    ) -> None:
        super().__init__(begin, specials)
        self._end, self._new_object = tuple(end), new_object
        self._object: CallObject | None = None
        self._num_read = 0  # calls since the mark
        self._mark = ""

    def _enter(self, mark: str) -> None:
        self._num_read, self._mark = 0, mark

    def _read(self, text: str) -> tuple[list[Piece], str]:
        pieces: list[Piece] = []
        while text:
            if self._object is not None:
                more, used = self._object.feed(text)
                pieces, text = [*pieces, *more], text[used:]
                if self._object.is_over:
                    self._num_calls += bool(self._object.name)
                    self._object, self._num_read = None, self._num_read + 1
                continue
            text = text.lstrip("[],; \n\t" if self._num_read or self._end else "[ \n\t")
            if text.startswith("{"):
                self._object = self._new_object(self._num_calls)
            elif any(text.startswith(end) for end in self._end):
                end = next(end for end in self._end if text.startswith(end))
                self._is_inside = False
                return pieces, text[len(end) :]
            elif text and not any(end.startswith(text) for end in self._end):
                self._is_inside = False  # neither a call nor the end: it is text
                if not self._num_read:
                    pieces.append(Piece("text", self._mark))
                return pieces, text
            else:
                break
        return pieces, text

    def _leave(self, held: str) -> list[Piece]:
        if self._object is not None:
            return self._object.finish()
        return [] if self._num_read else [Piece("text", self._mark + held)]


HEAD = '{"name": "'


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectForm:
    """{"name": ..., "arguments": ...} after a mark."""

    begin: tuple[str, ...]  # any of them begins calls; the first is the one to write
    end: tuple[str, ...] = ()
    opening: str = ""  # Lark, after the mark; each with what the family was trained on
    between: str = ""
    closing: str = ""
    head: str = quote(HEAD)  # Lark, a call up to its function's name
    arguments: str = "arguments"
    is_repeated: bool = False  # every call has marks of its own

    @property
    def marks(self) -> tuple[str, ...]:
        return (*self.begin, *self.end)

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        return ObjectReader(self.begin, self.end, specials)

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        call = self.call(rules, tools)
        closing = f"{self.closing} {rules.mark(self.end[0]) if self.end else ''}"
        if self.is_repeated:
            calls = f"{self.opening} {call} {closing}"
            return rules.sections(self.begin[0], calls, must_call, many, self.between)
        calls = f"{self.opening} {rules.series(call, self.between, many)} {closing}"
        return rules.sections(self.begin[0], calls, must_call, many=False)

    def call(self, rules: Rules, tools: Sequence[Tool]) -> str:
        """Lark for one call."""
        return f"{self.head} {call_rest(rules, tools, self.arguments)}"


def call_rest(rules: Rules, tools: Sequence[Tool], key: str) -> str:
    """The rule of a call object after its HEAD."""
    middle, end = quote(f'", "{key}": '), quote("}")
    options = [f"{quote(tool.name)} {middle} {rules.arguments(tool.parameters)}" for tool in tools]
    return rules.add("rest", f"({' | '.join(options)}) {end}")


class BareReader(ObjectReader):
    """Call objects that the whole answer consists of; an answer that begins otherwise is text."""

    def __init__(self, begin: Sequence[str], specials: Iterable[str] = ()) -> None:
        super().__init__(begin, (), specials)
        self._start: str | None = ""  # what came so far; None once it is known what it is

    def feed(self, text: str) -> list[Piece]:
        if self._start is None:
            return super().feed(text)
        self._start += text
        stripped = self._start.lstrip()
        if not stripped or "```json".startswith(stripped):
            return []
        text, self._start = self._start, None
        inner = stripped.removeprefix("```json").lstrip()
        if stripped.startswith("```json") and not inner:
            self._start = text
            return []
        if inner.startswith(("{", "[")):
            self._is_inside, text = True, inner
            self._mark = ""
        return super().feed(text)

    def finish(self) -> list[Piece]:
        held = self._start or ""
        self._start = None
        return [*([Piece("text", held)] if held else []), *super().finish()]


@dataclass(frozen=True, kw_only=True, slots=True)
class BareForm:
    """The answer is the call: Llama 3.x, and models that simply write JSON."""

    begin: tuple[str, ...] = ()  # a mark that may come before
    arguments: str = "arguments"
    is_list: bool = False  # or calls one after another

    @property
    def marks(self) -> tuple[str, ...]:
        return self.begin

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        return BareReader(self.begin, specials)

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        rest = call_rest(rules, tools, self.arguments)
        opening, between, closing = ("[", ", ", quote("]")) if self.is_list else ("", "; ", "")
        more = f"({quote(between + HEAD)} {rest})* {closing}" if many else closing
        if must_call:
            return f"{quote(opening + HEAD)} {rest} {more}"
        rules.lines.append(f"head[lazy]: {quote(opening + HEAD)}")
        return f"TEXT | head {rest} {more}"


class NamedReader(MarkedReader):
    """A mark, the function's name, its arguments as JSON, and perhaps a mark that ends it all."""

    def __init__(
        self,
        begin: Sequence[str],
        end: Sequence[str],
        specials: Iterable[str],
        name_of: Callable[[str], str],
    ) -> None:
        super().__init__(begin, {*specials, *end})
        self._ends = Marks(end) if end else None
        self._name_of = name_of
        self._span: JsonSpan | None = None

    def _enter(self, mark: str) -> None:
        self._span = None

    def _read(self, text: str) -> tuple[list[Piece], str]:
        if self._span is None:
            before, brace, _ = text.partition("{")  # the name is whole where arguments begin
            if not brace:
                return [], text
            self._span = JsonSpan()
            return self._read_on([Piece("name", self._name_of(before), self._num_calls)],
                                 text[len(before) :])  # fmt: skip
        return self._read_on([], text)

    def _read_on(self, pieces: list[Piece], text: str) -> tuple[list[Piece], str]:
        assert self._span is not None
        if not self._span.is_over:
            used = self._span.feed(text)
            if used:
                pieces.append(Piece("arguments", text[:used], self._num_calls))
            text = text[used:]
        if self._span.is_over:
            mark: str | None = ""
            if self._ends is not None:  # a fence may stand before the end
                _, mark, text = self._ends.split(text)
            if mark is not None:
                self._is_inside, self._num_calls = False, self._num_calls + 1
        return pieces, text

    def _leave(self, held: str) -> list[Piece]:
        if self._span is not None:
            return []
        return [Piece("text", held)] if held.strip() else []


def properties_of(tool: Tool) -> dict[str, Any]:
    """The schemas of a tool's parameters, by name."""
    known = tool.parameters.get("properties") if isinstance(tool.parameters, Mapping) else None
    return dict(known) if isinstance(known, Mapping) else {}


def required_of(tool: Tool) -> list[str]:
    """The parameters that every call must have."""
    known = tool.parameters.get("required") if isinstance(tool.parameters, Mapping) else None
    return [key for key in known if isinstance(key, str)] if isinstance(known, list) else []


def schema_types(tools: Sequence[Tool], name: str) -> dict[str, str]:
    """The types of a tool's parameters, where its schema says one."""
    tool = next((tool for tool in tools if tool.name == name), None)
    properties = {} if tool is None else properties_of(tool)
    types = {key: value.get("type") for key, value in properties.items() if isinstance(value, dict)}
    return {key: name for key, name in types.items() if isinstance(name, str)}
