"""A target as a draft model on another device sees it: what they have in common, and no tensors."""

from __future__ import annotations

import torch

from hunch.models.backends import NATIVE, TORCH, TRITON, Backend
from hunch.models.spec import ModelSpec
from hunch.models.target import Target


class TargetBeside:
    """Stands for a target on another device where a draft model is loaded: it lends no tables."""

    tables = None

    def __init__(self, target: Target, device: torch.device) -> None:
        from hunch.kernels.native import is_available

        self.device = device
        self.spec: ModelSpec = target.spec
        self.weight_bytes = target.weight_bytes
        is_cpu = device.type == "cpu"
        # On a CPU a draft model reads its weights for every token: in 8 bits it is there sooner.
        self.is_quantised = is_cpu or target.is_quantised
        self.dtype = torch.float32 if is_cpu else torch.bfloat16
        self.backend: Backend = TRITON if not is_cpu else NATIVE if is_available() else TORCH
