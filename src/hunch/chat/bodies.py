"""Calls between marks whose arguments are no JSON: each is read once it is whole."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hunch.chat.pieces import Marks, Piece, Reader
from hunch.chat.tools import Tool


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyForm:
    """A family whose calls have marks around them, and perhaps marks around all calls."""

    begin: str
    end: str
    section: tuple[str, str] | None = None  # around all calls
    bare: tuple[str, str] | None = None  # within a call's, for answers that leave these out
    ignored: tuple[str, ...] = ()  # neither text nor part of a call

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        return BodyReader(self, specials, tools)

    def parse(self, text: str, tools: Sequence[Tool]) -> tuple[str, dict[str, Any]] | None:
        """Name and arguments of a call: what follows its first mark, with the last if it is whole.

        None where it is no call.
        """
        raise NotImplementedError


class BodyReader:
    """Text, and calls of a family that says how one is read."""

    def __init__(self, form: BodyForm, specials: Iterable[str], tools: Sequence[Tool]) -> None:
        self._form, self._tools = form, tools
        self._ends = {form.begin: form.end} | ({form.bare[0]: form.bare[1]} if form.bare else {})
        first = [form.section[0]] if form.section else [*self._ends]
        ignored = {*form.ignored, *specials} | ({form.end} if form.bare else set())
        self._outer = Marks({*first, *ignored})
        self._inner = Marks((form.begin, form.section[1])) if form.section else None
        self._held = ""
        self._place = "text"  # or within a section, or a call
        self._begin = ""
        self._lost = ""  # what a section without any call has held
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        while True:
            if self._place == "call":
                body, end, rest = self._held.partition(self._ends[self._begin])
                if not end:
                    return pieces
                self._place, self._held = "section" if self._inner else "text", rest
                pieces += self._call(body + end)
            elif self._place == "section":
                if not self._read_section(pieces):
                    return pieces
            elif not self._read_text(pieces):
                return pieces

    def _read_text(self, pieces: list[Piece]) -> bool:
        safe, mark, self._held = self._outer.split(self._held)
        if safe:
            pieces.append(Piece("text", safe))
        if mark in self._ends:
            self._place, self._begin = "call", mark
        elif self._form.section and mark == self._form.section[0]:
            self._place, self._lost = "section", mark
        return mark is not None

    def _read_section(self, pieces: list[Piece]) -> bool:
        assert self._inner is not None
        safe, mark, self._held = self._inner.split(self._held)
        if self._lost:
            self._lost += safe
        if mark == self._form.begin:
            self._place, self._begin = "call", mark
        elif mark is not None:
            pieces += self._give_back(mark)
            self._place = "text"
        return mark is not None

    def _give_back(self, more: str) -> list[Piece]:
        """A section that had no call was text."""
        lost, self._lost = self._lost, ""
        return [Piece("text", lost + more)] if lost else []

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._place == "call":
            return self._call(held)
        if self._place == "section":
            return self._give_back(held)
        return [Piece("text", held)] if held else []

    def _call(self, body: str) -> list[Piece]:
        is_bare = self._begin != self._form.begin
        found = self._form.parse(self._begin + body if is_bare else body, self._tools)
        if found is None:
            return self._give_back(self._begin + body) or [Piece("text", self._begin + body)]
        self._lost = ""
        name, values = found
        number, self._num_calls = self._num_calls, self._num_calls + 1
        arguments = json.dumps(values, ensure_ascii=False)
        return [Piece("name", name, number), Piece("arguments", arguments, number)]
