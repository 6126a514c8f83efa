"""The target as it serves, loaded once for the engines of all stages of a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hunch.layers.block import Block
from hunch.layers.linear import Linear
from hunch.models.decoder import Decoder
from hunch.models.load import choose_dtype, spec_of
from hunch.models.target import OverProcesses, Target
from hunch.models.weights import Weights
from hunch.train.clock import CAPTURE, LOAD, Clock

if TYPE_CHECKING:
    from hunch import LLM

_ROOM = 4  # the target stays beside training if this many times its bytes are free


class Serving:
    """Opens engines over one copy of a target's weights."""

    def __init__(self, name: str, clock: Clock | None = None) -> None:
        self.name, self.clock = name, clock or Clock()
        self.target: Target | None = None  # None: not loaded yet, or released
        self.num_loads = 0
        self._tokenizer: Any = None

    @contextmanager
    def engine(self, arguments: Mapping[str, Any], *, is_greedy: bool = True) -> Iterator[LLM]:
        """An engine that decodes plainly. All engines of a job have the same arguments of the
        model; those of rows and memory may differ."""
        from hunch import LLM

        with self.clock.part(CAPTURE):
            llm = LLM.over(
                self.target,
                self.name,
                text=self._tokenizer,
                is_greedy=is_greedy,
                speculate="off",
                **arguments,
            )
            runner: Any = llm.engine.runner
            if self.target is None:
                self.num_loads += 1
                self.clock.move(LOAD, runner.load_seconds)
        self._tokenizer = llm.get_tokenizer()
        # A target over several processes ends with its engine.
        self.target = None if isinstance(runner.target, OverProcesses) else runner.target
        with llm:
            yield llm

    def decoder(self, weights: Weights) -> Decoder | None:
        """The same weights for training to read; None if kernels hold them in another form."""
        found = getattr(self.target, "decoder", None)
        if not isinstance(found, Decoder) or not _is_plain(found):
            return None
        is_same = found.spec == spec_of(weights)
        is_same &= found.dtype == choose_dtype("auto", found.spec, found.device)
        return found if is_same else None

    def make_room(self) -> None:
        """Release the target if a GPU has little room beside it; the next engine loads it again."""
        target = self.target
        if target is None or target.device.type != "cuda":
            return
        if torch.cuda.mem_get_info(target.device)[0] < _ROOM * target.weight_bytes:
            self.target = None


def _is_plain(decoder: Decoder) -> bool:
    """Whether kernels left its layers as they were read: all weights numbers, nothing split."""
    linears = [part for part in decoder.parts() if isinstance(part, Linear)]
    return (
        decoder.group.size == 1
        and all(type(layer) is Block for layer in decoder.layers)
        and all(isinstance(linear.weight, Tensor) for linear in linears)
    )
