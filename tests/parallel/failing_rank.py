"""A rank other than 0 that runs out of memory where a file says, in passes of several rows.

As `python -m hunch.parallel.follower`: failing_rank.py RANK SIZE DEVICE FOLDER. The file named by
PLANTED says the place and how often it fails; each failure adds a line to another beside it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hunch.kernels.kv_store import KVCache
from hunch.models.decoder import Decoder
from hunch.parallel import follower
from hunch.parallel.follower import Follower

PLANTED = "HUNCH_TESTS_PLANTED"


class Planted:
    """Fails in some calls of a place, while a pass of several rows is under way."""

    def __init__(self) -> None:
        self.place, self.every = "", 2
        self.num_rows = self.num_calls = self.num_failed = 0

    def fail(self, place: str) -> None:
        if self.num_rows > 1 and place == self.place:
            self.num_calls += 1
            if self.num_calls % self.every == 0:
                self.num_failed += 1
                self.failed()
                raise torch.OutOfMemoryError("CUDA out of memory")

    def failed(self) -> None:
        """Called with each failure."""

    def at(self, patch: pytest.MonkeyPatch, owner: Any, name: str, place: str) -> None:
        call = getattr(owner, name)

        def planted(*given: Any, **options: Any) -> Any:
            self.fail(place)
            return call(*given, **options)

        patch.setattr(owner, name, planted)

    def everywhere(self, patch: pytest.MonkeyPatch) -> None:
        self.at(patch, KVCache, "move", "move")
        self.at(patch, Decoder, "logits", "logits")
        run = Decoder.run

        def in_second_layer(own: Decoder, *given: Any) -> Any:
            layers, place = own.layers, min(1, len(own.layers) - 1)

            def layer(*inputs: Any) -> Any:
                self.fail("layer")
                return layers[place](*inputs)

            own.layers = [*layers[:place], layer, *layers[place + 1 :]]  # type: ignore[list-item]
            try:
                return run(own, *given)
            finally:
                own.layers = layers

        patch.setattr(Decoder, "run", in_second_layer)


class OfFile(Planted):
    """On a rank that only a file reaches."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def failed(self) -> None:
        with self.file.with_suffix(".failed").open("a") as noted:
            noted.write(f"{self.place}\n")

    def listen(self, patch: pytest.MonkeyPatch) -> None:
        run = Follower._run

        def noted(own: Follower, part: Any, asked: Any) -> None:
            place, every = self.file.read_text().split()
            if (place, int(every)) != (self.place, self.every):
                self.place, self.every, self.num_calls = place, int(every), 0
            self.num_rows = len(asked.attn.table_SB)
            run(own, part, asked)

        patch.setattr(Follower, "_run", noted)


if __name__ == "__main__":
    planted = OfFile(Path(os.environ[PLANTED]))
    with pytest.MonkeyPatch.context() as patch:
        planted.everywhere(patch)
        planted.listen(patch)
        sys.exit(follower.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])))
