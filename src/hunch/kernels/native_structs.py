"""What Python and the C++ kernels hand each other: the fields of csrc's structs, in their order."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from hunch.kernels.activation import KERNEL_NAMES
from hunch.kernels.attention import KVCache

if TYPE_CHECKING:
    from hunch.kernels.native import NativeMatrix
    from hunch.kernels.native_delta import NativeDelta
    from hunch.kernels.native_experts import NativeExperts
    from hunch.kernels.native_latent import NativeLatent

_POINTER, _I32, _I64, _F32 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_float

_MATRICES = ("q", "k", "v", "out", "gate", "up", "down")
_NORMS = ("attn_norm", "mlp_norm", "attn_out_norm", "mlp_out_norm")  # each with a bias
_ROWS = ("q_norm", "k_norm", "sinks", "rope")
_ACTIVATIONS = ("silu", "relu", "gelu", "gelu_tanh", "clipped")  # in the order of activation.h
_JOINS = ("joins", "is_state_first", "is_first_masked", "is_residual_normed")
# Of experts beside an MLP; then what queries are multiplied with, by position.
_LAST = ("experts_norm", "experts_out_norm", "beside_norm", "temper")
_BIASES = tuple(f"{name}_bias" for name in _MATRICES)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in _MATRICES),
        *((name + kind, _POINTER) for name in _NORMS for kind in ("", "_bias")),
        *((name, _POINTER) for name in (*_ROWS, *_BIASES)),
        *((name, _I64) for name in ("window", "k_row", "v_row", "up_row")),
        ("experts", _POINTER),
        *((name, _POINTER) for name in ("delta", "attn_gate", "attn_gate_bias")),
        ("place", _I64),
        *((name, _POINTER) for name in ("latent", "v_norm", "inputs")),
        ("stream_scale", _F32),
        *((name, _I32) for name in ("is_reader", "is_other", "ffn_width")),
        *((name, _POINTER) for name in _LAST),
    )


class _Inputs(ctypes.Structure):
    _fields_ = tuple((name, _POINTER) for name in ("gate", "project", "norm"))


class _Delta(ctypes.Structure):
    _fields_ = (
        *(
            (name, _POINTER)
            for name in ("qkv", "beta", "decay", "gate", "conv", "rate", "bias", "norm")
        ),
        *((name, _I32) for name in ("num_k_heads", "num_v_heads", "k_dim", "v_dim", "num_taps")),
        ("is_tiled", _I32),
        ("eps", _F32),
    )


class _States(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("state", "inputs", "folded")),
        *((name, _I64) for name in ("num_rows", "num_places", "num_spans")),
        ("spans", _POINTER),
    )


class _Latent(ctypes.Structure):
    _fields_ = (
        *(
            (name, _POINTER)
            for name in (
                "q_down", "q", "kv", "k_up", "v_up", "q_norm", "kv_norm", "q_bias", "kv_bias",
            )
        ),
        *((name, _I32) for name in ("flat", "turned", "latent", "value")),
        ("norm_eps", _F32),
    )  # fmt: skip


class _Experts(ctypes.Structure):
    _fields_ = (
        *(
            (name, _POINTER)
            for name in (
                "router", "up", "down", "router_bias", "choice_bias", "up_bias", "down_bias",
                "shared_up", "shared_down", "shared_gate",
            )
        ),
        *(
            (name, _I32)
            for name in (
                "num_experts", "num_chosen", "width", "shared_width", "scores", "is_normed",
                "num_groups", "num_groups_kept", "num_best", "activation",
            )
        ),
        ("scale", _F32),
        ("factor", _POINTER),
        ("is_of_input", _I32),
    )  # fmt: skip


REDUCE = ctypes.CFUNCTYPE(None, _POINTER, _I64)  # numbers and their count, summed in place


class _Spec(ctypes.Structure):
    _fields_ = (
        *(
            (name, _I32)
            for name in (
                "width", "ffn_width", "num_heads", "num_kv_heads", "head_dim", "num_layers",
                "is_half", "max_len",
            )
        ),
        ("norm_eps", _F32),
        ("scale", _F32),
        *(
            (name, _POINTER)
            for name in (
                "embedding", "head", "final_norm", "final_norm_bias", "rope", "positions", "layers",
                "project", "project_bias", "token_norm", "state_norm", "logits_norm",
            )
        ),
        *((name, _I32) for name in (*_JOINS, "is_fine")),
        *((name, _I32) for name in ("is_layer_norm", "is_post_norm", "activation")),
        *(
            (name, _F32)
            for name in ("embed_scale", "residual_scale", "logits_scale", "attn_cap", "logits_cap")
        ),
        ("reduce", REDUCE),
        *((name, _I32) for name in ("other_kv_heads", "other_head_dim", "table_width")),
        ("table_scale", _F32),
        *((name, _POINTER) for name in ("input_table", "input_project", "input_norm")),
    )  # fmt: skip


class _Pass(ctypes.Structure):
    _fields_ = (
        ("num_rows", _I64),
        *(
            (name, _POINTER)
            for name in ("ids", "embedded", "pos", "slot", "seq", "base", "table", "tree")
        ),
        *((name, _I64) for name in ("table_stride", "tree_stride", "block_size")),
        *((name, _POINTER) for name in ("k", "v")),
        ("layer_stride", _I64),
        ("num_features", _I64),
        *((name, _POINTER) for name in ("feature_layers", "features", "hidden", "state")),
        *((name, _POINTER) for name in ("states", "k_other", "v_other")),
        ("other_stride", _I64),
    )

    def place(self, places: KVPlaces) -> None:
        self.k, self.v, self.layer_stride = places[0]
        if len(places) > 1:
            self.k_other, self.v_other, self.other_stride = places[1]


KVPlaces = tuple[tuple[int, int, int], ...]


def kv_places(kv: KVCache, dtype: torch.dtype) -> KVPlaces:
    """Where keys and values start, and how far apart layers are, for each shape of heads."""
    k_LCMH, v_LCMH = kv.k_LCMH, kv.v_LCMH
    assert k_LCMH.dtype == v_LCMH.dtype == dtype
    assert k_LCMH[0].is_contiguous()
    assert v_LCMH.stride() == k_LCMH.stride()
    own = k_LCMH.data_ptr(), v_LCMH.data_ptr(), k_LCMH.stride(0)
    return (own, *(kv_places(kv.others, dtype) if kv.others is not None else ()))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def activation_number(name: str) -> int:
    """How the kernels are told an activation of Hugging Face's name."""
    return _ACTIVATIONS.index(KERNEL_NAMES[name])


