"""Special tokens that users write: text like any other, never the token itself.

Whoever could write `<|im_end|>` into a message could end it and begin one of the system's. So,
before a chat template sees a message, names of special tokens in it are replaced by marks that no
text holds; in the rendered prompt only the template's own are left, and marks become text again.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as Backend

from hunch.text.encoding import encode_text

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"  # noncharacters: Unicode gives them no meaning, ever


class Literals:
    """Knows a tokenizer's special tokens by name. Threads may share it."""

    def __init__(self, backend: Backend, special: Mapping[str, int]) -> None:
        self._ids = dict(special)
        self._backend = backend
        self._plain: Backend | None = None  # the same tokenizer, blind for special tokens
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def hide(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], Hidden]:
        """The messages with marks for the special tokens in them, and what the marks stand for."""
        hidden = Hidden()
        if not any(self._pattern.search(text) for text in _texts(messages)):
            return list(messages), hidden
        return [_replaced(message, self._pattern, hidden) for message in messages], hidden

    def encode(self, rendered: str, hidden: Hidden) -> list[int]:
        """Token ids of a prompt with marks in it."""
        ids: list[int] = []
        last = 0
        for match in self._pattern.finditer(rendered):
            ids += self._encode(hidden.shown(rendered[last : match.start()]))
            ids.append(self._ids[match.group()])
            last = match.end()
        return ids + self._encode(hidden.shown(rendered[last:]))

    def _encode(self, text: str) -> list[int]:
        if self._plain is None:
            plain = Backend.from_str(self._backend.to_str())
            plain.encode_special_tokens = True
            self._plain = plain
        return encode_text(self._plain, text, add_special_tokens=False)


class Hidden:
    """What the marks of one conversation stand for; marks are not to be guessed."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._nonce = secrets.token_hex(8)

    def __bool__(self) -> bool:
        return bool(self._names)

    def mark(self, match: re.Match[str]) -> str:
        self._names.append(match.group())
        return f"{_OPEN}{self._nonce}:{len(self._names) - 1}{_CLOSE}"

    def shown(self, text: str) -> str:
        """The text as it was written."""
        mark = f"{_OPEN}{self._nonce}:([0-9]+){_CLOSE}"
        return re.sub(mark, lambda match: self._names[int(match.group(1))], text)


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, one in value.items():
            yield from (name, *_texts(one)) if isinstance(name, str) else _texts(one)
    elif isinstance(value, Sequence):
        for one in value:
            yield from _texts(one)


def _replaced(value: Any, pattern: re.Pattern[str], hidden: Hidden) -> Any:
    if isinstance(value, str):
        return pattern.sub(hidden.mark, value)
    if isinstance(value, Mapping):
        return {
            _replaced(name, pattern, hidden): _replaced(one, pattern, hidden)
            for name, one in value.items()
        }
    if isinstance(value, Sequence):
        return [_replaced(one, pattern, hidden) for one in value]
    return value
