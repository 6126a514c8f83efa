"""Who guessed each token: a method, whose guess was accepted, or the target itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hunch.server.text import Text
from hunch.types import CompletionOutput, DraftTrace

DRAFTER = "drafter"  # one without a name
TARGET = "target"

# A piece of text, who guessed it and, where the target overruled a guess, what the guess said.
Piece = tuple[str, str] | tuple[str, str, str]


def origins_of(choice: CompletionOutput) -> list[str]:
    """One name per token: a step commits its accepted nodes, then one token of the target's."""
    names: list[str] = []
    for step in choice.trace or ():
        names += [step.method or DRAFTER] * len(step.accepted)
        names.append(TARGET)
    num_tokens = len(choice.token_ids)
    return (names + [TARGET] * num_tokens)[:num_tokens]


def overruled(step: DraftTrace) -> list[int]:
    """The tokens drafted where the target went its own way: the first branch, to its end."""
    node = step.accepted[-1] if step.accepted else -1
    tokens: list[int] = []
    while node in step.parents[node + 1 :]:
        node = step.parents.index(node, node + 1)
        tokens.append(step.tokens[node])
    return tokens


class Painter:
    """Splits an answer's text, as it streams, at the borders between origins' tokens."""

    def __init__(
        self,
        text: Text,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool,
        *,
        shows_guesses: bool = True,
    ) -> None:
        """Wrong guesses are not shown where they may come from another user's text."""
        self._text = text
        self._shows_guesses = shows_guesses
        self._detokenizer = text.detokenizer(prompt_ids, skip_special_tokens=skip_special_tokens)
        self._num_steps = 0
        self._num_tokens = 0
        self._origins: deque[tuple[str, str]] = deque()  # of tokens to come: name, wrong guess
        self._waiting: deque[tuple[str, str, str]] = deque()  # decoded, not yet in the text

    def paint(self, choice: CompletionOutput, text: str) -> list[Piece]:
        """`text`, the news of `choice`, as pieces with their origins."""
        self._take(choice)
        pieces: list[Piece] = []
        while text and self._waiting:
            piece, name, missed = self._waiting.popleft()
            if len(piece) > len(text):  # the rest may yet turn out to be a stop string
                self._waiting.appendleft((piece[len(text) :], name, ""))
                piece = piece[: len(text)]
            if piece:
                pieces.append((piece, name, missed) if missed else (piece, name))
            text = text[len(piece) :]
        if text:  # a last incomplete character, flushed
            pieces.append((text, TARGET))
        return pieces

    def _take(self, choice: CompletionOutput) -> None:
        steps = choice.trace or []
        for step in steps[self._num_steps :]:
            self._origins.extend([(step.method or DRAFTER, "")] * len(step.accepted))
            missed = overruled(step) if self._shows_guesses else []
            self._origins.append((TARGET, self._text.decode(missed) if missed else ""))
        self._num_steps = len(steps)
        for token in choice.token_ids[self._num_tokens :]:
            name, missed_text = self._origins.popleft() if self._origins else (TARGET, "")
            self._waiting.append((self._detokenizer.push(token), name, missed_text))
        self._num_tokens = len(choice.token_ids)
