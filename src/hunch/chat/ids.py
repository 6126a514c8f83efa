"""Names that calls get, so that their results can be told apart."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass

LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, kw_only=True, slots=True)
class CallIds:
    """How one chat's template takes them."""

    length: int | None = None  # Mistral's templates take only ids of nine letters
    num_before: int | None = None  # Kimi reads the function from its id: functions.NAME:NUMBER

    def new(self, name: str, number: int) -> str:
        """For the answer's call of this number."""
        if self.num_before is not None:
            return f"functions.{name}:{self.num_before + number}"
        if self.length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(LETTERS) for _ in range(self.length))
