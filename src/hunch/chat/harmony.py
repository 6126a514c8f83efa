"""gpt-oss's messages (harmony): channels of reasoning, calls and the answer, one after another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hunch.chat.lark import Rules, quote
from hunch.chat.pieces import Marks, Piece, PieceType, Reader

if TYPE_CHECKING:
    from hunch.chat.tools import Tool

CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
MARKS = (CHANNEL, MESSAGE, START, END, CALL, RETURN, CONSTRAIN)


class HarmonyReader:
    """The answer goes on after `<|start|>assistant`: a header, a message, and so on."""

    def __init__(self, specials: Iterable[str]) -> None:
        self._marks = Marks({*MARKS, *specials})
        self._held = ""
        self._header = ""
        self._is_header = True
        self._has_marks = False
        self._piece_type: PieceType = "text"
        self._num_calls = 0

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        self._held += text
        mark: str | None = ""
        while mark is not None:
            safe, mark, self._held = self._marks.split(self._held)
            self._take(safe, pieces)
            if mark is not None:
                self._turn(mark, pieces)
        return pieces

    def _take(self, text: str, pieces: list[Piece]) -> None:
        if self._is_header:
            self._header += text
        elif text:
            number = self._num_calls - 1 if self._piece_type == "arguments" else -1
            pieces.append(Piece(self._piece_type, text, number))

    def _turn(self, mark: str, pieces: list[Piece]) -> None:
        self._has_marks = True
        if mark == MESSAGE and self._is_header:
            self._is_header = False
            recipient = re.search(r"to=functions\.([\w.-]+)", self._header)
            if recipient:
                self._piece_type = "arguments"
                pieces.append(Piece("name", recipient.group(1), self._num_calls))
                self._num_calls += 1
            else:
                is_thought = "analysis" in self._header
                self._piece_type = "reasoning" if is_thought else "text"
            self._header = ""
        elif self._is_header:
            self._header += " "  # a mark parts words
        elif mark in MARKS:
            self._is_header, self._header = True, ""

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        held, self._held = self._held, ""
        self._take(held, pieces)
        if self._header and not self._has_marks:
            pieces.append(Piece("text", self._header))  # it keeps to no form at all
        return pieces


@dataclass(frozen=True, slots=True)
class HarmonyForm:
    marks: tuple[str, ...] = MARKS

    def reader(self, specials: Iterable[str], tools: Sequence[Tool]) -> Reader:
        return HarmonyReader(specials)

    def write(self, rules: Rules, tools: Sequence[Tool], *, must_call: bool, many: bool) -> str:
        channel, message, constrain = map(rules.mark, (CHANNEL, MESSAGE, CONSTRAIN))
        options = [
            f'{quote(tool.name)} (" "? {constrain} "json")? {message} '
            f"{rules.arguments(tool.parameters)}"
            for tool in tools
        ]
        head = quote("commentary to=functions.")
        call = rules.add("call", f"{channel} {head} ({' | '.join(options)})")
        comment = rules.add(
            "comment", f'{channel} "commentary" {message} TEXT {before_next(rules)}'
        )
        final = f'{channel} "final" {message} TEXT'
        return f"{comment}* {call}" if must_call else f"{comment}* ({call} | {final})"


def before_next(rules: Rules) -> str:
    """How a message ends that another one follows."""
    return f'{rules.mark(END)} {rules.mark(START)} "assistant"'


def reasoning_rule(rules: Rules) -> str:
    """Any number of messages of reasoning."""
    channel, message = rules.mark(CHANNEL), rules.mark(MESSAGE)
    thought = rules.add("thought", f'{channel} "analysis" {message} TEXT {before_next(rules)}')
    return f"{thought}*"


def answer_start(rules: Rules) -> str:
    """What stands before the answer proper."""
    return f'{rules.mark(CHANNEL)} "final" {rules.mark(MESSAGE)}'
