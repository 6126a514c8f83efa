"""Tokens as bytes: text is their concatenation, so it can be decoded all at once or as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hunch.byte_level import BYTE_OF
from hunch.errors import UnsupportedModelError


class Pieces(dict[int, bytes]):
    """The bytes of each token, as the tokenizer's decoder would make them, once it was met.

    Invalid UTF-8 becomes U+FFFD where it stands. (Where a vocabulary spells bytes as <0xE2>, the
    tokenizers library replaces a whole run of them if any of it is invalid; text that was already
    shown could then change, so hunch does not.)
    """

    def __init__(
        self,
        token_of: Callable[[int], str | None],
        decoder: Mapping[str, Any] | None,
        added: Mapping[int, str],
    ) -> None:
        super().__init__()
        self._token_of = token_of
        self._added = added  # stand for themselves, whatever the decoder does
        self.num_strip = 0  # spaces taken off the beginning of a text
        self._replace: list[tuple[str, str]] = []
        self._is_byte_level = self._has_byte_tokens = self._is_spaced = False
        if decoder is None:
            self._is_spaced, self.num_strip = True, 1
        else:
            self._read(decoder)

    def _read(self, decoder: Mapping[str, Any]) -> None:
        match decoder:
            case {"type": "Sequence", "decoders": steps}:
                for step in steps:
                    self._read(step)
            case {"type": "ByteLevel"}:
                self._is_byte_level = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new}:
                self._replace.append((old, new))
            case {"type": "ByteFallback"}:
                self._has_byte_tokens = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": start, "stop": 0}:
                self.num_strip = start
            case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
                self._replace.append((mark, " "))
                self.num_strip = 0 if scheme == "never" else 1
            case _:
                raise UnsupportedModelError(f"the tokenizer decodes with {decoder!r:.80}")

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._make(token)
        return piece

    def _make(self, token: int) -> bytes:
        if token in self._added:
            text = self._added[token]
            return f" {text}".encode() if self._is_spaced else text.encode()
        name = self._token_of(token)
        if name is None:  # the model has more rows than the tokenizer has tokens
            return b""
        if self._is_byte_level:
            try:
                return bytes(map(BYTE_OF.__getitem__, name))
            except KeyError:
                return name.encode()
        if self._has_byte_tokens and len(name) == 6 and name.startswith("<0x"):
            try:
                return bytes.fromhex(name[3:5])
            except ValueError:
                pass  # an ordinary token that only looks like one
        for old, new in self._replace:
            name = name.replace(old, new)
        return f" {name}".encode() if self._is_spaced else name.encode()

    def text(self, tokens: Iterable[int], skip: frozenset[int]) -> str:
        joined = b"".join([self[token] for token in tokens if token not in skip])
        for _ in range(self.num_strip):
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", "replace")
