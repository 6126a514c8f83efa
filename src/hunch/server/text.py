"""What the HTTP side asks of a tokenizer; the real one is injected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from hunch.types import Detokenizer


class Text(Protocol):
    """Strings to token ids and back, and a chat to a prompt."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    generation_config: Mapping[str, Any]  # how the model's makers would sample; may be empty
    chat_template: str | None
    tool_template: str | None

    @property
    def special_tokens(self) -> Mapping[str, int]: ...

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Raises RequestError for a text that is clearly longer than `max_tokens`."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def detokenizer(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> Detokenizer: ...

    def token_bytes(self, token: int) -> bytes: ...

    def token_id(self, name: str) -> int | None:
        """The token of this name, special or not."""

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> list[int]: ...
