"""Which of several engines takes a request: the one that has seen its beginning, unless it is busy.

An engine finds the KV of prompts that began alike in its prefix cache, so requests of the same
beginning go to the same engine, as long as it has not much more to do than the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

PIECE = 32  # tokens by which beginnings are compared
MAX_LOAD = 1.5  # times the mean number of open sequences, above which an engine is passed over
SPARE = 2  # sequences beyond that which never matter


class Router:
    """Remembers what every engine was sent, as much of it as its KV memory may still hold."""

    def __init__(self, num_engines: int, num_tokens: int = 1 << 16) -> None:
        """`num_tokens`: that the KV memory of one engine has room for."""
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]
        self.set_room(num_tokens)

    def set_room(self, num_tokens: int) -> None:
        self._room = max(1, num_tokens // PIECE)

    def forget(self, index: int) -> None:
        """An engine was started anew."""
        self._seen[index].clear()

    def choose(self, prompt_ids: Sequence[int], salt: str, loads: Sequence[int | None]) -> int:
        """The index of the engine to send a prompt to. `loads`: open sequences; None: it is down.

        The longest beginning wins among engines that are not too busy, then the least busy one.
        """
        keys = _beginnings(prompt_ids, salt)
        up = [index for index, load in enumerate(loads) if load is not None]
        assert up, "somebody must be there to take it"
        counts = {index: loads[index] or 0 for index in up}
        most = MAX_LOAD * sum(counts.values()) / len(up) + SPARE
        free = [index for index in up if counts[index] < most]
        best = min(free or up, key=lambda index: (-self._match(index, keys), counts[index]))
        self._remember(best, keys)
        return best

    def _match(self, index: int, keys: list[int]) -> int:
        seen = self._seen[index]
        for number, key in enumerate(keys):
            if key not in seen:
                return number
        return len(keys)

    def _remember(self, index: int, keys: list[int]) -> None:
        seen = self._seen[index]
        for key in keys:
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > self._room:
            seen.popitem(last=False)


def _beginnings(prompt_ids: Sequence[int], salt: str) -> list[int]:
    """A number for the first piece, for the first two pieces, and so on."""
    keys, key = [], hash(salt)
    for first in range(0, len(prompt_ids) - PIECE + 1, PIECE):
        key = hash((key, *prompt_ids[first : first + PIECE]))
        keys.append(key)
    return keys
