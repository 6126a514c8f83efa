"""Who guessed each token: a method, whose guess was accepted, or the target itself."""

from __future__ import annotations

from collections.abc import Sequence

from hunch.server.text import Text
from hunch.types import CompletionOutput

DRAFTER = "drafter"  # one without a name
TARGET = "target"


def origins_of(choice: CompletionOutput) -> list[str]:
    """One name per token: a step commits its accepted nodes, then one token of the target's."""
    names: list[str] = []
    for step in choice.trace or ():
        names += [step.method or DRAFTER] * len(step.accepted)
        names.append(TARGET)
    num_tokens = len(choice.token_ids)
    return (names + [TARGET] * num_tokens)[:num_tokens]


class Painter:
    """Splits an answer's text, as it streams, at the borders between origins' tokens."""

    def __init__(self, text: Text, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._detokenizer = text.detokenizer(prompt_ids, skip_special_tokens=skip_special_tokens)
        self._num_tokens = 0
        self._waiting: list[tuple[str, str]] = []  # decoded, but not yet in the streamed text

    def paint(self, choice: CompletionOutput, text: str) -> list[tuple[str, str]]:
        """`text`, the news of `choice`, as pieces with their origins."""
        names = origins_of(choice)
        for position in range(self._num_tokens, len(choice.token_ids)):
            piece = self._detokenizer.push(choice.token_ids[position])
            self._waiting.append((piece, names[position]))
        self._num_tokens = len(choice.token_ids)
        pieces = []
        while text and self._waiting:
            piece, name = self._waiting.pop(0)
            if len(piece) > len(text):  # the rest may yet turn out to be a stop string
                self._waiting.insert(0, (piece[len(text) :], name))
                piece = piece[: len(text)]
            if piece:
                pieces.append((piece, name))
            text = text[len(piece) :]
        if text:  # a last incomplete character, flushed
            pieces.append((text, TARGET))
        return pieces
