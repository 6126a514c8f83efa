"""Drafters that were trained on this machine, by the target they draft for. No torch.

`hunch train` adds a line for what it made and `auto` looks for one: by the digest of the target's
files, else by the name the target was asked for. The list is one JSON file in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hunch.hub.wheel import cache_directory

LIST = "drafters.json"
# Methods whose networks `auto` drafts with beside lookups; others take its place.
BESIDE_LOOKUPS = (
    "draft", "eagle", "eagle3", "mtp", "medusa", "mlp", "dspark", "dflash", "dflash2",
)  # fmt: skip
PHRASES = "phrases"  # the method of a table, which goes beside every network
_PARTS, _PART_BYTES = 16, 1 << 16  # of each file that enter a digest, besides its size


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedDrafter:
    """A drafter's directory, and what it was measured to do beside its target."""

    target: str  # the name the target was asked for
    digest: str  # of the target's files
    method: str
    path: str
    device: str  # "cpu" or "cuda": where it was measured
    speedup: float  # over plain decoding, one request at a time
    tokens_per_pass: float


def digest_of(files: Path) -> str:
    """What tells a model's files from others: sizes, and samples of every part of them.

    Gigabytes are not read at every start: two files that agree in all samples are taken for one.
    """
    paths = [files]
    if files.is_dir():
        paths = sorted([*files.glob("*.safetensors"), *files.glob("*.gguf"), *files.glob("*.bin")])
        paths.append(files / "config.json")
    whole = hashlib.sha256()
    for path in paths:
        if not path.is_file():
            continue
        size = path.stat().st_size
        whole.update(f"{size}\n".encode())
        with path.open("rb") as file:
            for part in range(_PARTS):
                file.seek(max(size - _PART_BYTES, 0) * part // (_PARTS - 1))
                whole.update(file.read(_PART_BYTES))
    return whole.hexdigest()


def trained_drafters() -> list[TrainedDrafter]:
    """All of the list whose files are still there, newest first."""
    try:
        stored = json.loads((cache_directory() / LIST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return []
    found = [_read(one) for one in stored] if isinstance(stored, list) else []
    return [one for one in found if one is not None and (Path(one.path) / "config.json").is_file()]


def find_trained(
    name: str, files: Path, device: str, *, is_table: bool = False
) -> TrainedDrafter | None:
    """The newest drafter for a target asked for as `name`, measured on this kind of device: a
    network, or a phrase table."""
    known = [
        one
        for one in trained_drafters()
        if one.device == device and (one.method == PHRASES) is is_table
    ]
    if not known:
        return None
    digest = digest_of(files)
    by_digest = next((one for one in known if one.digest == digest), None)
    if by_digest is not None or Path(name).exists():
        return by_digest
    return next((one for one in known if one.target.lower() == name.lower()), None)


def add_trained(drafter: TrainedDrafter) -> None:
    """Put it first; of the same directory, the line before is dropped."""
    _write([drafter, *(one for one in trained_drafters() if one.path != drafter.path)])


def drop_trained(path: str) -> TrainedDrafter | None:
    """Take a directory off the list, its files stay; None: it is not on it."""
    known, wanted = trained_drafters(), str(Path(path).expanduser().resolve())
    gone = next((one for one in known if one.path == wanted), None)
    if gone is not None:
        _write([one for one in known if one is not gone])
    return gone


def _read(stored: Any) -> TrainedDrafter | None:
    """A line of the list; None for one that another version wrote in another form."""
    value_types = {"speedup": (int, float), "tokens_per_pass": (int, float)}
    names = [field.name for field in fields(TrainedDrafter)]
    if not isinstance(stored, dict) or set(names) - stored.keys():
        return None
    if not all(isinstance(stored[name], value_types.get(name, str)) for name in names):
        return None
    return TrainedDrafter(**{name: stored[name] for name in names})


def _write(drafters: list[TrainedDrafter]) -> None:
    path = cache_directory() / LIST
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{LIST}.{os.getpid()}")
    part.write_text(json.dumps([asdict(one) for one in drafters], indent=1) + "\n", "utf-8")
    part.replace(path)
