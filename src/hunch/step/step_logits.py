"""The memory of a step's logits: small steps on a CPU share it.

Shape letters: M rows of logits, D model width, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hunch.models.native import NativeDecoder
from hunch.models.target import Target

MAX_KEPT = 16  # rows of logits up to which the next step overwrites them


class StepLogits:
    """The target's logits, valid until the next step."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._network = target.network if isinstance(target, NativeDecoder) else None
        self._kept: dict[int, tuple[Tensor, np.ndarray]] = {}  # by number of rows
        if self._network is not None:
            kept_MV = torch.empty(MAX_KEPT, self._network.num_out)
            sizes = range(1, MAX_KEPT + 1)
            self._kept = {size: (kept_MV[:size], kept_MV[:size].numpy()) for size in sizes}

    def __call__(self, hidden_MD: Tensor) -> Tensor:
        kept = self._kept.get(hidden_MD.shape[0])
        if kept is None or self._network is None:
            logits_MV: Tensor = self.target.logits(hidden_MD)
            return logits_MV
        return self._network.logits(hidden_MD, kept[0])

    def array(self, logits_MV: Tensor) -> np.ndarray:
        """The logits as a float32 array on the host."""
        for tensor, array in self._kept.values():
            if tensor is logits_MV:
                return array
        return logits_MV.float().numpy()
