"""What to write after speculate= for every registry entry, on a small model."""

from pathlib import Path


def speculate_for(speculate: str, target: Path, files: Path) -> str:
    """A registry name, or a whole speculate text, made runnable: networks get their files."""
    return speculate
