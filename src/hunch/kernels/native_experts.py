"""A layer's experts as the C++ kernels take them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from torch import Tensor

from hunch.kernels.activation import KERNEL_NAMES
from hunch.kernels.experts import SCORES, Routing
from hunch.kernels.native import NativeMatrix
from hunch.kernels.native_structs import _ACTIVATIONS as ACTIVATIONS
from hunch.kernels.native_structs import _Experts

_MATRICES = ("router", "up", "down", "shared_up", "shared_down", "shared_gate")
_BIASES = ("router_bias", "choice_bias", "up_bias", "down_bias", "factor")
_NUMBERS = (
    "num_experts", "num_chosen", "is_normed", "num_groups", "num_groups_kept", "num_best", "scale",
    "is_of_input",
)  # fmt: skip


@dataclass(kw_only=True, slots=True)
class NativeExperts:
    """Router and shared gate are float matrices; biases float32. The matrices of all experts are
    one: `up` holds each expert's gate and up, `down` each expert's outputs."""

    routing: Routing
    width: int
    activation: str
    router: NativeMatrix
    up: NativeMatrix
    down: NativeMatrix
    shared_width: int = 0
    shared_up: NativeMatrix | None = None  # the gate's rows, then those of up
    shared_down: NativeMatrix | None = None
    shared_gate: NativeMatrix | None = None
    router_bias: Tensor | None = None
    choice_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    factor: Tensor | None = None  # of the weights of each expert
    _struct: _Experts = field(init=False)

    def __post_init__(self) -> None:
        self._struct = _Experts(
            width=self.width,
            shared_width=self.shared_width,
            activation=ACTIVATIONS.index(KERNEL_NAMES[self.activation]),
            scores=SCORES.index(self.routing.scores),
            **{name: getattr(self.routing, name) for name in _NUMBERS},
        )
        for name in _MATRICES:
            matrix = getattr(self, name)
            setattr(self._struct, name, None if matrix is None else matrix.handle)
        for name in _BIASES:
            bias = getattr(self, name)
            setattr(self._struct, name, None if bias is None else bias.data_ptr())

    @property
    def address(self) -> int:
        """Of the struct, which lives as long as this object."""
        return ctypes.addressof(self._struct)

    def matrices(self) -> list[NativeMatrix]:
        return [m for name in _MATRICES if (m := getattr(self, name)) is not None]
