"""A layer's latent attention as the C++ kernels take it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from torch import Tensor

from hunch.kernels.native import NativeMatrix
from hunch.kernels.native_structs import _Latent

_MATRICES = ("q_down", "q", "kv", "k_up", "v_up")
_ROWS = ("q_norm", "kv_norm", "q_bias", "kv_bias")
_SIZES = ("flat", "turned", "latent", "value")


@dataclass(kw_only=True, slots=True)
class NativeLatent:
    """Norms and biases are float32; of `k_up`, each head's matrix is [latent, flat]."""

    q_down: NativeMatrix | None  # None: `q` reads the stream
    q: NativeMatrix
    kv: NativeMatrix
    k_up: NativeMatrix
    v_up: NativeMatrix
    q_norm: Tensor | None
    kv_norm: Tensor
    q_bias: Tensor | None = None  # of q_down
    kv_bias: Tensor | None = None
    flat: int  # width of a head's part without a position
    turned: int
    latent: int
    value: int
    norm_eps: float
    _struct: _Latent = field(init=False)

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in _SIZES}
        self._struct = _Latent(**sizes, norm_eps=self.norm_eps)
        for name in _MATRICES:
            matrix = getattr(self, name)
            setattr(self._struct, name, None if matrix is None else matrix.handle)
        for name in _ROWS:
            row = getattr(self, name)
            setattr(self._struct, name, None if row is None else row.data_ptr())

    @property
    def address(self) -> int:
        """Of the struct, which lives as long as this object."""
        return ctypes.addressof(self._struct)

    def matrices(self) -> list[NativeMatrix]:
        return [m for name in _MATRICES if (m := getattr(self, name)) is not None]
