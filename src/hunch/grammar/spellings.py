"""How forced texts begin: tokens that a mask would allow, known without a mask."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

ForcedText = tuple[int, bytes]  # the token before it, and what must follow

MAX_KEPT = 4096


class Spellings:
    """First tokens of the usual spellings of forced texts; all grammars of a tokenizer share them.

    A spelling depends on the token before the text. Where the text's end could be the beginning of
    a longer token, what a mask allows also depends on what may come after the text: the first token
    of the usual spelling in any case, perhaps others.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        """`pieces`: the texts of all tokens."""
        self._pieces = sorted(set(pieces))
        self._after: dict[ForcedText, ForcedText] = {}
        self._only: dict[ForcedText, int] = {}

    def __contains__(self, forced: ForcedText) -> bool:
        return forced in self._only

    def only(self, forced: ForcedText) -> int | None:
        """The one token that a mask allows; None: it is not known, or there are others."""
        return self._only.get(forced)

    def after(self, forced: ForcedText) -> ForcedText | None:
        """The first token, which any mask allows, and what is forced after it, as far as known."""
        return self._after.get(forced)

    def keep(self, forced: ForcedText, token: int, piece: bytes) -> None:
        """Its usual spelling begins with `token`, whose text is `piece`."""
        if forced in self._after:
            return
        if len(self._after) >= MAX_KEPT:
            self._after.clear()
            self._only.clear()
        text = forced[1]
        # Special tokens are written otherwise in forced texts, or have no text.
        is_prefix = bool(piece) and text.startswith(piece)
        self._after[forced] = token, text[len(piece) :] if is_prefix else b""
        if not any(self._goes_on(text[start:]) for start in range(len(piece))):
            self._only[forced] = token

    def _goes_on(self, text: bytes) -> bool:
        """Whether some token begins with the text, and is longer."""
        at = bisect_left(self._pieces, text + b"\0")
        return at < len(self._pieces) and self._pieces[at].startswith(text)
