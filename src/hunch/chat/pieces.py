"""Pieces of an answer, and what every reader of one is made of.

A reader sees text as it comes, in chunks cut anywhere, and says what it is: text for the user,
reasoning, or a call's name and arguments. Whatever the cuts, the pieces joined are the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

PieceType = Literal["text", "reasoning", "name", "arguments"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of an answer. A `name` begins the call of that number; `arguments` are JSON text."""

    piece_type: PieceType
    text: str
    call: int = -1


class Reader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are certain by now."""

    def finish(self) -> list[Piece]:
        """What was held back, when no more text comes."""


@dataclass(slots=True)
class Call:
    """A whole tool call."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """The pieces put together."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] | None = None

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if piece.piece_type == "text":
                self.text += piece.text
            elif piece.piece_type == "reasoning":
                self.reasoning += piece.text
            elif piece.piece_type == "name":
                self.calls = [*(self.calls or ()), Call(piece.text)]
            else:
                assert self.calls is not None
                self.calls[piece.call].arguments += piece.text


def read(reader: Reader, text: str) -> Answer:
    """A whole answer at once."""
    answer = Answer()
    answer.add(reader.feed(text))
    answer.add(reader.finish())
    return answer


class Marks:
    """Finds marks in text that comes in chunks. No mark may begin another."""

    def __init__(self, marks: Iterable[str]) -> None:
        marks = sorted(set(marks))
        self._pattern = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        self._beginnings = frozenset(mark[:n] for mark in marks for n in range(1, len(mark)))
        self._longest = max(map(len, self._beginnings), default=0)

    def split(self, text: str) -> tuple[str, str | None, str]:
        """Text before the first mark, the mark, and the rest; without one, (safe, None, held)."""
        found = self._pattern.search(text)
        if found:
            return text[: found.start()], found.group(), text[found.end() :]
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._beginnings:
                return text[:-size], None, text[-size:]
        return text, None, ""


class JsonSpan:
    """Where a JSON value ends, in text that comes in chunks. It begins with the first character."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = self._is_escaped = self._has_begun = False
        self.is_over = False

    def feed(self, text: str) -> int:
        """How many of the characters belong to the value."""
        for place, char in enumerate(text):
            if self._is_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_string = False
                    self.is_over = self._depth == 0
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]" and self._depth:
                self._depth -= 1
                self.is_over = self._depth == 0
            elif self._has_begun and self._depth == 0 and (char in ",}]" or char.isspace()):
                self.is_over = True  # a number or a word ends where something else begins
                return place
            self._has_begun = True
            if self.is_over:
                return place + 1
        return len(text)


NAME_KEYS = ("name", "function", "tool_name")
ARGUMENT_KEYS = ("arguments", "parameters", "args")


class CallObject:
    """One call as a JSON object, its keys in any order: {"name": ..., "arguments": {...}}."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.raw = ""
        self.name = ""
        self.is_over = False
        self._place = "open"  # what comes next: open, key, colon, value
        self._key = ""
        self._value = ""
        self._span = JsonSpan()
        self._waiting: str | None = None  # arguments that came before the name
        self._has_arguments = False

    def feed(self, text: str) -> tuple[list[Piece], int]:
        """Pieces, and how many characters were used; all of them until the object is over."""
        pieces: list[Piece] = []
        at = 0
        while at < len(text) and not self.is_over:
            if self._place in ("key string", "value"):
                used = self._span.feed(text[at:])
                self._take(text[at : at + used], pieces)
                at += used
            else:
                at += self._between(text[at])
        self.raw += text[:at]
        if self.is_over:
            pieces += self._end()
        return pieces, at

    def _between(self, char: str) -> int:
        """Look at a character outside of keys and values; 1 if it is used up."""
        if self._place == "open":
            self._place = "key" if char == "{" else "open"
        elif self._place == "key":
            if char == '"':
                self._begin("key string")
                return 0
            self.is_over = char == "}"
        elif self._place == "colon":
            if char == ":":
                self._place = "before value"
        elif not char.isspace():
            self._begin("value")
            return 0
        return 1

    def _begin(self, place: str) -> None:
        self._place, self._span, self._value = place, JsonSpan(), ""

    def _take(self, text: str, pieces: list[Piece]) -> None:
        is_arguments = self._place == "value" and self._key in ARGUMENT_KEYS
        self._value += text
        if is_arguments and self.name and not self._value.startswith('"') and text:
            pieces.append(Piece("arguments", text, self.number))
            self._has_arguments = True
        if not self._span.is_over:
            return
        if self._place == "key string":
            self._key, self._place = str(loads_loosely(self._value)), "colon"
            return
        self._place = "key"
        if self._key in NAME_KEYS and not self.name:
            self.name = str(loads_loosely(self._value))
            pieces.append(Piece("name", self.name, self.number))
            if self._waiting is not None:
                self._give(self._waiting, pieces)
        elif is_arguments and not self._has_arguments:
            if self.name:
                self._give(self._value, pieces)
            else:
                self._waiting = self._value

    def _give(self, value: str, pieces: list[Piece]) -> None:
        """Arguments that were kept until they were whole; some models write them as a string."""
        decoded = loads_loosely(value) if value.startswith('"') else value
        pieces.append(Piece("arguments", str(decoded), self.number))
        self._has_arguments = True

    def _end(self) -> list[Piece]:
        if not self.name:
            return [Piece("text", self.raw)]
        return [] if self._has_arguments else [Piece("arguments", "{}", self.number)]

    def finish(self) -> list[Piece]:
        """The text ended within the object."""
        return [] if self.name or self.is_over else [Piece("text", self.raw)]


class NamedObject(CallObject):
    """One call as a JSON object whose key is the function: {"get_weather": {...}}."""

    def _take(self, text: str, pieces: list[Piece]) -> None:
        super()._take(text, pieces)
        if self._place == "colon" and not self.name:
            self.name, self._key = self._key, ARGUMENT_KEYS[0]
            pieces.append(Piece("name", self.name, self.number))


def loads_loosely(text: str) -> object:
    """JSON, or the text itself where it is none."""
    try:
        return json.loads(text, strict=False)
    except ValueError:
        return text.strip('"')


class Tidy:
    """Drops the white space around calls and around reasoning."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._held = ""  # white space that may yet turn out to end its section
        self._piece_type: PieceType = "text"
        self._is_first = False  # nothing but white space came since the section began
        self._has_text = self._has_calls = False

    def feed(self, text: str) -> list[Piece]:
        return self._tidy(self._reader.feed(text))

    def finish(self) -> list[Piece]:
        pieces = self._tidy(self._reader.finish())
        if self._held and self._piece_type == "text" and not (self._has_calls or self._is_first):
            pieces.append(Piece("text", self._held))  # the white space is the answer's own
        return pieces

    def _tidy(self, pieces: list[Piece]) -> list[Piece]:
        tidy: list[Piece] = []
        for piece in pieces:
            if piece.piece_type != self._piece_type:
                self._piece_type, self._held, self._is_first = piece.piece_type, "", True
            if piece.piece_type in ("name", "arguments"):
                self._has_calls = True
                tidy.append(piece)
                continue
            text = self._held + piece.text
            body = text.rstrip()
            self._held = text[len(body) :]
            if not body:
                continue
            if self._is_first:
                is_second = piece.piece_type == "text" and self._has_text
                body = ("\n" if is_second else "") + body.lstrip()
                self._is_first = False
            self._has_text |= piece.piece_type == "text"
            tidy.append(Piece(piece.piece_type, body))
        return tidy
