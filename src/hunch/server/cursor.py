"""What an answer gained since it was last looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

from hunch.chat.pieces import Piece as Part
from hunch.chat.pieces import Reader
from hunch.server.origins import Painter, Piece
from hunch.types import CompletionOutput, Logprob


@dataclass(kw_only=True, slots=True)
class Delta:
    """What one answer gained since it was last looked at."""

    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # what ended it, with the finish reason
    pieces: list[Piece] | None = None  # text and who guessed it, when asked for
    parts: list[Part] | None = None  # what the text is, where it may be more than an answer


@dataclass(slots=True)
class Cursor:
    """How far a reader has got in one answer."""

    index: int
    painter: Painter | None = None
    reader: Reader | None = None  # tells text from reasoning and calls
    num_text: int = 0
    num_tokens: int = 0
    is_finished: bool = False
    has_calls: bool = False

    def plain(self, choice: CompletionOutput) -> str | None:
        """The news, where they are text and nothing else."""
        if choice.finish_reason is not None or choice.logprobs is not None:
            return None
        if self.painter is not None or self.reader is not None:
            return None
        text = choice.text[self.num_text :]
        if not text:
            return None
        self.num_text += len(text)
        self.num_tokens = len(choice.token_ids)
        return text

    def advance(self, choice: CompletionOutput) -> Delta | None:
        """The news, or None."""
        text = choice.text[self.num_text :]
        ids = choice.token_ids[self.num_tokens :]
        if self.is_finished or not (text or choice.finish_reason):
            return None  # tokens without text wait for the character they begin
        logprobs = None if choice.logprobs is None else choice.logprobs[self.num_tokens :]
        pieces = self.painter.paint(choice, text) if self.painter else None
        self.num_text = len(choice.text)
        self.is_finished = choice.finish_reason is not None
        parts = self._read(text) if self.reader is not None else None
        if not (self.is_finished or parts or pieces or logprobs) and parts is not None:
            return None  # what it is shows with the text to come, and its tokens come with that
        self.num_tokens = len(choice.token_ids)
        return Delta(
            index=self.index,
            text=text,
            token_ids=ids,
            logprobs=logprobs,
            finish_reason=ending_of(choice.finish_reason, self.has_calls),
            stop_reason=choice.stop_reason,
            pieces=pieces,
            parts=parts,
        )

    def _read(self, text: str) -> list[Part]:
        assert self.reader is not None
        parts = self.reader.feed(text)
        if self.is_finished:
            parts += self.reader.finish()
        self.has_calls |= any(part.piece_type == "name" for part in parts)
        return parts


def ending_of(finish_reason: str | None, has_calls: bool) -> str | None:
    """OpenAI's word for how an answer ended."""
    return "tool_calls" if has_calls and finish_reason == "stop" else finish_reason
