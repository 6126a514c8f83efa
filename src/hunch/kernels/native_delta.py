"""A gated delta net as the C++ kernels take it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from torch import Tensor

from hunch.kernels.delta import DeltaShape
from hunch.kernels.native import NativeMatrix
from hunch.kernels.native_structs import _Delta

_MATRICES = ("qkv", "beta", "decay", "gate")
_ROWS = ("conv", "rate", "bias", "norm")
_NUMBERS = ("num_k_heads", "num_v_heads", "k_dim", "v_dim", "num_taps", "is_tiled")


@dataclass(kw_only=True, slots=True)
class NativeDelta:
    """What the recurrence and its gate come from; the tensors are float32, beta and decay floats,
    as small differences add up in a state."""

    shape: DeltaShape
    qkv: NativeMatrix
    beta: NativeMatrix
    decay: NativeMatrix
    gate: NativeMatrix
    conv: Tensor  # [tap, channel]
    rate: Tensor
    bias: Tensor
    norm: Tensor
    eps: float
    _struct: _Delta = field(init=False)

    def __post_init__(self) -> None:
        self._struct = _Delta(
            eps=self.eps, **{name: getattr(self.shape, name) for name in _NUMBERS}
        )
        for name in _MATRICES:
            setattr(self._struct, name, getattr(self, name).handle)
        for name in _ROWS:
            setattr(self._struct, name, getattr(self, name).data_ptr())

    @property
    def address(self) -> int:
        """Of the struct, which lives as long as this object."""
        return ctypes.addressof(self._struct)

    def matrices(self) -> list[NativeMatrix]:
        return [getattr(self, name) for name in _MATRICES]
