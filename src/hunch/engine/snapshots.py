"""Recurrent states at ends of blocks, kept so that a row can begin where another one was.

Blocks of KV serve every text that begins alike; a row's state holds all of its text at once, so it
has to be copied at the moment it stands at the end of a block. The device has a few slots for such
copies. Each is known by its block's key, and given away when the block is, or for a newer copy.
"""

from __future__ import annotations

from collections import OrderedDict

NO_SLOT = -1


class Snapshots:
    """Who has which slot; the one whose use is longest ago is given away first."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots))[::-1]
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by the key of the last block

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    def use(self, key: bytes) -> int:
        """The slot, for a row that begins now."""
        self._slots.move_to_end(key)
        return self._slots[key]

    def reserve(self) -> int:
        """A slot to write to, that nobody finds yet; NO_SLOT: all are being written."""
        if not self._free and self._slots:
            self.drop(next(iter(self._slots)))
        return self._free.pop() if self._free else NO_SLOT

    def give_back(self, slot: int) -> None:
        """Nothing was written to it."""
        self._free.append(slot)

    def put(self, key: bytes, slot: int) -> None:
        """It is written. Where two rows read the same text at once, one copy is enough."""
        if key in self._slots:
            self._free.append(slot)
        else:
            self._slots[key] = slot

    def drop(self, key: bytes) -> None:
        slot = self._slots.pop(key, NO_SLOT)
        if slot != NO_SLOT:
            self._free.append(slot)
