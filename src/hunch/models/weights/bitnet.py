"""BitNet's matrices: numbers of -1, 0 and 1 with one scale, packed or still to be rounded.

Its products round what goes into them, too: it was trained so, and the config says it on.
Paper: arXiv 2402.17764.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hunch.errors import ModelFormatError, UnsupportedModelError
from hunch.models.reading import INPUT_BITS
from hunch.models.weights.base import Packed, WeightsOver

if TYPE_CHECKING:
    from hunch.models.weights.published import RawWeights

_PER_BYTE = 4
_SCALE = "weight_scale"
_MIN_MEAN = 1e-5


class BitnetWeights(WeightsOver):
    """`Weights` over the stored tensors."""

    method = "bitnet"

    def __init__(self, stored: RawWeights, settings: Mapping[str, Any]) -> None:
        super().__init__(stored)
        if settings.get("use_rms_norm"):
            raise UnsupportedModelError(
                "quantization_config: use_rms_norm of BitNet's products is not supported"
            )
        self._stored = stored
        self._is_online = settings.get("quantization_mode") == "online"
        self._is_divided = settings.get("linear_class", "bitlinear") == "bitlinear"
        self._raw = set(stored.raw_names())
        self.config = {k: v for k, v in stored.config.items() if k != "quantization_config"}
        self.config[INPUT_BITS] = 8

    def names(self) -> list[str]:
        return [name for name in sorted(self._raw) if not name.endswith(f".{_SCALE}")]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._raw:
            raise ModelFormatError(f"{self.path} has no tensor {name}")
        shape = tuple(self._stored.raw_shape(name))
        is_packed = self._scale_of(name) and not self._stored.raw(name).is_floating_point()
        return (shape[0] * _PER_BYTE, *shape[1:]) if is_packed else shape

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        stored, scale = self._stored.raw(name), self._scale_of(name)
        if scale:
            factor = self._stored.raw(scale).float()
            numbers = stored.float() if stored.is_floating_point() else unpacked(stored).float()
            return (numbers / factor if self._is_divided else numbers * factor).to(dtype)
        if not stored.is_floating_point():
            raise ModelFormatError(f"{self.path}: {name} is packed, and no {_SCALE} is beside it")
        is_matrix = name.endswith("_proj.weight") and stored.dim() == 2
        return (rounded(stored.float()) if self._is_online and is_matrix else stored).to(dtype)

    def packed(self, name: str) -> Packed | None:
        return None

    def _scale_of(self, name: str) -> str:
        scale = f"{name.removesuffix('weight')}{_SCALE}"
        return scale if name.endswith(".weight") and scale in self._raw else ""


def unpacked(packed: Tensor) -> Tensor:
    """Numbers of -1, 0 and 1: the lowest bits of all bytes are the first rows."""
    codes = packed.to(torch.uint8)
    return torch.cat([(codes >> 2 * part) & 3 for part in range(_PER_BYTE)]).to(torch.int8) - 1


def rounded(weight: Tensor) -> Tensor:
    """To -1, 0 or 1 times the mean of its numbers without their signs."""
    mean = weight.abs().mean().clamp(min=_MIN_MEAN)
    return (weight / mean).round().clamp(-1, 1) * mean
