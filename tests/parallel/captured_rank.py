"""A rank other than 0 whose part of captured steps runs by their specification, on a CPU.

As `python -m hunch.parallel.follower`: captured_rank.py RANK SIZE DEVICE FOLDER.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import conftest  # noqa: F401  # Triton's kernels are read for its interpreter
from hunch.kernels.step import compact_ref
from hunch.models.load import load_decoder
from hunch.parallel import follower, part, step_parts
from hunch.parallel.group import NearGroup
from stand_in import PlainTarget


def split_stand_in(patch: pytest.MonkeyPatch) -> None:
    """From here on, a part of a model on a CPU takes part in captured steps."""

    def load(config: Any, weights: Any, device: Any, group: Any, stage: Any) -> PlainTarget:
        decoder = load_decoder(weights, dtype="float32", device=device, group=group, stage=stage)
        return PlainTarget(decoder)

    patch.setattr(part, "load_target", load)
    patch.setattr(step_parts, "compact", compact_ref)
    patch.setattr(NearGroup, "is_captured", True)  # as graphs are run here, not captured


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        split_stand_in(patch)
        sys.exit(follower.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
