"""Going on from a drafter's files alone, where the job that made them is not there any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hunch.models.heads.draft_model import CUT_FROM
from hunch.train.files import read_json


def job_of(folder: Path, target: str | None) -> dict[str, Any] | None:
    """The job that would have made a draft cut from its target, say one that comes with hunch."""
    config = read_json(folder / "config.json") or {}
    if CUT_FROM not in config:
        return None
    return {
        "method": "draft",
        "target": target or config[CUT_FROM],
        "prompts": "",
        "options": {
            "layers": ",".join(map(str, config["cut_layers"])),
            "share_tables": "true",
            "precision": "int8",
        },
    }
