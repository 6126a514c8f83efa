"""Functionary v3.2: every part of an answer begins with its recipient, `all` or a function."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hunch.chat.lark import Rules, quote
from hunch.chat.pieces import JsonSpan, Marks, Piece, Reader
from hunch.chat.tools import Tool

SIGN = ">>>"
_HEAD = re.compile(r"([\w.-]+)\n\s*(?=\{)")
_BEGUN = re.compile(r"[\w.-]*(\n\s*)?")
_TO_ALL = re.compile(r"all\n")


class RecipientReader:
    """`is_open`: the prompt has written the first sign."""

    def __init__(self, specials: Iterable[str], *, is_open: bool) -> None:
        self._marks = Marks({SIGN, *specials})
        self._held = ""
        self._before = ""  # the sign, where it is the answer's
        self._place = "head" if is_open else "text"
        self._span = JsonSpan()
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while self._held:
            held = self._held
            if self._place == "text":
                safe, mark, self._held = self._marks.split(self._held)
                if safe:
                    pieces.append(Piece("text", safe))
                if mark == SIGN:
                    self._place, self._before = "head", SIGN
            elif self._place == "head":
                self._read_head(pieces)
            else:
                used = self._span.feed(self._held)
                pieces.append(Piece("arguments", self._held[:used], self._num_calls - 1))
                self._held = self._held[used:]
                self._place = "text" if self._span.is_over else "call"
            if self._held == held:
                break
        return pieces

    def _read_head(self, pieces: list[Piece]) -> None:
        if found := _TO_ALL.match(self._held):
            self._place = "text"
        elif found := _HEAD.match(self._held):
            self._place, self._span = "call", JsonSpan()
            pieces.append(Piece("name", found.group(1), self._num_calls))
            self._num_calls += 1
        elif not _BEGUN.fullmatch(self._held):  # it is text
            pieces.append(Piece("text", self._before + self._held[:1]))
            self._held, self._place = self._held[1:], "text"
            return
        self._held = self._held[found.end() if found else 0 :]

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._place == "head":
            held = self._before + held
        return [Piece("text", held)] if held and self._place != "call" else []


@dataclass(frozen=True, slots=True)
class RecipientForm:
    """>>>NAME and a line with the arguments as JSON; >>>all and a line of text."""

    is_open: bool = False
    marks: tuple[str, ...] = (SIGN,)

    def after(self, prompt_end: str) -> RecipientForm:
        """The form of an answer to a prompt that ends with `prompt_end`."""
        return RecipientForm(is_open=prompt_end.endswith(SIGN))

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        return RecipientReader(specials, is_open=self.is_open)

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        options = [
            f"{quote(tool.name + chr(10))} {rules.arguments(tool.parameters)}" for tool in tools
        ]
        calls = rules.series(rules.add("call", " | ".join(options)), quote(SIGN), many)
        first = "" if self.is_open else quote(SIGN)
        if must_call:
            return f"{first} {calls}"
        to_all, until_sign = quote("all\n"), rules.after_text(SIGN)
        if self.is_open:
            return f"{to_all} TEXT | ({to_all} {until_sign})? {calls}"
        return f"TEXT | {until_sign} ({to_all} TEXT | {calls})"
