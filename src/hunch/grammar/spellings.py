"""How forced texts begin: the one token that a mask would allow, known without a mask."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

ForcedText = tuple[int, bytes]  # the token before it, and what must follow

MAX_KEPT = 4096
UNSURE = -1


class Spellings:
    """First tokens of the usual spellings of forced texts; all grammars of a tokenizer share them.

    A spelling depends on the token before the text. It would also depend on what may come after
    the text, where its end could be the beginning of a longer token; such texts are not kept.
    """

    def __init__(self, pieces: Iterable[bytes]) -> None:
        """`pieces`: the texts of all tokens."""
        self._pieces = sorted(set(pieces))
        self._kept: dict[ForcedText, int] = {}

    def __contains__(self, forced: ForcedText) -> bool:
        return self.get(forced) is not None

    def get(self, forced: ForcedText) -> int | None:
        """Its first token; None: it is not known."""
        token = self._kept.get(forced, UNSURE)
        return None if token == UNSURE else token

    def keep(self, forced: ForcedText, token: int, piece: bytes) -> None:
        """The grammar engine spells it so here: `token`, whose text is `piece`, comes first."""
        if forced in self._kept:
            return
        if len(self._kept) >= MAX_KEPT:
            self._kept.clear()
        text = forced[1]
        is_sure = not any(self._goes_on(text[start:]) for start in range(len(piece)))
        self._kept[forced] = token if is_sure else UNSURE

    def _goes_on(self, text: bytes) -> bool:
        """Whether some token begins with the text, and is longer."""
        place = bisect_left(self._pieces, text + b"\0")
        return place < len(self._pieces) and self._pieces[place].startswith(text)
