"""Recurrent states at ends of blocks, kept so that a row can begin where another one was.

Blocks of KV serve every text that begins alike; a row's state holds all of its text at once, so it
has to be copied at the moment it stands at the end of a block. The device has room for a few such
copies, the snapshots, known here by their numbers. Each is found by its block's key, and given away
when the block is, or for a newer copy.
"""

from __future__ import annotations

from collections import OrderedDict

NO_SNAPSHOT = -1


class Snapshots:
    """Whose state each snapshot holds; the one whose use is longest ago is given away first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))[::-1]
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # by the key of the last block

    def __contains__(self, key: bytes) -> bool:
        return key in self._numbers

    def use(self, key: bytes) -> int:
        """The snapshot, for a row that begins now."""
        self._numbers.move_to_end(key)
        return self._numbers[key]

    def reserve(self) -> int:
        """One to write to, that nobody finds yet; NO_SNAPSHOT: all are being written."""
        if not self._free and self._numbers:
            self.drop(next(iter(self._numbers)))
        return self._free.pop() if self._free else NO_SNAPSHOT

    def give_back(self, snapshot: int) -> None:
        """Nothing was written to it."""
        self._free.append(snapshot)

    def put(self, key: bytes, snapshot: int) -> None:
        """It is written. Where two rows read the same text at once, one copy is enough."""
        if key in self._numbers:
            self._free.append(snapshot)
        else:
            self._numbers[key] = snapshot

    def drop(self, key: bytes) -> None:
        snapshot = self._numbers.pop(key, NO_SNAPSHOT)
        if snapshot != NO_SNAPSHOT:
            self._free.append(snapshot)
