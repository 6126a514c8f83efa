"""Stop strings in text that comes in pieces: what may be shown, and where to end."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back text that may become a stop string, and ends at the first one complete.

    Of two that are complete at the same character, the one that began first wins. So the outcome
    depends on the text alone, not on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        assert all(stops), "empty stop strings are refused with the request"
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show now, and the stop string that ended it, if one did."""
        if self.matched is not None:
            return "", self.matched
        if not self._stops:
            return text, None
        held = self._held + text
        hits = [(held.find(stop) + len(stop), -len(stop), stop) for stop in self._stops]
        hits = [hit for hit in hits if hit[2] in held]
        if hits:
            end, _, stop = min(hits)
            self.matched, self._held = stop, ""
            return held[: end if self._include else end - len(stop)], stop
        first = self._first_open(held)
        self._held = held[first:]
        return held[:first], None

    def _first_open(self, held: str) -> int:
        """Where the earliest unfinished stop string could begin; the end, where none could."""
        first = len(held)
        for stop in self._stops:
            for start in range(max(0, len(held) - len(stop) + 1), first):
                if stop.startswith(held[start:]):
                    first = start
                    break
        return first

    def flush(self) -> str:
        """The text ended without a stop string: what was held back."""
        held, self._held = self._held, ""
        return held
