"""Text as tokens come: each piece is final, no character is ever split or taken back."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hunch.text.pieces import Pieces

_utf8 = codecs.getincrementaldecoder("utf-8")
_MAX_CHARACTER = 4  # bytes of the longest UTF-8 sequence


class PieceDetokenizer:
    """One sequence's detokenizer. Its law, for any tokens:

    the whole characters of the prompt + everything pushed + flush == decode(prompt + tokens)

    A character begun in the prompt and completed by the output appears in the output.
    """

    def __init__(self, pieces: Pieces, skip: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._pieces = pieces
        self._skip = skip
        self._decoder = _utf8(errors="replace")
        self._num_strip = pieces.num_strip
        self._begin(prompt_ids)

    def _begin(self, prompt_ids: Sequence[int]) -> None:
        """Take up the prompt's unfinished character; only its last bytes can matter."""
        if self._num_strip:  # spaces are stripped at the beginning of a text, not of an answer
            for token in prompt_ids:
                if not self._num_strip:
                    break
                self._strip(b"" if token in self._skip else self._pieces[token])
        tail = b""
        for token in reversed(prompt_ids):
            if len(tail) >= _MAX_CHARACTER:
                break
            if token not in self._skip:
                tail = self._pieces[token] + tail
        self._decoder.decode(tail)

    def _strip(self, piece: bytes) -> bytes:
        while self._num_strip and piece.startswith(b" "):
            piece = piece[1:]
            self._num_strip -= 1
        if piece:
            self._num_strip = 0
        return piece

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        piece = self._pieces[token]
        if self._num_strip:
            piece = self._strip(piece)
        return self._decoder.decode(piece)

    def push_all(self, tokens: Sequence[int]) -> str:
        """The same text as token by token, sooner."""
        if self._num_strip or len(tokens) == 1:
            return "".join(map(self.push, tokens))
        pieces, skip = self._pieces, self._skip
        return self._decoder.decode(b"".join([pieces[t] for t in tokens if t not in skip]))

    def flush(self) -> str:
        """What is left of an unfinished character."""
        return self._decoder.decode(b"", final=True)
