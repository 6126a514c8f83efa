"""Families that write a function's name, and then its arguments as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hunch.chat.lark import Rules, quote
from hunch.chat.pieces import Piece, Reader
from hunch.chat.tools import NamedReader, ObjectForm, ObjectReader, Tool


class MistralReader(ObjectReader):
    """[TOOL_CALLS] and a list of objects or, since v11, a name and its arguments."""

    def __init__(self, specials: Iterable[str]) -> None:
        specials = {*specials, "[ARGS]", "[CALL_ID]"}
        super().__init__(("[TOOL_CALLS]",), (), specials)
        self._by_name = NamedReader(("[TOOL_CALLS]",), (), (), self._name)
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

    @staticmethod
    def _name(text: str) -> str:
        return re.split(r"\[|<", text)[0].strip()


class MistralForm(ObjectForm):
    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        return MistralReader(specials)


class MistralNamedForm(MistralForm):
    """[TOOL_CALLS]NAME[ARGS]{...} for each call, of models since 2025."""

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        call_id, begin = map(rules.mark, ("[CALL_ID]", "[ARGS]"))
        rules.lines.append("CALL_ID: /[A-Za-z0-9]{9}/")
        options = [
            f"{quote(tool.name)} ({call_id} CALL_ID)? {begin} {rules.arguments(tool.parameters)}"
            for tool in tools
        ]
        return rules.sections(self.begin[0], f"({' | '.join(options)})", must_call, many)


@dataclass(frozen=True, kw_only=True, slots=True)
class SectionForm:
    """Calls between marks, each with its name, a mark and its arguments."""

    # Around all calls, before and after each, and before the arguments.
    marks: tuple[str, str, str, str, str]
    between: str = ""  # two calls

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        calls, call, _, end, last = self.marks
        return NamedReader((call,), (end,), {*specials, calls, last}, self._name)

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        _, call, middle, end, last = map(rules.mark, self.marks)
        options = [
            self._option(rules, tool.name, middle, rules.arguments(tool.parameters))
            for tool in tools
        ]
        one = rules.add("call", f"{call} ({' | '.join(options)}) {end}")
        calls = f"{rules.series(one, self.between, many)} {last}"
        return rules.sections(self.marks[0], calls, must_call, many=False)

    def _name(self, text: str) -> str:
        """The function's, in what stands before its arguments."""
        raise NotImplementedError

    def _option(self, rules: Rules, name: str, middle: str, arguments: str) -> str:
        """Lark for one function, between the marks of a call."""
        raise NotImplementedError


class DeepSeekForm(SectionForm):
    """NAME and a mark, as since V3.1."""

    def _name(self, text: str) -> str:
        before, _, after = text.partition(self.marks[2])
        fenced = after.partition("\n")[0].strip()  # function<sep>NAME, or NAME<sep>
        return fenced or before.strip()

    def _option(self, rules: Rules, name: str, middle: str, arguments: str) -> str:
        return f"{quote(name)} {middle} {arguments}"


class DeepSeekFencedForm(DeepSeekForm):
    """DeepSeek V3 and R1 write arguments in a fence."""

    def _option(self, rules: Rules, name: str, middle: str, arguments: str) -> str:
        head, fence = quote(f"{name}\n```json\n"), quote("\n```")
        return f"{quote('function')} {middle} {head} {arguments} {fence}"


class KimiForm(SectionForm):
    """Kimi K2 numbers its calls: functions.NAME:0."""

    def _name(self, text: str) -> str:
        name = text.partition(self.marks[2])[0].strip()
        return re.sub(r":\d+$", "", name.removeprefix("functions."))

    def _option(self, rules: Rules, name: str, middle: str, arguments: str) -> str:
        return f"{quote(f'functions.{name}:')} /[0-9]{{1,4}}/ {middle} {arguments}"


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)  # fmt: skip
DEEPSEEK_V3 = DeepSeekFencedForm(marks=_DEEPSEEK, between=quote("\n"))
DEEPSEEK_V31 = DeepSeekForm(marks=_DEEPSEEK)
KIMI_K2 = KimiForm(
    marks=(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
    )
)


@dataclass(frozen=True, slots=True)
class FunctionaryForm:
    """<function=NAME>{...}</function>, as Llama 3.1 was also taught to write."""

    marks: tuple[str, ...] = ("<function=", "</function>")

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        begin, end = self.marks
        return NamedReader((begin,), (end,), specials, lambda text: text.partition(">")[0].strip())

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        begin, end = self.marks
        options = [f"{quote(t.name + '>')} {rules.arguments(t.parameters)}" for t in tools]
        body = f"({' | '.join(options)}) {quote(end)}"
        return rules.sections(begin, body, must_call, many)
