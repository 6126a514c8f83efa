"""JSON files beside weights: one object, or the index of shards; errors name the file."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from hunch.errors import ModelFormatError


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFormatError(f"{path} is missing; download the model again") from None
    except (ValueError, RecursionError) as error:
        raise ModelFormatError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelFormatError(f"{path} should hold one JSON object")
    return content


def refuse_unfinished(folder: Path) -> None:
    """Raise for the directory of a training job that has made no drafter yet."""
    if (folder / "work" / "job.json").is_file() and not (folder / "config.json").is_file():
        raise ModelFormatError(
            f"{folder}: a training job that has written no drafter yet; the command that began it "
            "goes on with it"
        )


def read_index(path: Path) -> dict[str, str]:
    """Each tensor's file, by an index of shards; files lie beside the index."""
    mapping = read_json(path).get("weight_map")
    if not isinstance(mapping, dict) or not all(isinstance(v, str) for v in mapping.values()):
        raise ModelFormatError(f"{path} has no weight_map; download the model again")
    for shard in set(mapping.values()):
        if Path(shard).name != shard:  # an index must not point outside its directory
            raise ModelFormatError(f"{path} names {shard!r}, which is no file beside it")
    return mapping


def shards_of(index: Path) -> list[Path]:
    """The files that an index names, all of which exist."""
    shards = [index.with_name(shard) for shard in sorted(set(read_index(index).values()))]
    for shard in shards:
        if not shard.is_file():
            raise ModelFormatError(
                f"{shard} is missing, though {index.name} names it. Download the model again"
            )
    return shards


def check_index(index: Path, held: Collection[str]) -> None:
    """Raise for tensors that an index names, where there is one, and no file holds."""
    missing = sorted(set(read_index(index)) - set(held)) if index.is_file() else []
    if missing:
        raise ModelFormatError(
            f"{index.parent}: {index.name} names {len(missing)} tensors that no file holds, "
            f"such as {missing[0]}. Download the model again"
        )
