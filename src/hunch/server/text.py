"""What the HTTP side asks of a tokenizer; the real one is injected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hunch.chat.turn import Codec
from hunch.types import TextCodec


class Text(TextCodec, Codec, Protocol):
    """Strings to token ids and back, and a chat to a prompt."""

    generation_config: Mapping[str, Any]  # how the model's makers would sample; may be empty

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Raises RequestError for a text that is clearly longer than `max_tokens`."""

    def token_bytes(self, token: int) -> bytes: ...

    def token_id(self, name: str) -> int | None:
        """The token of this name, special or not."""
