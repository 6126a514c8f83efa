"""How byte-level vocabularies write bytes."""

from __future__ import annotations


def _byte_alphabet() -> dict[str, int]:
    """The characters byte-level vocabularies write bytes with: printable ones stand for
    themselves, the others are moved up past 255."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_alphabet()
