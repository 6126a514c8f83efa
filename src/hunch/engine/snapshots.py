"""Recurrent states at ends of blocks, kept so that a row can start where another one has been.

Blocks of KV serve every text that begins alike. A row's state holds all of its text at once, so it
must be copied when the row is at the end of a block. The device has room for a few such copies, the
snapshots, which are known here by their numbers. Each is found by its block's key, and is reused
when the block is, or for a newer copy.
"""

from __future__ import annotations

from collections import OrderedDict

NO_SNAPSHOT = -1


class Snapshots:
    """Which state each snapshot holds; the one used longest ago is reused first."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))[::-1]
        self._numbers: OrderedDict[bytes, int] = OrderedDict()  # by the key of the last block

    def __contains__(self, key: bytes) -> bool:
        return key in self._numbers

    def use(self, key: bytes) -> int:
        """The snapshot of this key, for a row that starts with it."""
        self._numbers.move_to_end(key)
        return self._numbers[key]

    def reserve(self) -> int:
        """A snapshot to write to, which is not found yet; NO_SNAPSHOT: all are being written."""
        if not self._free and self._numbers:
            self.drop(next(iter(self._numbers)))
        return self._free.pop() if self._free else NO_SNAPSHOT

    def give_back(self, snapshot: int) -> None:
        """A reserved snapshot was not written."""
        self._free.append(snapshot)

    def put(self, key: bytes, snapshot: int) -> None:
        """A reserved snapshot was written; a second copy of the same text is dropped."""
        if key in self._numbers:
            self._free.append(snapshot)
        else:
            self._numbers[key] = snapshot

    def drop(self, key: bytes) -> None:
        snapshot = self._numbers.pop(key, NO_SNAPSHOT)
        if snapshot != NO_SNAPSHOT:
            self._free.append(snapshot)
