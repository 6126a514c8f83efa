"""Models of random weights, the same for the same seed."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

from hunch.models.decoder import Decoder
from hunch.models.source import Shape, Source
from hunch.models.spec import ModelSpec
from hunch.registry import MODELS, resolve


class RandomSource(Source):
    """Normal numbers keyed by seed and name: the same tensors in any order of asking."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> None:
        super().__init__(dtype)
        self.seed = seed
        self.scale = scale

    def read(self, name: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        key = zlib.crc32(name.encode()) ^ (self.seed * 0x9E3779B1 & 0xFFFFFFFF)
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(key))
        if len(shape) == 1:
            is_scale = ("norm" in name and name.endswith(".weight")) or name.endswith("_scalar")
            centre = 1.0 if is_scale else 0.0
            return centre + 0.1 * noise
        return noise * (self.scale / math.sqrt(shape[-1]))


def random_model(spec: ModelSpec, seed: int = 0) -> Decoder:
    family: type[Decoder] = resolve(MODELS, spec.architecture)
    return family(spec, RandomSource(seed))
