"""What the HTTP side asks of a tokenizer; the real one is injected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hunch.types import Detokenizer


class Text(Protocol):
    """Strings to token ids and back, and a chat to a prompt."""

    vocab_size: int
    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> Detokenizer: ...

    def render_chat(
        self, messages: Sequence[Mapping[str, str]], *, template: str | None = None
    ) -> list[int]: ...
