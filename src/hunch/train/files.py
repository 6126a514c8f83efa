"""Files that are either whole or not there, and plain words for a full disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hunch.errors import CapacityError


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file, then move it to `path`: a kill leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    try:
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise CapacityError(
                f"no room left on the disk for {path}; free some and run the same command again: "
                "everything before this file is kept"
            ) from None
        raise


def write_json(path: Path, value: Any, *, indent: int | None = 1) -> None:
    """None: on one line, in a fourth of the time that millions of numbers take otherwise."""
    text = json.dumps(value, indent=indent)
    write_whole(path, lambda part: part.write_text(text + "\n", encoding="utf-8"))


def read_json(path: Path) -> Any:
    """The value, or None where there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
