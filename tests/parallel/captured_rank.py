"""A rank other than 0 whose part of captured steps runs by their specification, on a CPU.

As `python -m hunch.parallel.follower`: captured_rank.py RANK SIZE DEVICE FOLDER.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import conftest  # noqa: F401  # Triton's kernels are read for its interpreter
from hunch.kernels.step import compact_ref
from hunch.models.load import load_decoder
from hunch.parallel import follower, part, step_parts
from hunch.parallel.group import NearGroup
from parallel.failing_rank import PLANTED
from stand_in import PlainTarget


def split_stand_in(patch: pytest.MonkeyPatch) -> None:
    """From here on, a part of a model on a CPU takes part in captured steps."""

    def load(config: Any, weights: Any, device: Any, group: Any, stage: Any) -> PlainTarget:
        decoder = load_decoder(weights, dtype="float32", device=device, group=group, stage=stage)
        return PlainTarget(decoder)

    patch.setattr(part, "load_target", load)
    patch.setattr(step_parts, "compact", compact_ref)
    patch.setattr(NearGroup, "is_captured", True)  # as graphs are run here, not captured


def plant(patch: pytest.MonkeyPatch, file: Path) -> None:
    """Let as many graphs as the file says find no memory while they are captured."""
    for name in ("_forward", "_finish", "_states"):
        body = getattr(step_parts.StepParts, name)

        def planted(own: Any, asked: Any, kv: Any, body: Any = body) -> Any:
            left = int(file.read_text())
            if left and asked not in own._graphs:
                file.write_text(str(left - 1))
                raise torch.OutOfMemoryError("CUDA out of memory")
            return body(own, asked, kv)

        patch.setattr(step_parts.StepParts, name, planted)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        split_stand_in(patch)
        plant(patch, Path(os.environ[PLANTED]))
        sys.exit(follower.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