class NativeInputs:
    """A layer's use of what a table says of its tokens."""

    def __init__(self, gate: NativeMatrix, project: NativeMatrix, norm: Tensor) -> None:
        self._keep = gate, project, norm
        self._struct = _Inputs(gate.handle, project.handle, norm.data_ptr())

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)

    def matrices(self) -> list[NativeMatrix]:
        return list(self._keep[:2])


@dataclass(kw_only=True, slots=True)
class NativeTable:
    """What is said of tokens to all layers: a table, and a projection of their embedding."""

    width: int  # numbers per layer
    scale: float  # of the table's
    table: NativeMatrix
    project: NativeMatrix
    norm: Tensor

    def fields(self) -> dict[str, int | float | None]:
        return {
            "table_width": self.width,
            "table_scale": self.scale,
            "input_table": self.table.handle,
            "input_project": self.project.handle,
            "input_norm": self.norm.data_ptr(),
        }


@dataclass(kw_only=True, slots=True)
class NativeLayer:
    """One decoder layer; norms and biases are float32."""

    MATRICES: ClassVar[tuple[str, ...]] = _MATRICES

    q: NativeMatrix | None  # None, as k and v: there is `delta` or `latent`
    k: NativeMatrix | None
    v: NativeMatrix | None
    out: NativeMatrix
    delta: NativeDelta | None = None
    attn_gate: NativeMatrix | None = None  # of what attention read
    place: int | None = None  # among the layers of its kind; None: all are of one kind
    gate: NativeMatrix | None = None  # None, as up and down: there are experts
    up: NativeMatrix | None = None
    down: NativeMatrix | None = None
    experts: NativeExperts | None = None
    latent: NativeLatent | None = None
    attn_norm: Tensor | None
    mlp_norm: Tensor | None  # None: the MLP reads what attention read
    attn_out_norm: Tensor | None = None  # of what is added to the stream
    mlp_out_norm: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    v_norm: Tensor | None = None
    sinks: Tensor | None = None
    rope: Tensor | None = None  # None: the network's
    biases: dict[str, Tensor | None]  # by the name of the matrix or norm
    window: int | None = None
    inputs: NativeInputs | None = None  # what it takes of a table
    stream_scale: float = 1.0  # of the stream at its end
    is_reader: bool = False  # it has q alone, and reads keys and values in its place
    is_other: bool = False  # its heads are of the network's other shape
    ffn_width: int = 0  # 0: the network's
    # Of experts beside an MLP: what they read, what they answer, and what the MLP answers.
    experts_norm: Tensor | None = None
    experts_out_norm: Tensor | None = None
    beside_norm: Tensor | None = None
    temper: Tensor | None = None  # of queries, by position

    def matrices(self) -> list[NativeMatrix]:
        found = [getattr(self, name) for name in _MATRICES]
        for part in (self.experts, self.delta, self.latent, self.inputs):
            found += [] if part is None else part.matrices()
        found.append(self.attn_gate)
        return [matrix for matrix in found if matrix is not None]

    def _struct(self, number: int) -> _Layer:
        place = number if self.place is None else self.place
        struct = _Layer(window=self.window or 0, place=place, stream_scale=self.stream_scale)
        struct.is_reader, struct.is_other = self.is_reader, self.is_other
        struct.ffn_width, struct.v_norm = self.ffn_width, _address(self.v_norm)
        if self.inputs is not None:
            struct.inputs = self.inputs.address
        if self.delta is not None:
            struct.delta = self.delta.address
        if self.attn_gate is not None:
            struct.attn_gate = self.attn_gate.handle
            struct.attn_gate_bias = _address(self.biases.get("attn_gate"))
        if self.experts is not None:
            struct.experts = self.experts.address
        if self.latent is not None:
            struct.latent = self.latent.address
        for name in _MATRICES:
            matrix = getattr(self, name)
            setattr(struct, name, None if matrix is None else matrix.handle)
            setattr(struct, f"{name}_bias", _address(self.biases.get(name)))
        for name in (*_NORMS, *_ROWS, *_LAST):
            setattr(struct, name, _address(getattr(self, name)))
        for name in _NORMS:
            setattr(struct, f"{name}_bias", _address(self.biases.get(name)))
        return struct


@dataclass(kw_only=True, slots=True)
class NativeShape:
    """The numbers a pass needs; names as in the model's spec."""

    width: int
    ffn_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    norm_eps: float
    scale: float
    is_layer_norm: bool = False
    is_post_norm: bool = False
    activation: int = 0  # its place in _ACTIVATIONS
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    attn_cap: float = 0.0
    logits_cap: float = 0.0
    other_kv_heads: int = 0  # of layers whose heads are of another shape; 0: there are none
    other_head_dim: int = 0


class Reduce:
    """A sum over processes that the kernels can call; what goes wrong in it is raised later."""

    def __init__(self, reduce: Callable[[Tensor], Tensor]) -> None:
        self._reduce = reduce
        self._error: Exception | None = None
        self.function = REDUCE(self._call)

    def _call(self, address: int, count: int) -> None:
        if self._error is not None:
            return
        part = torch.frombuffer((_F32 * count).from_address(address), dtype=torch.float32)
        try:
            part.copy_(self._reduce(part))
        except Exception as error:  # nothing may pass through the kernels' frames
            self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise self._error
